"""RULER's tasks: their arguments, budget of new tokens and metric.

Source: NVIDIA/RULER ``scripts/synthetic.yaml`` and the two ``constants.py`` (data and evaluation).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_lengthgen.errors import UserError

__all__ = ["ALL_TASKS", "TASKS", "Niah", "parse_tasks"]

#: The thirteen tasks that a RULER mean is taken over, in RULER's order.
ALL_TASKS = (
    "niah_single_1",
    "niah_single_2",
    "niah_single_3",
    "niah_multikey_1",
    "niah_multikey_2",
    "niah_multikey_3",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "qa_1",
    "qa_2",
)

Haystack = Literal["noise", "essay", "needle"]
Kind = Literal["words", "numbers", "uuids"]


@dataclass(frozen=True)
class Niah:
    """A needle-in-a-haystack task.

    Args:
        haystack: what hides the needles: repeated noise sentences, essays, or other needles.
        key, value: what a needle's key and value look like.
        keys, values, queries: number of keys, of values per key, and of keys that are asked for.
    """

    name: str
    haystack: Haystack = "essay"
    key: Kind = "words"
    value: Kind = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1
    tokens_to_generate: int = 128
    metric: Literal["all", "part"] = "all"

    @property
    def distinct_keys(self) -> int:
        """Keys that are hidden: at least as many as are asked for."""
        return max(self.keys, self.queries)

    @property
    def needs_essays(self) -> bool:
        return self.haystack == "essay"


TASKS: dict[str, Niah] = {
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
    )
}


def parse_tasks(names: Iterable[str]) -> list[Niah]:
    """The tasks with these names, in the order given.

    Raises:
        UserError: for a name that RULER does not have, one that is not available here, or one given twice.
    """
    names = list(names)
    if not names:
        raise UserError(f"no task was named; choose from {', '.join(TASKS)}")
    for name in names:
        if name in TASKS:
            continue
        known = "one of RULER's tasks but not available here" if name in ALL_TASKS else "not a RULER task"
        raise UserError(f"{name!r} is {known}; choose from {', '.join(TASKS)}")
    repeated = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if repeated:
        raise UserError(f"task {repeated[0]} is named twice")
    return [TASKS[name] for name in names]
