"""Probes of a run: looked at beside every validation, shown, logged, and kept in the run's folder."""

import argparse
import functools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron_lengthgen import files
from megatron_lengthgen.training.length_probe import LengthProbe
from megatron_lengthgen.training.probe_settings import PROBES, ProbeSettings, check_run

__all__ = ["Probe", "Probes", "keep", "make"]


class Probe(Protocol):
    """Something to measure of a model while it is trained.

    Attributes:
        name: for people and logs.
        file: JSONL file in the run's folder.
        settings: when to look.
    """

    name: str
    file: str
    settings: ProbeSettings

    def check(self) -> None:
        """Raise :class:`UserError` where the run's files do not permit it; before training."""

    def prepare(self) -> None:
        """Open what is needed; all ranks call it once the process groups are there."""

    def measure(self, models: Sequence[torch.nn.Module]) -> dict[str, float] | None:
        """Scores by name on the ranks of the last pipeline stage, None on the others; all ranks call it."""


def make(section: dict[str, Any], args: argparse.Namespace) -> list[Probe]:
    """The probes that the ``lengthgen`` section asks for, held against the run and its data.

    Raises:
        UserError: for a probe that this run cannot have.
    """
    probes: list[Probe] = []
    for name in PROBES:
        if name in section:
            settings = ProbeSettings.from_mapping(name, section[name])
            check_run(name, settings, args)
            # Needles need packages that a run without them does without.
            probe = LengthProbe(settings, args) if name == "length_probe" else _needle_probe(settings, args)
            probe.check()
            probes.append(probe)
    return probes


def _needle_probe(settings: ProbeSettings, args: argparse.Namespace) -> Probe:
    from megatron_lengthgen.training.needle_probe import NeedleProbe

    return NeedleProbe(settings, args)


class Probes:
    """The probes of a run, as ``megatron.training.pretrain`` takes them: its ``non_loss_data_func``.

    Megatron calls it at the end of each validation, with the model in evaluation mode and without gradients.

    Args:
        probes: to look at.
        args: Megatron's arguments of this run.
    """

    def __init__(self, probes: Iterable[Probe], args: argparse.Namespace) -> None:
        self._probes, self._args = list(probes), args
        self._last_step = -1
        self._is_prepared = False

    def preparing(self, datasets: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's dataset provider ``datasets``, which opens the probes' data too."""

        @functools.wraps(datasets)  # Megatron asks for its signature and attributes
        def provide(*args: Any, **more: Any) -> Any:
            built = datasets(*args, **more)
            # It is asked once for each of a rank's model chunks.
            for probe in self._probes if not self._is_prepared else ():
                probe.prepare()
            self._is_prepared = True
            return built

        return provide

    def __call__(self, models: Sequence[torch.nn.Module]) -> None:
        # Megatron counts the step up after it has set `curr_iteration`.
        step = self._args.curr_iteration + 1
        # A run's end is validated once more, and so is a test split.
        if step == self._last_step:
            return
        self._last_step = step
        for probe in self._probes:
            if step % (probe.settings.every or 1) == 0 or step == self._args.train_iters:
                scores = probe.measure(models)
                # Megatron's writers are those of the last rank, which is in the last stage.
                if self._args.rank == self._args.world_size - 1:
                    assert scores is not None
                    self._report(probe, step, scores)

    def _report(self, probe: Probe, step: int, scores: dict[str, float]) -> None:
        from megatron.training import get_tensorboard_writer, get_wandb_writer

        width = max(map(len, scores))
        lines = [
            f"{probe.name} at step {step:,}",
            *(f"  {name:{width}}  {score:.4f}" for name, score in scores.items()),
        ]
        print("\n".join(lines), flush=True)
        if self._args.save:
            tokens = self._args.consumed_train_samples * self._args.seq_length
            keep(Path(self._args.save) / probe.file, {"step": step, "tokens": tokens, **scores})
        logged = {f"{probe.name}/{name}": score for name, score in scores.items()}
        if (writer := get_tensorboard_writer()) is not None:
            for name, score in logged.items():
                writer.add_scalar(name, score, step)
        if (wandb := get_wandb_writer()) is not None:
            wandb.log(logged, step)


def keep(path: Path, record: dict[str, Any]) -> None:
    """Add a line of JSON to ``path``, which is whole at all times.

    Lines of this step and of later ones go: a run that went back to an older checkpoint makes them anew.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    before = [line for line in lines if json.loads(line)["step"] < record["step"]]
    files.write_text(path, "".join(f"{line}\n" for line in [*before, json.dumps(record)]))
