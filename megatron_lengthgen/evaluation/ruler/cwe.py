"""Common words: a numbered list in which some words stand more often than others, after one worked example.

Source: NVIDIA/RULER ``scripts/data/synthetic/common_words_extraction.py``. Below 4,096 tokens it repeats words less
often, and its example is shorter. Where a list asks for more words than wonderwords has (8,166), RULER draws all of
them from its ``english_words.json``; without that file, and past its end, the rest here are adjective-noun pairs, so
that there is no longest list.

With a chat template RULER writes the example as a turn of its own, without an end of turn; here it is part of the
user's text, as the example of variable tracking is in RULER too.
"""

from collections.abc import Sequence

from .question import Rendering, around
from .streams import Distinct, shuffled, stream
from .tasks import CommonWords
from .templates import COMMON_WORDS, COMMON_WORDS_PREFIX
from .words import WordLists, draw

__all__ = ["Words"]

#: RULER's shorter lists below this length: repeats of common and other words; in the example its words and repeats too.
_SHORT, _SHORT_REPEATS, _SHORT_EXAMPLE = 4096, (6, 1), (20, 3, 1)
_EXAMPLE = (40, 10, 3)


class Words:
    """A drawn question; its size is the number of different words.

    Args:
        key: the stream key of the sample.
        max_length: the length it is to fill, in tokens.
    """

    def __init__(self, task: CommonWords, words: WordLists, key: tuple[str | int, ...], max_length: int) -> None:
        self.minimum = task.common
        self._words, self._key = words, key
        self._repeats, shown = (task.common_repeats, task.other_repeats), _EXAMPLE
        if max_length < _SHORT:
            self._repeats, shown = _SHORT_REPEATS, _SHORT_EXAMPLE
        self._plain, self._english, self._pairs, self._shown = (
            stream(*key, name) for name in ("words", "english", "pairs", "example")
        )
        self._from_plain = Distinct(lambda: self._plain.choice(words.common))
        self._from_english = Distinct(lambda: self._english.choice(words.english))
        everything = {*words.common, *words.english}
        self._from_pairs = Distinct(lambda: draw("words", self._pairs, words), everything)
        self._before = self._example(*shown)

    def render(self, size: int) -> Rendering:
        chosen = self._choose(size)
        context, outputs = self._list(chosen, *self._repeats, "order")
        pieces = around(COMMON_WORDS, context)
        return Rendering([self._before, *pieces], COMMON_WORDS_PREFIX, outputs)

    def _choose(self, size: int) -> list[str]:
        if size <= len(self._words.common):
            return self._from_plain.first(size)
        source, drawn = (
            (self._words.english, self._from_english)
            if len(self._words.english) > len(self._words.common)
            else (self._words.common, self._from_plain)
        )
        return drawn.first(min(size, len(source))) + self._from_pairs.first(max(0, size - len(source)))

    def _list(
        self, chosen: Sequence[str], common_repeats: int, other_repeats: int, order: str
    ) -> tuple[list[str], tuple[str, ...]]:
        """The numbered list in pieces, and its common words."""
        common, others = chosen[: self.minimum], chosen[self.minimum :]
        entries = [*common] * common_repeats + [*others] * other_repeats
        entries = shuffled(entries, *self._key, order)
        pieces = [piece for number, word in enumerate(entries, 1) for piece in (f" {number}.", f" {word}")]
        pieces[0] = pieces[0][1:]
        return pieces, tuple(common)

    def _example(self, size: int, common_repeats: int, other_repeats: int) -> str:
        chosen = Distinct(lambda: self._shown.choice(self._words.common)).first(size)
        context, outputs = self._list(chosen, common_repeats, other_repeats, "example order")
        answer = " ".join(f"{number}. {word}" for number, word in enumerate(outputs, 1))
        return f"{''.join(around(COMMON_WORDS, context))}{COMMON_WORDS_PREFIX} {answer}\n"
