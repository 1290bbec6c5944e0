"""Filling a length: the largest haystack whose prompt still leaves room for the answer."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Filler", "Fitted", "fit"]

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
    ids: token ids of the whole prompt.
    encodings: how often a prompt was encoded to find it.
    """

    size: int
    ids: list[int]
    encodings: int


def fit(encode: Callable[[int], Sequence[int]], filler: Filler, budget: int, attempts: int = 12) -> Fitted:
    """Find a size whose encoded prompt has at most ``budget`` tokens and nearly all of them.

    ``encode(size)`` renders and encodes the complete prompt, so the returned ids are exact; the filler only says where
    to look. A short and one or two complete prompts are encoded as a rule, against some fifteen in a binary search.

    Returns:
        The best fit seen. Its ids exceed ``budget`` only when even ``filler.minimum`` does not fit.
    """
    ids = list(encode(filler.minimum))
    best = Fitted(filler.minimum, ids, 1)
    if len(ids) > budget:
        return best
    slack = max(2, int(budget * _SLACK))
    size, too_large = filler.minimum, None
    for encodings in range(2, attempts + 2):
        # What the estimate missed at the last size (template, needles, merges across joints) is missed at the next too.
        size = filler.size(budget - slack // 2 - (len(ids) - filler.tokens(size)))
        if too_large is not None:
            size = min(size, too_large - 1)
        if size <= best.size:
            break
        ids = list(encode(size))
        if len(ids) > budget:
            too_large = size
        else:
            best = Fitted(size, ids, encodings)
            if budget - len(ids) <= slack:
                break
    return Fitted(best.size, best.ids, encodings)
