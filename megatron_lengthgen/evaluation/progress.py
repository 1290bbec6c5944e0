"""How far a long evaluation is: bars on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NamedTuple

__all__ = ["Amount", "Progress", "duration"]

_PLAIN_INTERVAL = 15.0


class Amount(NamedTuple):
    """Samples, and tokens of prompts and answers at full length."""

    samples: int
    tokens: int


def duration(seconds: float) -> str:
    """``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class _Row:
    """One task, or all: what was done since the start, and in what time."""

    def __init__(self, wanted: Amount, done: Amount) -> None:
        self.wanted, self.done, self._first = wanted, done, done
        self.seconds = 0.0

    @property
    def rate(self) -> float:
        """Tokens per second since the start; 0 where nothing was finished yet."""
        return (self.done.tokens - self._first.tokens) / self.seconds if self.seconds else 0.0

    def fields(self) -> dict[str, str]:
        # From tokens and not from samples, since a long sample costs more than a short one.
        left = (self.wanted.tokens - self.done.tokens) / self.rate if self.rate else None
        return {
            "samples": f"{self.done.samples}/{self.wanted.samples}",
            "rate": f"{self.rate:,.0f} tokens/s" if self.rate else "- tokens/s",
            "elapsed": duration(self.seconds),
            "left": "-:--" if left is None else duration(left),
        }


class Progress:
    """Shows what is done, how fast, and how long the rest will take, by task and in all.

    Args:
        wanted: all that there is to do, by task.
        done: what was finished before this start, by task.
        visible: False on all processes but one.
    """

    def __init__(self, wanted: Mapping[str, Amount], done: Mapping[str, Amount], visible: bool = True) -> None:
        self._rows = {task: _Row(amount, done[task]) for task, amount in wanted.items()}
        self._all = _Row(_sum(wanted), _sum(done))
        self._visible = visible
        self._task: str | None = None
        self._bar: Any = None
        self._bars: dict[str, Any] = {}
        self._started = self._updated = self._printed = time.monotonic()

    def __enter__(self) -> "Progress":
        self._started = self._updated = self._printed = time.monotonic()
        if self._visible and sys.stdout.isatty():
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[samples]} samples"),
                TextColumn("{task.fields[rate]}"),
                TextColumn("{task.fields[elapsed]}"),
                TextColumn("{task.fields[left]} left"),
            )
            self._bar.start()
            for task, row in self._rows.items():
                self._bars[task] = self._bar.add_task(task, total=row.wanted.tokens, **row.fields())
            self._bars["all"] = self._bar.add_task("all", total=self._all.wanted.tokens, **self._all.fields())
            self._show("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, task: str | None, label: str, done: Mapping[str, Amount]) -> None:
        """Say what is being done, of which task, and how much is finished of each."""
        self._advance(task, done)
        if self._bar is not None or time.monotonic() - self._printed >= _PLAIN_INTERVAL:
            self._show(label)

    def finish(self, done: Mapping[str, Amount]) -> None:
        """Show the last state."""
        self._advance(None, done)
        self._show("all")

    def _advance(self, task: str | None, done: Mapping[str, Amount]) -> None:
        now = time.monotonic()
        if self._task is not None:
            self._rows[self._task].seconds += now - self._updated
        self._task, self._updated = task, now
        for name, row in self._rows.items():
            row.done = done[name]
        self._all.done, self._all.seconds = _sum(done), now - self._started

    def _show(self, label: str) -> None:
        if not self._visible:
            return
        if self._bar is None:
            self._print(label)
            return
        for task, row in self._rows.items():
            self._bar.update(
                self._bars[task],
                description=label if task == self._task else task,
                completed=row.done.tokens,
                **row.fields(),
            )
        self._bar.update(self._bars["all"], completed=self._all.done.tokens, **self._all.fields())

    def _print(self, label: str) -> None:
        self._printed = time.monotonic()
        parts = []
        if self._task is not None:
            own = self._rows[self._task].fields()
            parts.append(f"{label}: {own['samples']} samples, {own['rate']}, {own['left']} left")
            label = "all"
        total = self._all.fields()
        parts.append(
            f"{label}: {total['samples']} samples, {total['rate']}, {total['elapsed']} elapsed, {total['left']} left"
        )
        print("; ".join(parts), flush=True)


def _sum(amounts: Mapping[str, Amount]) -> Amount:
    return Amount(sum(a.samples for a in amounts.values()), sum(a.tokens for a in amounts.values()))
