"""Filling a length: the largest haystack whose prompt still leaves room for the answer."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Filler", "Fitted", "fit", "largest"]

#: A prompt that uses all but this share of its budget is not worth another encoding.
_SLACK = 1 / 500


class Filler(Protocol):
    """Knows about how many tokens a haystack of a given size takes, without encoding it.

    Sizes are counted in the haystack's own unit (words of essays, blocks of noise, needles).
    """

    minimum: int

    def tokens(self, size: int) -> float:
        """About how many tokens ``size`` units take; non-decreasing."""

    def size(self, tokens: float) -> int:
        """The largest size whose ``tokens(size)`` is at most ``tokens``; may be below ``minimum``."""


@dataclass(frozen=True)
class Fitted:
    """Args:
    size: haystack units used.
    tokens: tokens of the whole prompt.
    counts: how often a prompt was counted to find it.
    """

    size: int
    tokens: int
    counts: int


def fit(count: Callable[[int], int], filler: Filler, budget: int, attempts: int = 12) -> Fitted:
    """Find a size whose prompt has at most ``budget`` tokens and nearly all of them.

    ``count(size)`` is the exact number of tokens of the complete prompt; the filler only says where to look. A short
    and one or two complete prompts are counted as a rule, against some fifteen in a binary search.

    Returns:
        The best fit seen. Its tokens exceed ``budget`` only when even ``filler.minimum`` does not fit.
    """
    tokens = count(filler.minimum)
    best = Fitted(filler.minimum, tokens, 1)
    if tokens > budget:
        return best
    slack = max(2, int(budget * _SLACK))
    size, too_large = filler.minimum, None
    for counts in range(2, attempts + 2):
        # What the estimate missed at the last size (template, needles, merges across joints) is missed at the next too.
        size = filler.size(budget - slack // 2 - (tokens - filler.tokens(size)))
        if too_large is not None:
            size = min(size, too_large - 1)
        if size <= best.size:
            break
        tokens = count(size)
        if tokens > budget:
            too_large = size
        else:
            best = Fitted(size, tokens, counts)
            if budget - tokens <= slack:
                break
    return Fitted(best.size, best.tokens, counts)


def largest(count: Callable[[int], int], minimum: int, budget: int, guess: int | None = None) -> Fitted:
    """The largest size whose prompt has at most ``budget`` tokens, for a count that grows with the size.

    Interpolates between a size that fits and one that does not, and halves what is left when that gains too little.

    Args:
        guess: where to look first. Any guess gives the same result; a near one gives it sooner.

    Returns:
        The fit. Its tokens exceed ``budget`` only when even ``minimum`` does not fit.
    """
    low, low_tokens, counts = minimum, count(minimum), 1
    if low_tokens > budget:
        return Fitted(low, low_tokens, counts)
    high: int | None = None
    high_tokens, halve = 0, False
    size = guess if guess is not None and guess > low else 2 * low + 8
    while high is None or high - low > 1:
        tokens = count(size)
        counts += 1
        before = None if high is None else high - low
        if tokens <= budget:
            # Units may be of unequal size: the slope from the last step is a guess, so at most fourfold.
            slope = (tokens - low_tokens) / (size - low)
            reach = int((budget - tokens) / slope) + 1 if slope > 0 else 3 * size
            low, low_tokens = size, tokens
        else:
            high, high_tokens, reach = size, tokens, 0
        if high is None:
            size = low + min(max(reach, 1), 3 * low + 8)
            continue
        halve = not halve and before is not None and high - low > before // 2
        share = 0.5 if halve else (budget - low_tokens) / (high_tokens - low_tokens)
        size = min(max(low + round((high - low) * share), low + 1), high - 1)
    return Fitted(low, low_tokens, counts)
