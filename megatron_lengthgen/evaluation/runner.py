"""Runs a benchmark: prompts to an engine, answers to the store."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_lengthgen.errors import UserError

from .generation.base import Answer, Generator, Request
from .lengths import length_name
from .progress import Amount, Progress
from .prompt import PromptEncoder
from .ruler.data import Ruler, Sample
from .ruler.scoring import METRICS, postprocess
from .ruler.tasks import Task
from .run_store import RunStore

__all__ = [
    "RULER",
    "Form",
    "Plan",
    "Share",
    "evaluate",
    "plan",
    "score_record",
    "verify_prompts",
]

Cell = tuple[str, int]

#: Tokens of prompts held ready at once by each process; a Python list of them takes 36 bytes a token.
_TOGETHER = 1 << 23


@dataclass(frozen=True)
class Share:
    """Which part of the work is this process's.

    Args:
        rank, size: data-parallel rank and number of ranks.
        writes: whether this process records answers (one process of each data-parallel rank does).
        leads: whether it shows progress and waits for the others (one process in all).
        processes: processes that together hold one copy of the model; recorded, as is ``device``, for the cost.
        device: what each of them computes on.
    """

    rank: int = 0
    size: int = 1
    writes: bool = True
    leads: bool = True
    processes: int = 1
    device: str = "CPU"


@dataclass(frozen=True)
class Plan:
    """What is left to do.

    Attributes:
        wanted: samples that are this launch's, finished or not, by task and length, short lengths first.
        pending: their indices that are not finished.
        lines: lines that the store held when the plan was made.
    """

    wanted: Mapping[Cell, int]
    pending: Mapping[Cell, Sequence[int]]
    lines: Mapping[Cell, int]

    @property
    def finished(self) -> bool:
        return not any(self.pending.values())


class Named(Protocol):
    """A task."""

    @property
    def name(self) -> str: ...


class Samples(Protocol):
    """A benchmark's samples."""

    @property
    def encoder(self) -> PromptEncoder: ...

    def sample(self, task: Any, max_length: int, index: int) -> Any: ...

    def samples(self, task: Any, max_length: int, indices: Sequence[int]) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Form:
    """What a benchmark asks of an engine, and what it makes of an answer.

    Args:
        request: from the benchmark's samples, a task and one sample of it.
        scored: from a task, a sample and an answer to ``pred``, ``score`` in [0, 1], and whatever else is to be kept.
    """

    request: Callable[[Any, Any, Any], Request]
    scored: Callable[[Any, Any, Answer], dict[str, Any]]


def _ruler_request(ruler: Ruler, task: Task, sample: Sample) -> Request:
    return Request(sample.prompt_ids, ruler.new_tokens(task), ruler.encoder.stop_ids)


def _ruler_scored(task: Task, sample: Sample, answer: Answer) -> dict[str, Any]:
    return _ruler_score(task.metric, sample, answer)


def _ruler_score(metric: str, sample: Sample, answer: Answer) -> dict[str, Any]:
    return {"pred": answer.text, "score": METRICS[metric](postprocess(answer.text), sample.outputs)}


RULER = Form(_ruler_request, _ruler_scored)


def plan(
    store: RunStore, tasks: Sequence[Named], lengths: Sequence[int], samples: int | Callable[[str, int], int]
) -> Plan:
    """What of the first ``samples`` of each task and length is this shard's and not finished yet.

    All processes of a launch must follow one plan, made before any of them writes.
    """
    cells = [(task.name, length) for length in sorted(lengths) for task in tasks]
    counts = {cell: samples if isinstance(samples, int) else samples(*cell) for cell in cells}
    lines = {cell: store.lines(*cell) for cell in cells}
    indices = {cell: [index for index in range(counts[cell]) if store.shard.holds(index)] for cell in cells}
    pending: dict[Cell, Sequence[int]] = {}
    for cell in cells:
        done = store.records(*cell)
        pending[cell] = [index for index in indices[cell] if index not in done]
    return Plan({cell: len(held) for cell, held in indices.items()}, pending, lines)


def verify_prompts(store: RunStore, data: Samples, tasks: Sequence[Named], lengths: Sequence[int]) -> None:
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
            old, new = records[index].get("prompt_sha256"), data.sample(task, length, index).digest
            if old != new:
                raise UserError(
                    f"the run in {store.directory} answered another prompt for {task.name} at {length}, sample {index} "
                    f"(sha256 {old}, now {new}): the tokenizer or the data changed; use a new --output"
                )


def score_record(
    sample: Sample,
    metric: str,
    answer: Answer,
    seconds: float,
    share: Share | None = None,
    save_prompt: bool = False,
) -> dict[str, Any]:
    """What is kept of a finished sample.

    ``index``, ``outputs``, ``pred``, ``length`` (prompt and room for the answer) and ``input`` are RULER's fields;
    ``score`` is in [0, 1]; ``finish`` is ``stop`` or, where the limit of new tokens ended the answer, ``length``;
    ``seconds`` is the time since this process's previous answer, in which ``processes`` kept a ``device`` busy each.
    """
    return _record(sample, answer, _ruler_score(metric, sample, answer), seconds, share or Share(), save_prompt)


