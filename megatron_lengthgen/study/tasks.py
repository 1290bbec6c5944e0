"""Synthetic tasks in which length alone changes: token ids and the positions whose tokens are asked for.

A sample is a pure function of (task, seed, split, index, length): no files, no tokenizer, no state.
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np

from megatron_lengthgen.choices import check_choice, check_keys
from megatron_lengthgen.errors import UserError

__all__ = ["TASKS", "Counting", "Recall", "Sample", "Split", "Task", "from_mapping", "sample"]

Split = Literal["training", "validation", "evaluation"]
_SPLITS: tuple[Split, ...] = ("training", "validation", "evaluation")


class Sample(NamedTuple):
    """One sequence.

    Attributes:
        tokens: Token ids ``[length + 1]``, int64: a model sees all but the last.
        answers: Positions ``[answers]`` of ``tokens`` at which a token is asked for.
    """

    tokens: np.ndarray
    answers: np.ndarray


class Task(Protocol):
    """What a task is to the trainer and to the evaluation."""

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""

    @property
    def min_length(self) -> int:
        """Tokens of the shortest sample, without filler."""

    @property
    def candidates(self) -> range:
        """Token ids that can be an answer."""

    def draw(self, random: np.random.Generator, length: int, split: Split) -> Sample:
        """A sample of ``length + 1`` tokens from ``random``."""


@functools.cache
def _markov_chain(states: int, successors: int) -> np.ndarray:
    """Successors ``[states, successors]`` of each state, distinct and the same in all runs."""
    random = np.random.default_rng([states, successors])
    return np.stack([random.choice(states, successors, replace=False) for _ in range(states)])


def _filler(random: np.random.Generator, count: int, states: int, successors: int) -> np.ndarray:
    """``count`` tokens of a Markov walk over token ids ``0 .. states - 1``."""
    table = _markov_chain(states, successors)
    steps = random.integers(successors, size=count).tolist()
    rows = table.tolist()
    state = int(random.integers(states))
    walk = np.empty(count, np.int64)
    for place, step in enumerate(steps):
        state = rows[state][step]
        walk[place] = state
    return walk


def _scatter(random: np.random.Generator, filler: np.ndarray, pieces: list[np.ndarray]) -> np.ndarray:
    """``pieces`` in the order given, each whole, at uniformly random places between the tokens of ``filler``."""
    places = np.sort(random.integers(len(filler) + 1, size=len(pieces)))
    parts: list[np.ndarray] = []
    start = 0
    for place, piece in zip(places, pieces, strict=True):
        parts += [filler[start:place], piece]
        start = place
    return np.concatenate([*parts, filler[start:]])


@dataclasses.dataclass(frozen=True)
class Recall:
    """Several needles ``<K> key value`` at random depth in filler; at the end, queries ``<Q> key`` for their values.

    The filler is a Markov walk in which some tokens are replaced by keys and values without their mark, so that a
    key alone does not tell where its needle is.

    Attributes:
        needles: Needles and queries; every needle is asked for once.
        keys, values: Number of different ones.
        states, successors: Of the Markov chain.
        distractors: Share of the filler that is replaced by a key or value.
    """

    name: ClassVar[str] = "recall"
    needles: int = 6
    keys: int = 32
    values: int = 32
    states: int = 48
    successors: int = 4
    distractors: float = 0.15

    def __post_init__(self) -> None:
        _check_counts(self, ("needles", "keys", "values", "states", "successors"))
        if self.needles > self.keys:
            raise UserError(f"recall has {self.needles} needles and {self.keys} keys: every needle needs its own key")
        _check_filler(self)
        if not 0 <= self.distractors < 1:
            raise UserError(f"distractors must be a share in [0, 1), got {self.distractors}")

    @property
    def vocab_size(self) -> int:
        return self.states + self.keys + self.values + 2

    @property
    def min_length(self) -> int:
        return 6 * self.needles

    @property
    def candidates(self) -> range:
        return range(self.states + self.keys, self.states + self.keys + self.values)

    def draw(self, random: np.random.Generator, length: int, split: Split) -> Sample:
        first_key, first_value = self.states, self.states + self.keys
        needle_mark, query_mark = self.vocab_size - 2, self.vocab_size - 1
        filler = _filler(random, length + 1 - self.min_length, self.states, self.successors)
        bare = random.random(len(filler)) < self.distractors
        filler[bare] = random.integers(first_key, first_key + self.keys + self.values, size=int(bare.sum()))
        keys = first_key + random.choice(self.keys, self.needles, replace=False)
        values = first_value + random.integers(self.values, size=self.needles)
        needles = np.stack([np.full(self.needles, needle_mark), keys, values], axis=1)
        order = random.permutation(self.needles)
        queries = np.stack([np.full(self.needles, query_mark), keys[order], values[order]], axis=1)
        tokens = np.concatenate([_scatter(random, filler, list(needles)), queries.ravel()])
        answers = np.arange(length + 1 - 3 * self.needles + 2, length + 1, 3)
        return Sample(tokens, answers)


@dataclasses.dataclass(frozen=True)
class Counting:
    """How many of a marked token were seen: ``<C>`` at the end, and then the token of that number.

    The number is uniform over ``0 .. max_count`` at every length, so that a longer sequence is the same question in
    more filler. In training the question comes anywhere, with more filler after it: asked at the end alone, a model
    could answer by the share of marked tokens, which is another number at another length.

    Attributes:
        max_count: The largest number.
        states, successors: Of the filler's Markov chain.
    """

    name: ClassVar[str] = "counting"
    max_count: int = 15
    states: int = 48
    successors: int = 4

    def __post_init__(self) -> None:
        _check_counts(self, ("max_count", "states", "successors"))
        _check_filler(self)

    @property
    def vocab_size(self) -> int:
        return self.states + self.max_count + 3

    @property
    def min_length(self) -> int:
        return self.max_count + 2

    @property
    def candidates(self) -> range:
        """In the order of the numbers that they stand for."""
        return range(self.states, self.states + self.max_count + 1)

    def draw(self, random: np.random.Generator, length: int, split: Split) -> Sample:
        marked, question = self.vocab_size - 2, self.vocab_size - 1
        end = length if split == "evaluation" else int(random.integers(self.min_length - 1, length + 1))
        count = int(random.integers(self.max_count + 1))
        filler = _filler(random, length - 1 - count, self.states, self.successors)
        seen = _scatter(random, filler[: end - 1 - count], [np.array([marked])] * count)
        tokens = np.concatenate([seen, [question, self.candidates[count]], filler[end - 1 - count :]])
        return Sample(tokens, np.array([end]))


def _check_counts(task: Any, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(task, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} of task {task.name} must be a positive whole number, got {value!r}")


def _check_filler(task: Any) -> None:
    if task.successors > task.states:
        raise UserError(f"task {task.name} has {task.states} states, which cannot have {task.successors} successors")


TASKS: dict[str, type[Recall] | type[Counting]] = {"recall": Recall, "counting": Counting}


def from_mapping(mapping: Mapping[str, Any]) -> Recall | Counting:
    """A task from a configuration section such as ``{name: recall, needles: 6}``.

    Raises:
        UserError: an unknown task, key or value.
    """
    options = dict(mapping)
    name = options.pop("name", None)
    check_choice("task", name, TASKS)
    task = TASKS[name]
    check_keys(f"task {name}", options, (field.name for field in dataclasses.fields(task)))
    return task(**options)


def sample(task: Task, length: int, *, seed: int, split: Split, index: int) -> Sample:
    """Sample ``index`` of a split; the same for the same arguments, on any machine and in any order.

    Args:
        task: The task.
        length: Tokens that a model sees.
        seed: Of the data.
        split: ``training``, ``validation`` or ``evaluation``: other samples each.
        index: From 0.

    Raises:
        UserError: a length that does not hold the task.
    """
    if length + 1 < task.min_length:
        raise UserError(f"length {length} does not hold the task, which needs {task.min_length - 1} tokens")
    random = np.random.default_rng([seed, _SPLITS.index(split), length, index])
    return task.draw(random, length, split)
