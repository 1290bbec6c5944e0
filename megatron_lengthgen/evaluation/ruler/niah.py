"""Needle-in-a-haystack prompts.

Source: NVIDIA/RULER ``scripts/data/synthetic/niah.py``: the same words in the same places. What differs: draws are
keyed by sample (see ``streams.py``), each sample fills its own length, and keys never repeat within a sample.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .essays import Essays
from .fit import Filler
from .question import Rendering, around
from .streams import stream
from .tasks import Niah
from .templates import NEEDLE, NIAH, NIAH_PREFIX, NOISE, singular
from .words import WordLists, distinct

__all__ = ["DEPTHS", "Draw", "EssayFiller", "Needles", "UniformFiller", "context", "draw", "question"]

#: Per cent of the sentences before an essay needle: forty depths, rounded to whole numbers.
DEPTHS = tuple(int(depth) for depth in np.round(np.linspace(0, 100, num=40)))


@dataclass(frozen=True)
class Draw:
    """What a sample asks, apart from its haystack.

    Attributes:
        key: the stream key of the sample; haystack draws derive from it.
        keys: the keys of the needles.
        needles: sentences in the order in which they are placed.
        asked: indices of the needles that hold an answer.
        query: the keys asked for, as the question names them.
        outputs: the values that answer it.
    """

    key: tuple[str | int, ...]
    keys: tuple[str, ...]
    needles: tuple[str, ...]
    asked: tuple[int, ...]
    query: str
    outputs: tuple[str, ...]


def draw(task: Niah, words: WordLists, key: tuple[str | int, ...]) -> Draw:
    """Keys, values, their order and the question of the sample with this stream key."""
    rng = stream(*key, "needles")
    keys = distinct(task.key, task.distinct_keys, rng, words)
    flat = distinct(task.value, task.distinct_keys * task.values, rng, words)
    values = [flat[i * task.values : (i + 1) * task.values] for i in range(task.distinct_keys)]
    pairs = [(k, v) for k, its_values in zip(keys, values, strict=True) for v in its_values]
    rng.shuffle(pairs)
    queried = [keys[i] for i in rng.sample(range(task.distinct_keys), task.queries)]
    return Draw(
        key=key,
        keys=tuple(keys),
        needles=tuple(NEEDLE.format(type_needle_v=task.value, key=k, value=v) for k, v in pairs),
        asked=tuple(i for i, (k, _) in enumerate(pairs) if k in queried),
        query=queried[0] if len(queried) == 1 else f"{', '.join(queried[:-1])}, and {queried[-1]}",
        outputs=tuple(v for k in queried for v in values[keys.index(k)]),
    )


def question(task: Niah, drawn: Draw, text: Sequence[str]) -> tuple[list[str], str]:
    """The user's text around the pieces of a context, and the answer prefix."""
    body, prefix, kind = NIAH, NIAH_PREFIX, str(task.value)
    if task.queries * task.values == 1:
        body, prefix, kind = singular(body), singular(prefix), kind[:-1]
    return (
        around(body, text, type_needle_v=kind, query=drawn.query),
        prefix.format(type_needle_v=kind, query=drawn.query),
    )


def context(
    task: Niah, drawn: Draw, size: int, essays: Essays | None, words: WordLists
) -> tuple[list[str], tuple[float, ...]]:
    """The haystack of ``size`` units with the needles in it.

    Returns:
        The text in pieces, and for each needle that holds an answer the share of the haystack before it, in [0, 1].
    """
    if task.haystack == "essay":
        assert essays is not None
        return _essay_context(drawn, essays.first(size))
    if task.haystack == "noise":
        lines = [NOISE] * size
    else:
        keys = distinct(task.key, size, stream(*drawn.key, "haystack keys"), words, drawn.keys)
        values = distinct(task.value, size, stream(*drawn.key, "haystack values"), words, drawn.outputs)
        pairs = zip(keys, values, strict=True)
        lines = [NEEDLE.format(type_needle_v=task.value, key=k, value=v) for k, v in pairs]
    return _line_context(drawn, lines)


