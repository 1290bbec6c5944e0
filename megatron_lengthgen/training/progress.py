"""What a training run shows while it runs: loss, tokens per second, time left."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

__all__ = ["TrainingProgress"]


class TrainingProgress:
    """Follows the microbatches of the last pipeline stage and reports once per step.

    A bar where the output is a terminal, a line every ``interval`` steps elsewhere; in both cases a line of JSON a
    report in ``path``. The loss is the mean over this data-parallel rank's tokens.

    Args:
        steps: training steps of the whole run.
        microbatches: microbatches a step on this rank.
        tokens_per_step: tokens that all ranks together see in a step.
        interval: steps between two reports.
        path: JSONL file to append to, if any.
        finished: how many steps earlier starts of this run finished; asked once, at the first microbatch.
        active: whether this rank reports; asked once, at the first microbatch.
    """

    def __init__(
        self,
        *,
        steps: int,
        microbatches: int,
        tokens_per_step: int,
        interval: int,
        path: Path | None,
        finished: Callable[[], int],
        active: Callable[[], bool],
    ) -> None:
        self._finished, self._active = finished, active
        self._is_active: bool | None = None
        self.steps, self.microbatches, self.tokens_per_step = steps, microbatches, tokens_per_step
        self.interval, self.path = max(interval, 1), path
        self.step = 0
        self._seen = 0
        self._sum: torch.Tensor | None = None
        self._steps_since = 0
        self._started = time.monotonic()
        self._bar: Progress | None = None

    def _start(self) -> None:
        self._is_active = self._active()
        self.step = self._finished()
        self._started = time.monotonic()
        if self._is_active and sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} steps"),
                TextColumn("{task.fields[report]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
            )
            self._task = self._bar.add_task("training", total=self.steps, completed=self.step, report="")
            self._bar.start()

    def microbatch(self) -> None:
        """Note that a microbatch begins; the first of training starts the clock."""
        if self._is_active is None and torch.is_grad_enabled():
            self._start()

    def observe(self, report: torch.Tensor) -> None:
        """Take ``[summed loss, tokens]`` of a microbatch. Evaluation's microbatches are not counted."""
        if not self._is_active or not torch.is_grad_enabled():
            return
        self._sum = report if self._sum is None else self._sum + report
        self._seen += 1
        if self._seen < self.microbatches:
            return
        self._seen = 0
        self.step += 1
        self._steps_since += 1
        if self.step % self.interval == 0 or self.step == self.steps:
            self._report()

    def _report(self) -> None:
        assert self._sum is not None
        total, tokens = self._sum.tolist()
        now = time.monotonic()
        seconds = (now - self._started) / self._steps_since
        values: dict[str, Any] = {
            "step": self.step,
            "loss": total / max(tokens, 1),
            "tokens_per_second": self.tokens_per_step / seconds,
            "seconds_left": (self.steps - self.step) * seconds,
        }
        self._started, self._steps_since, self._sum = now, 0, None
        shown = f"loss {values['loss']:.4f}  {values['tokens_per_second']:,.0f} tokens/s"
        if self._bar is not None:
            self._bar.update(self._task, completed=self.step, report=shown)
        else:
            print(f"step {self.step}/{self.steps}  {shown}  {_clock(values['seconds_left'])} left", flush=True)
        if self.path is not None:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(values) + "\n")

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self._bar.stop()


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"
