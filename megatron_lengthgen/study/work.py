"""The work of a study: first phases and cells, each done once by whichever process takes it first.

What is done is on disk, and nowhere else: ``phase1/seed0`` and ``cells/NAME`` hold checkpoints, ``cells/NAME.json`` the
result of a cell. A process that stops leaves its unit to the next one, which goes on from the last checkpoint.
"""

import contextlib
import dataclasses
import fcntl
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_lengthgen.files import write_json
from megatron_lengthgen.models import build
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.study import evaluation
from megatron_lengthgen.study.config import Cell, Study
from megatron_lengthgen.study.dataset import provider

__all__ = ["Unit", "finished_steps", "is_finished", "results", "units", "work"]

#: A first phase (its seed) or a cell.
Unit = int | Cell

_WAIT_SECONDS = 1.0
_NOTHING_LEFT = -1


def units(study: Study) -> list[Unit]:
    """All units in the order in which they should be taken."""
    return [*study.seeds, *study.cells]


def _place(out: Path, unit: Unit) -> Path:
    return out / "phase1" / f"seed{unit}" if isinstance(unit, int) else out / "cells" / unit.name


def _result(out: Path, unit: Unit) -> Path:
    place = _place(out, unit)
    return place.with_name(f"{place.name}.json")


def finished_steps(study: Study, out: Path, unit: Unit) -> int:
    """Training steps that a unit has reported, out of ``study.steps``."""
    if is_finished(study, out, unit):
        return study.steps(1 if isinstance(unit, int) else 2)
    log = _place(out, unit) / "progress.jsonl"
    lines = log.read_text().splitlines() if log.is_file() else []
    return int(json.loads(lines[-1])["step"]) if lines else 0


def is_finished(study: Study, out: Path, unit: Unit) -> bool:
    """Is there nothing left to do for a unit?"""
    return _result(out, unit).is_file()


def results(study: Study, out: Path) -> list[dict[str, Any]]:
    """Results of the finished cells."""
    return [json.loads(_result(out, cell).read_text()) for cell in study.cells if _result(out, cell).is_file()]


@contextlib.contextmanager
def _taken(out: Path, unit: Unit) -> Iterator[bool]:
    """Whether this process has the unit to itself within the context; a dead process holds nothing."""
    name = f"phase1-seed{unit}" if isinstance(unit, int) else unit.name
    path = out / "locks" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def work(study: Study, out: Path) -> None:
    """Take units until all are finished; any number of processes may do so at once, on any number of machines.

    Under torchrun all ranks work on one unit together, with tensor parallelism over all of them.

    Args:
        study: The study.
        out: Its directory, on a file system that all processes share.
    """
    build.connect()
    everything = units(study)
    while True:
        with contextlib.ExitStack() as held:
            choice = [_take(study, out, everything, held) if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(choice)
            if choice[0] == _NOTHING_LEFT:
                return
            if choice[0] is not None:
                _do(study, out, everything[choice[0]])
                continue
        time.sleep(_WAIT_SECONDS)


def _take(study: Study, out: Path, everything: list[Unit], held: contextlib.ExitStack) -> int | None:
    """Place in ``everything`` of a unit that is now this process's alone; None where others hold all that can start."""
    left = [place for place, unit in enumerate(everything) if not is_finished(study, out, unit)]
    for place in left:
        unit = everything[place]
        is_ready = isinstance(unit, int) or is_finished(study, out, unit.seed)
        # Another process may have finished it between the two looks.
        if is_ready and held.enter_context(_taken(out, unit)) and not is_finished(study, out, unit):
            return place
    return None if left else _NOTHING_LEFT


def _do(study: Study, out: Path, unit: Unit) -> None:
    from megatron_lengthgen.training.run import train

    began = time.monotonic()
    place = _place(out, unit)
    if isinstance(unit, int):
        run = study.run(1, seed=unit, save=place, ranks=dist.get_world_size())
    else:
        start = _place(out, unit.seed)
        run = study.run(2, seed=unit.seed, save=place, settings=unit.settings, start=start, ranks=dist.get_world_size())
    build.forget()
    # The two phases of a seed see other samples; variants of a seed see the same ones.
    data_seed = 2 * unit if isinstance(unit, int) else 2 * unit.seed + 1
    train(run, datasets=provider(study.task, seed=data_seed))
    if isinstance(unit, int):
        checkpoint = place / f"iter_{study.steps(1):07d}"
        result: dict[str, Any] = {"evaluations": _answers(study, checkpoint, unit, step=0)}
    else:
        chosen = Regularization.from_mapping({name: run.lengthgen[name] for name in Regularization().to_dict()})
        result = {
            "variant": unit.variant,
            "seed": unit.seed,
            "settings": {**chosen.to_dict(), "weight_decay": run.megatron["weight_decay"], **unit.settings},
            "task": {"name": study.task.name, **dataclasses.asdict(study.task)},
            "training_length": study.training_length,
            "phase1": {"steps": study.steps(1)},
            "steps": study.steps(2),
            "training_loss": _training_loss(place),
            "evaluations": _along(study, out, unit),
        }
    if dist.get_rank() == 0:
        write_json(_result(out, unit), {**result, "seconds": round(time.monotonic() - began, 1)})


def _along(study: Study, out: Path, cell: Cell) -> list[dict[str, Any]]:
    """Answers at all lengths, at the start of the phase and at each point along it."""
    interval, last = study.steps(2) // study.evaluation.points, study.steps(2)
    found = json.loads(_result(out, cell.seed).read_text())["evaluations"]
    for step in range(interval, last + 1, interval):
        scales = study.evaluation.attention_scales if step == last else (1.0,)
        found += _answers(study, _place(out, cell) / f"iter_{step:07d}", cell.seed, step=step, scales=scales)
    return found


def _training_loss(place: Path) -> list[tuple[int, float]]:
    lines = (place / "progress.jsonl").read_text().splitlines()
    # A run that was stopped reports some steps twice; the later report is of what was kept.
    return sorted({entry["step"]: entry["loss"] for entry in map(json.loads, lines)}.items())


def _answers(
    study: Study, checkpoint: Path, seed: int, *, step: int, scales: tuple[evaluation.AttentionScale, ...] = (1.0,)
) -> list[dict[str, Any]]:
    from megatron_lengthgen.checkpoint.load import load_model

    build.forget()
    model, _ = load_model(checkpoint, tensor_parallel=dist.get_world_size(), dtype="fp32")
    entries = []
    for scale in scales:
        for multiple in study.evaluation.multiples:
            length = multiple * study.training_length
            with evaluation.scaled_full_attention(model, scale, study.training_length):
                found = evaluation.answer(model, study.task, length, seed=seed, sequences=study.evaluation.sequences)
            entries.append(
                {
                    "step": step,
                    "attention_scale": scale,
                    "length": length,
                    "accuracy": found.correct.mean(1).round(4).tolist(),
                    "error": found.error.mean(1).round(4).tolist(),
                    "loss": found.loss.mean(1).round(4).tolist(),
                }
            )
    return entries
