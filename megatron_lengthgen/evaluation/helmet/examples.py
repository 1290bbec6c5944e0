"""A question as HELMET asks it, before it meets a tokenizer."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .text_metrics import Gold

__all__ = ["Example", "Examples"]


@dataclass(frozen=True)
class Example:
    """One question.

    Attributes:
        question: its text, or key.
        context: the long text; only this may be cut.
        gold: the references.
        values: what else the templates name.
        kept: fields of the data that scoring, or HELMET's result files, need.
        shortened: tokens that the benchmark itself leaves out at this length.
        group: what tells questions apart where each is asked with its answer at several depths; empty elsewhere.
    """

    question: str
    context: str
    gold: Gold
    values: Mapping[str, str] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    shortened: int = 0
    group: str = ""

    @property
    def depth(self) -> float | None:
        """Share of the context before the answer, where the data say it."""
        depth = self.kept.get("depth")
        return float(depth) if isinstance(depth, int | float) and 0 <= depth <= 1 else None


@dataclass(frozen=True)
class Examples:
    """The questions of a data set at one length; each is made when it is asked for."""

    count: int
    make: Callable[[int], Example]
