"""Runs a benchmark: prompts to an engine, answers to the store."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lengthgen.errors import UserError

from .generation.base import Generator, Request
from .progress import Progress
from .ruler.data import Ruler, Sample
from .ruler.scoring import METRICS, postprocess
from .ruler.tasks import Niah
from .run_store import RunStore

__all__ = ["Plan", "Share", "evaluate", "plan", "score_record", "verify_prompts"]

Cell = tuple[str, int]


@dataclass(frozen=True)
class Share:
    """Which part of the work is this process's.

    Args:
        rank, size: data-parallel rank and number of ranks.
        writes: whether this process records answers (one process of each data-parallel rank does).
        leads: whether it shows progress and waits for the others (one process in all).
    """

    rank: int = 0
    size: int = 1
    writes: bool = True
    leads: bool = True


@dataclass(frozen=True)
class Plan:
    """What is left to do.

    Attributes:
        samples: samples per task and length in all.
        pending: indices that are not finished, by task and length, short lengths first.
        lines: lines that the store held when the plan was made, by task and length.
    """

    samples: int
    pending: Mapping[Cell, Sequence[int]]
    lines: Mapping[Cell, int]

    @property
    def finished(self) -> bool:
        return not any(self.pending.values())


def plan(store: RunStore, tasks: Sequence[Niah], lengths: Sequence[int], samples: int) -> Plan:
    """What is not finished yet. Every process must call this before any of them writes, so that all see the same."""
    cells = [(task.name, length) for length in sorted(lengths) for task in tasks]
    lines = {cell: store.lines(*cell) for cell in cells}
    pending: dict[Cell, Sequence[int]] = {}
    for cell in cells:
        done = store.records(*cell)
        pending[cell] = [index for index in range(samples) if index not in done]
    return Plan(samples, pending, lines)


def verify_prompts(store: RunStore, ruler: Ruler, tasks: Sequence[Niah], lengths: Sequence[int]) -> None:
    """Rebuild one finished prompt of each task and length and compare it with its record.

    Raises:
        UserError: when a prompt is not the one that was answered before.
    """
    for length in lengths:
        for task in tasks:
            records = store.records(task.name, length)
            if not records:
                continue
            index = min(records)
            old, new = records[index].get("prompt_sha256"), ruler.sample(task, length, index).digest
            if old != new:
                raise UserError(
                    f"the run in {store.directory} answered another prompt for {task.name} at {length}, sample {index} "
                    f"(sha256 {old}, now {new}): the tokenizer or the data changed; use a new --output"
                )


def score_record(
    sample: Sample,
    metric: str,
    new_ids: Sequence[int],
    limit: int,
    text: str,
    seconds: float,
    save_prompt: bool = False,
) -> dict[str, Any]:
    """What is kept of a finished sample.

    ``index``, ``outputs``, ``pred``, ``length`` (prompt and room for the answer) and ``input`` are RULER's fields;
    ``score`` is in [0, 1]; ``finish`` is ``stop`` or, where the limit of new tokens ended the answer, ``length``;
    ``seconds`` is the time since this process's previous answer.
    """
    record = {
        "index": sample.index,
        "task": sample.task,
        "max_length": sample.max_length,
        "outputs": list(sample.outputs),
        "pred": text,
        "score": METRICS[metric](postprocess(text), sample.outputs),
        "length": sample.length,
        "prompt_tokens": len(sample.prompt_ids),
        "generated_tokens": len(new_ids),
        "finish": "length" if len(new_ids) >= limit else "stop",
        "seconds": round(seconds, 4),
        "depths": list(sample.depths),
        "prompt_sha256": sample.digest,
    }
    if save_prompt:
        record |= {"input": sample.body, "answer_prefix": sample.answer_prefix}
    return record


def evaluate(
    ruler: Ruler,
    tasks: Sequence[Niah],
    todo: Plan,
    store: RunStore,
    generator: Generator,
    share: Share | None = None,
    save_prompts: bool = False,
    patience: float = 1.0,
) -> None:
    """Answer what is pending, this process its share, and record each answer as soon as it is there.

    Args:
        todo: what :func:`plan` said.
        patience: seconds between looks at what other processes have finished.

    Raises:
        UserError: when a record cannot be written.
    """
    share = share or Share()
    by_name = {task.name: task for task in tasks}
    meter = _Meter(store, todo)
    with Progress(*meter.total, *meter.done(), visible=share.leads) as progress:
        for (name, length), indices in todo.pending.items():
            mine = indices[share.rank :: share.size]
            label = f"{name} @ {length}"
            if not mine:
                continue
            made = [ruler.sample(by_name[name], length, index) for index in mine]
            limit = ruler.new_tokens(by_name[name])
            requests = [Request(sample.prompt_ids, limit, ruler.encoder.stop_ids) for sample in made]
            progress.update(label, *meter.done())
            before = time.monotonic()
            if not share.writes:
                for _ in generator.generate(requests):
                    pass
                continue
            try:
                with store.appending(name, length, share.rank) as file:
                    for position, new_ids in generator.generate(requests):
                        now = time.monotonic()
                        text = ruler.encoder.decode(new_ids)
                        metric = by_name[name].metric
                        file.write(
                            score_record(made[position], metric, new_ids, limit, text, now - before, save_prompts)
                        )
                        before = now
                        if share.leads:
                            progress.update(label, *meter.done())
            except OSError as error:
                raise UserError(
                    f"cannot write to {store.directory}: {error.strerror or error}; finished samples are kept, "
                    "so mend that and start the same command again"
                ) from error
        while share.leads and share.size > 1 and not meter.finished():
            progress.update("waiting for other processes", *meter.done())
            time.sleep(patience)


class _Meter:
    """Counts finished samples of all processes by the lines they have written since the start."""

    def __init__(self, store: RunStore, todo: Plan) -> None:
        self._store, self._todo = store, todo
        self.total = (todo.samples * len(todo.pending), todo.samples * sum(length for _, length in todo.pending))

    def done(self) -> tuple[int, int]:
        """Samples and tokens finished in all."""
        counts = {cell: self._todo.samples - left for cell, left in self._left().items()}
        return sum(counts.values()), sum(count * length for (_, length), count in counts.items())

    def finished(self) -> bool:
        return not any(self._left().values())

    def _left(self) -> dict[Cell, int]:
        return {
            cell: max(0, len(indices) - (self._store.lines(*cell) - self._todo.lines[cell])) if indices else 0
            for cell, indices in self._todo.pending.items()
        }
