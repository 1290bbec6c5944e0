"""Runs on a cluster of nodes that can be killed and cut off, see network.py and fork_server.py."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import network
import torch

__all__ = ["Cluster", "Job", "cluster", "losses", "weights"]

HERE = Path(__file__).parent
CONF = HERE.parent / "parallel" / "invariant.yaml"


class Job:
    """One start of a run on all nodes, one rank on each."""

    def __init__(self, server: "Cluster", processes: list[int], save: Path, logs: Path) -> None:
        self._server, self.processes, self.save, self._logs = server, processes, save, logs

    def wait(self, seconds: float = 120) -> list[int]:
        """Exit statuses of the ranks once all have ended; fails after ``seconds``."""
        statuses = self._server.ask({"wait": self.processes, "seconds": seconds})
        assert None not in statuses, f"still running after {seconds} s: {statuses}\n{self.output()}"
        return statuses

    def finish(self) -> None:
        """Wait for a run that must end well."""
        assert self.wait() == [0] * len(self.processes), self.output()

    def kill(self, node: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a node; the default is what a power cut is to its neighbours."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.processes[node], number)

    def reach(self, step: int, seconds: float = 90) -> None:
        """Wait until ``step`` steps are done."""
        end = time.monotonic() + seconds
        while steps_done(self.save) < step:
            assert time.monotonic() < end, f"step {step} not reached within {seconds} s\n{self.output()}"
            time.sleep(0.01)

    def output(self) -> str:
        """All that its ranks printed."""
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in sorted(self._logs.glob("rank*.log")))


class Cluster:
    """Nodes, and the process that starts ranks on them."""

    def __init__(self, nodes: network.Network | network.Loopback, folder: Path) -> None:
        self.network = nodes
        self._folder, self._starts = folder, itertools.count()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "fork_server.py"), str(CONF)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        self._answer()

    def ask(self, command: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, "the fork server has ended"
        return json.loads(line)

    def start(
        self,
        save: str,
        *overrides: str,
        own: dict[int, list[str]] | None = None,
        timeout: float | None = None,
        port: int = 29500,
        conf: Path = CONF,
        environment: dict[str, str] | None = None,
    ) -> Job:
        """Start ``conf`` on every node.

        Args:
            save: name of the run; a second start of it resumes.
            overrides: as on the command line.
            own: more of them for a rank alone.
            timeout: of collectives, in seconds.
            port: where rank 0 listens.
            conf: the run's YAML.
            environment: more variables.
        """
        folder = self._folder / save
        logs = self._folder / "logs" / f"{next(self._starts)}-{save}"
        logs.mkdir(parents=True)
        job = {
            "conf": str(conf),
            "overrides": [f"save={folder}", *overrides],
            "own": own or {},
            "timeout": timeout,
            "namespaces": self.network.namespaces,
            "logs": str(logs),
            "environment": {
                "MASTER_ADDR": self.network.addresses[0],
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": self.network.interface,
                **(environment or {}),
            },
        }
        return Job(self, self.ask({"start": job}), folder, logs)

    def run(self, save: str, *overrides: str, **more: Any) -> Path:
        """Start a run and let it end; returns its folder."""
        job = self.start(save, *overrides, **more)
        job.finish()
        return job.save

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)


@contextlib.contextmanager
def cluster(nodes: int, folder: Path) -> Iterator[Cluster]:
    """A cluster of ``nodes``, whose runs are in ``folder``."""
    with network.make(nodes) as made:
        server = Cluster(made, folder)
        try:
            yield server
        finally:
            server.close()


def _progress(run: Path) -> list[dict[str, Any]]:
    file = run / "progress.jsonl"
    # The last line may be on its way.
    return (
        [json.loads(line) for line in file.read_text().splitlines(True) if line.endswith("\n")]
        if file.is_file()
        else []
    )


def steps_done(run: Path) -> int:
    """The last step that a run reported."""
    lines = _progress(run)
    return lines[-1]["step"] if lines else 0


def losses(run: Path) -> dict[int, float]:
    """A run's loss at each step, of the start that did it last."""
    return {line["step"]: line["loss"] for line in _progress(run)}


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """All tensors in a checkpoint, weights and the optimizer's state."""
    from torch.distributed.checkpoint import FileSystemReader, load
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(value.size, dtype=value.properties.dtype)
        for key, value in stored.items()
        if isinstance(value, TensorStorageMetadata)
    }
    load(state, storage_reader=reader, no_dist=True)
    return state
