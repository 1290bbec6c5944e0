"""Start a script, under torchrun or alone, and read what a training run logged."""

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["alone", "losses", "scalars", "torchrun"]


def torchrun(processes: int, script: Path, *arguments: object, timeout: float = 600) -> str:
    """Run ``script`` on ``processes`` ranks; returns its output, which is shown in full when it fails."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return _start([*launcher, str(script), *map(str, arguments)], timeout)


def alone(script: Path, *arguments: object, timeout: float = 600) -> str:
    """Run ``script`` in one process that nobody launches; else as :func:`torchrun`."""
    return _start([str(script), *map(str, arguments)], timeout)


def _start(arguments: list[str], timeout: float) -> str:
    command = [sys.executable, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout
    )
    assert result.returncode == 0, result.stdout
    return result.stdout


def scalars(run: Path, tag: str) -> dict[int, float]:
    """What was written to TensorBoard for a run under ``tag``, by step; later values win."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    by_step = {event.step: event.value for event in events.Scalars(tag)}
    return {step: by_step[step] for step in sorted(by_step)}


def losses(run: Path) -> list[float]:
    """The training losses, step by step, that Megatron wrote to TensorBoard for a run."""
    return list(scalars(run, "lm loss").values())
