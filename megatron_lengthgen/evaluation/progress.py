"""How far a long evaluation is: a bar on a terminal, plain lines elsewhere."""

import sys
import time
from types import TracebackType
from typing import Any

__all__ = ["Progress", "duration"]

_PLAIN_INTERVAL = 15.0


def duration(seconds: float) -> str:
    """``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class Progress:
    """Counts samples, and tells the time left from tokens, since a long sample costs more than a short one.

    Args:
        samples: samples in all.
        tokens: tokens in all.
        done_samples, done_tokens: what was finished before this start.
        visible: False on all processes but one.
    """

    def __init__(
        self, samples: int, tokens: int, done_samples: int = 0, done_tokens: int = 0, visible: bool = True
    ) -> None:
        self._samples, self._tokens = samples, tokens
        self._done_samples, self._first_tokens, self._done_tokens = done_samples, done_tokens, done_tokens
        self._visible = visible
        self._bar: Any = None
        self._task: Any = None
        self._started = self._printed = time.monotonic()

    def __enter__(self) -> "Progress":
        self._started = self._printed = time.monotonic()
        if self._visible and sys.stdout.isatty():
            from rich.progress import BarColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichProgress

            self._bar = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[samples]} samples"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]} left"),
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._tokens, samples="", left="-:--")
            self._show("starting")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, label: str, done_samples: int, done_tokens: int) -> None:
        """Say what is being done and how much is finished in all."""
        self._done_samples, self._done_tokens = done_samples, done_tokens
        self._show(label)

    def _left(self) -> str:
        done = self._done_tokens - self._first_tokens
        if done <= 0:
            return "-:--"
        elapsed = time.monotonic() - self._started
        return duration(elapsed * (self._tokens - self._done_tokens) / done)

    def _show(self, label: str) -> None:
        if not self._visible:
            return
        samples = f"{self._done_samples}/{self._samples}"
        if self._bar is not None:
            self._bar.update(
                self._task, description=label, completed=self._done_tokens, samples=samples, left=self._left()
            )
            return
        now = time.monotonic()
        if now - self._printed >= _PLAIN_INTERVAL or self._done_samples == self._samples:
            self._printed = now
            print(
                f"{label}: {samples} samples, {duration(now - self._started)} elapsed, {self._left()} left", flush=True
            )