def _record(
    sample: Any, answer: Answer, scored: Mapping[str, Any], seconds: float, share: Share, save_prompt: bool
) -> dict[str, Any]:
    record = {
        "index": sample.index,
        "task": sample.task,
        "max_length": sample.max_length,
        "outputs": list(sample.outputs),
        "length": sample.length,
        "prompt_tokens": len(sample.prompt_ids),
        "generated_tokens": answer.tokens,
        "finish": "length" if answer.cut else "stop",
        "seconds": round(seconds, 4),
        "processes": share.processes,
        "device": share.device,
        "depths": list(sample.depths),
        "prompt_sha256": sample.digest,
    } | dict(scored)
    if save_prompt:
        record |= {"input": sample.body, "answer_prefix": sample.answer_prefix}
    return record


def evaluate(
    data: Samples,
    tasks: Sequence[Named],
    todo: Plan,
    store: RunStore,
    generator: Generator,
    share: Share | None = None,
    save_prompts: bool = False,
    patience: float = 1.0,
    form: Form = RULER,
) -> None:
    """Answer what is pending, this process its share, and record each answer as soon as it is there.

    Args:
        todo: what :func:`plan` said.
        patience: seconds between looks at what other processes have finished.
        form: the benchmark's.

    Raises:
        UserError: when a record cannot be written.
    """
    share = share or Share()
    by_name = {task.name: task for task in tasks}
    meter = _Meter(store, todo, patience)
    with Progress(meter.wanted, meter.done(), visible=share.leads) as progress:
        for (name, length), indices in todo.pending.items():
            mine = indices[share.rank :: share.size]
            together = max(1, _TOGETHER // length)
            for start in range(0, len(mine), together):
                progress.update(name, f"{name} @ {length_name(length)}", meter.done())
                made = data.samples(by_name[name], length, mine[start : start + together])
                for _ in _answers(data, form, by_name[name], made, store, generator, share, save_prompts):
                    if share.leads:
                        progress.update(name, f"{name} @ {length_name(length)}", meter.done())
        while share.leads and share.size > 1 and not meter.finished():
            progress.update(None, "waiting for other processes", meter.done())
            time.sleep(patience)
        if share.leads:
            progress.finish(meter.done(now=True))


def _answers(
    data: Samples,
    form: Form,
    task: Named,
    made: Sequence[Any],
    store: RunStore,
    generator: Generator,
    share: Share,
    save_prompts: bool,
) -> Iterator[None]:
    """Yield after each answer to samples of one task and length, when its record is durable."""
    requests = [form.request(data, task, sample) for sample in made]
    before = time.monotonic()
    if not share.writes:
        for _ in generator.generate(requests):
            yield
        return
    with store.appending(task.name, made[0].max_length, share.rank) as file:
        for position, answer in generator.generate(requests):
            now = time.monotonic()
            if not isinstance(answer, Answer):
                answer = Answer.from_ids(answer, requests[position].max_new_tokens, data.encoder.decode)
            sample = made[position]
            scored = form.scored(task, sample, answer)
            file.write(_record(sample, answer, scored, now - before, share, save_prompts))
            before = now
            yield


class _Meter:
    """Counts finished samples of all processes of this launch by the lines they have written since the start.

    Looking at every file after every sample would be much on a shared file system; it looks once in ``patience`` s.
    """

    def __init__(self, store: RunStore, todo: Plan, patience: float) -> None:
        self._store, self._todo, self._patience = store, todo, patience
        self._looked = -math.inf
        self._left: dict[Cell, int] = {}
        self.wanted = _by_task(todo.wanted)

    def done(self, now: bool = False) -> dict[str, Amount]:
        """What is finished, by task; ``now`` to look whenever the last look was."""
        self._look(now)
        return _by_task({cell: wanted - self._left[cell] for cell, wanted in self._todo.wanted.items()})

    def finished(self) -> bool:
        self._look(True)
        return not any(self._left.values())

    def _look(self, now: bool) -> None:
        if now or time.monotonic() - self._looked >= self._patience:
            self._left = {
                cell: max(0, len(indices) - (self._store.lines(*cell) - self._todo.lines[cell])) if indices else 0
                for cell, indices in self._todo.pending.items()
            }
            self._looked = time.monotonic()


def _by_task(samples: Mapping[Cell, int]) -> dict[str, Amount]:
    amounts: dict[str, Amount] = {}
    for (task, length), count in samples.items():
        old = amounts.get(task, Amount(0, 0))
        amounts[task] = Amount(old.samples + count, old.tokens + count * length)
    return amounts