def _essay_context(drawn: Draw, sentences: list[str]) -> tuple[list[str], tuple[float, ...]]:
    depths = sorted(stream(*drawn.key, "depths").sample(DEPTHS, len(drawn.needles)))
    places = [int(len(sentences) * (depth / 100)) for depth in depths]
    spaced = [" " + sentence for sentence in sentences]
    pieces: list[str] = []
    for (last, place), needle in zip(itertools.pairwise([0, *places]), drawn.needles, strict=True):
        # RULER joins the stretches between needles with spaces; an empty one counts, so that two spaces meet.
        pieces += spaced[last:place]
        pieces.append(" " + needle if last < place else "  " + needle)
    pieces += spaced[places[-1] :]
    if places[-1] == len(sentences):
        pieces[-1] += " "
    pieces[0] = pieces[0][1:]
    return pieces, tuple(depths[i] / 100 for i in drawn.asked)


def _line_context(drawn: Draw, lines: list[str]) -> tuple[list[str], tuple[float, ...]]:
    # From the last place to the first, so that an insertion moves no place that is still to come.
    places = sorted(stream(*drawn.key, "places").sample(range(len(lines)), len(drawn.needles)), reverse=True)
    text = list(lines)
    for place, needle in zip(places, drawn.needles, strict=True):
        text.insert(place, needle)
    pieces = [line + "\n" for line in text]
    pieces[-1] = text[-1]
    return pieces, tuple(places[i] / len(lines) for i in drawn.asked)


@dataclass(frozen=True)
class Needles:
    """A drawn needle question (see :class:`.question.Question`)."""

    task: Niah
    drawn: Draw
    essays: Essays | None
    words: WordLists

    @property
    def minimum(self) -> int:
        """One word of an essay; of lines, as many as there are needles."""
        return 1 if self.task.haystack == "essay" else len(self.drawn.needles)

    def render(self, size: int) -> Rendering:
        text, depths = context(self.task, self.drawn, size, self.essays, self.words)
        pieces, prefix = question(self.task, self.drawn, text)
        return Rendering(pieces, prefix, self.drawn.outputs, depths)


class UniformFiller(Filler):
    """Blocks of about equal length: noise and needles."""

    def __init__(self, tokens_per_unit: float, minimum: int) -> None:
        self.minimum = minimum
        self._per_unit = tokens_per_unit

    def tokens(self, size: int) -> float:
        return size * self._per_unit

    def size(self, tokens: float) -> int:
        return int(tokens // self._per_unit)


class EssayFiller(Filler):
    """Words of essays, from the token count of each sentence, found once.

    Args:
        essays: the text.
        count: token counts of a list of texts.
    """

    minimum = 1

    def __init__(self, essays: Essays, count: Callable[[list[str]], list[int]]) -> None:
        counts = np.asarray(count([" " + sentence for sentence in essays.sentences]), dtype=np.float64)
        sentence = np.searchsorted(essays.starts, essays.word_ends, side="left") - 1
        lengths = np.maximum(essays.ends - essays.starts, 1)
        share = np.minimum((essays.word_ends - essays.starts[sentence]) / lengths[sentence], 1.0)
        before = np.concatenate([[0.0], np.cumsum(counts)])
        #: [words] tokens up to and including each word; within a sentence in proportion to characters.
        self._cumulative: NDArray[np.float64] = before[sentence] + counts[sentence] * share

    def tokens(self, size: int) -> float:
        copies, rest = divmod(size, len(self._cumulative))
        return copies * float(self._cumulative[-1]) + (float(self._cumulative[rest - 1]) if rest else 0.0)

    def size(self, tokens: float) -> int:
        copies, rest = divmod(tokens, float(self._cumulative[-1]))
        return int(copies) * len(self._cumulative) + int(np.searchsorted(self._cumulative, rest, side="right"))
