"""Frequent words: coded words with frequencies after a zeta distribution; the most frequent is noise, written as dots.

Source: NVIDIA/RULER ``scripts/data/synthetic/freq_words_extraction.py``.
"""

import math
import string

import numpy as np

from .question import Rendering, around
from .streams import Distinct, shuffled, stream
from .tasks import FrequentWords
from .templates import FREQUENT_WORDS, FREQUENT_WORDS_PREFIX

__all__ = ["CodedWords"]

_LETTERS, _NOISE, _ASKED = 6, "...", 3
#: One word of the vocabulary for so many tokens of prompt.
_TOKENS_PER_WORD = 50


class CodedWords:
    """A drawn question; its size is the number of words before rounding, noise included.

    Args:
        key: the stream key of the sample.
        budget: tokens of the prompt, which decide the size of the vocabulary.
    """

    def __init__(self, task: FrequentWords, key: tuple[str | int, ...], budget: int) -> None:
        from scipy.special import zeta

        self._key, self._alpha, self._zeta = key, task.alpha, float(zeta(task.alpha))
        self._vocabulary = max(budget // _TOKENS_PER_WORD, _ASKED + 1)
        rng = stream(*key, "words")
        self._coded = Distinct(lambda: "".join(rng.choices(string.ascii_lowercase, k=_LETTERS)))
        # From here on the last word asked for stands more often than the next, so that the answer is one.
        last, following = ((rank**-self._alpha) / self._zeta for rank in (_ASKED + 1, _ASKED + 2))
        self.minimum = math.ceil(1 / (last - following))

    def render(self, size: int) -> Rendering:
        ranks = np.arange(1, min(self._vocabulary, self._ranks(size)) + 1, dtype=np.float64)
        counts = (size * ranks**-self._alpha / self._zeta).astype(int)
        vocabulary = [_NOISE, *self._coded.first(len(ranks) - 1)]
        words = [" " + word for word, count in zip(vocabulary, counts.tolist(), strict=True) for _ in range(count)]
        words = shuffled(words, *self._key, "order")
        pieces = around(FREQUENT_WORDS, [words[0][1:], *words[1:]])
        return Rendering(pieces, FREQUENT_WORDS_PREFIX, tuple(vocabulary[1 : _ASKED + 1]))

    def _ranks(self, size: int) -> int:
        """Ranks that stand at least once, or one more; never fewer than the answer has."""
        return max(math.ceil((size / self._zeta) ** (1 / self._alpha)), _ASKED + 1)
