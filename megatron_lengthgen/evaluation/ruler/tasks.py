"""RULER's tasks: their arguments, budget of new tokens and metric.

Source: NVIDIA/RULER ``scripts/synthetic.yaml`` and the two ``constants.py`` (data and evaluation).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_lengthgen.errors import UserError

__all__ = [
    "ALL_TASKS",
    "TASKS",
    "CommonWords",
    "FrequentWords",
    "Niah",
    "QuestionAnswering",
    "Task",
    "VariableTracking",
    "parse_tasks",
]

Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]
Metric = Literal["all", "part"]


@dataclass(frozen=True)
class Task:
    """What all tasks have.

    Args:
        name: RULER's name.
        tokens_to_generate: RULER's budget of new tokens.
        metric: share of the references found, or whether any is.
    """

    name: str
    tokens_to_generate: int = 128
    metric: Metric = "all"

    @property
    def needs(self) -> str | None:
        """The data it needs besides word lists: ``essays``, ``squad``, ``hotpotqa`` or none."""
        return None


@dataclass(frozen=True)
class Niah(Task):
    """A needle-in-a-haystack task.

    Args:
        haystack: what hides the needles: repeated noise sentences, essays, or other needles.
        key, value: what a needle's key and value look like.
        keys, values, queries: number of keys, of values per key, and of keys that are asked for.
    """

    haystack: Haystack = "essay"
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    @property
    def distinct_keys(self) -> int:
        """Keys that are hidden: at least as many as are asked for."""
        return max(self.keys, self.queries)

    @property
    def needs(self) -> str | None:
        return "essays" if self.haystack == "essay" else None


@dataclass(frozen=True)
class VariableTracking(Task):
    """Follow a chain of assignments through noise.

    Args:
        hops: assignments after the first, of one chain.
    """

    tokens_to_generate: int = 30
    hops: int = 4


@dataclass(frozen=True)
class CommonWords(Task):
    """Name the most frequent words of a numbered list.

    Args:
        common: number of words asked for.
        common_repeats, other_repeats: how often these and the other words stand in the list.
    """

    tokens_to_generate: int = 120
    common: int = 10
    common_repeats: int = 30
    other_repeats: int = 3


@dataclass(frozen=True)
class FrequentWords(Task):
    """Name the three most frequent of coded words.

    Args:
        alpha: exponent of the zeta distribution of their frequencies.
    """

    tokens_to_generate: int = 50
    alpha: float = 2.0


@dataclass(frozen=True)
class QuestionAnswering(Task):
    """Answer a question from documents.

    Args:
        dataset: ``squad`` or ``hotpotqa``.
    """

    tokens_to_generate: int = 32
    metric: Metric = "part"
    dataset: Literal["squad", "hotpotqa"] = "squad"

    @property
    def needs(self) -> str | None:
        return self.dataset


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Niah("niah_single_1", haystack="noise"),
        Niah("niah_single_2"),
        Niah("niah_single_3", value="uuids"),
        Niah("niah_multikey_1", keys=4),
        Niah("niah_multikey_2", haystack="needle"),
        Niah("niah_multikey_3", haystack="needle", key="uuids", value="uuids"),
        Niah("niah_multivalue", values=4),
        Niah("niah_multiquery", queries=4),
        VariableTracking("vt"),
        CommonWords("cwe"),
        FrequentWords("fwe"),
        QuestionAnswering("qa_1", dataset="squad"),
        QuestionAnswering("qa_2", dataset="hotpotqa"),
    )
}

#: The thirteen tasks that a RULER mean is taken over, in RULER's order.
ALL_TASKS = tuple(TASKS)


def parse_tasks(names: Iterable[str]) -> list[Task]:
    """The tasks with these names, in the order given; the word ``all`` alone means the thirteen.

    Raises:
        UserError: for a name that RULER does not have, or one given twice.
    """
    names = list(names)
    if names == ["all"]:
        return list(TASKS.values())
    if not names:
        raise UserError(f"no task was named; choose from {', '.join(TASKS)}, or all")
    for name in names:
        if name not in TASKS:
            raise UserError(f"{name!r} is not a RULER task; choose from {', '.join(TASKS)}, or all")
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise UserError(f"task {repeated[0]} is named twice")
    return [TASKS[name] for name in names]
