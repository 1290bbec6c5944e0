"""The scripts of tools/launch: what they start, what they do when it ends; and, slowly, real runs through them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import util
from pathlib import Path
from typing import Any

import cluster
import network
import pytest
from cluster import CONF, losses

from megatron_lengthgen.checkpoint.load import TRACKER
from megatron_lengthgen.training.faults import RESTART

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "tools" / "launch"
NODES = 2
# In the place of Python: notes what it was given, then does as the test asked.
TRAINER = """#!/usr/bin/env bash
printf '%s\\n' "$@" >"$NOTES/arguments$RANK"
env >"$NOTES/environment$RANK"
trap 'exit 0' TERM
[ "$DO" != wait ] || { while :; do sleep 0.05; done; }
exit "$DO"
"""


class Slurm:
    """A job's life: ``start`` runs the batch script once, as Slurm does at first and after every requeue."""

    def __init__(self, folder: Path, nodes: network.Network | network.Loopback) -> None:
        self.folder, self._nodes = folder, nodes

    def start(self, *arguments: str, restarts: int = 0, **environment: str) -> subprocess.Popen[str]:
        variables = {
            "PATH": f"{Path(__file__).parent / 'slurm'}{os.pathsep}{os.environ['PATH']}",
            "FAKE_SLURM": str(self.folder),
            "FAKE_NAMESPACES": " ".join(name or "-" for name in self._nodes.namespaces),
            "NOTES": str(self.folder),
            "SLURM_SUBMIT_DIR": str(ROOT),
            "SLURM_JOB_ID": "4242",
            "SLURM_JOB_NODELIST": ",".join(self._nodes.addresses),
            "SLURM_NTASKS": str(NODES),
            "SLURM_NNODES": str(NODES),
            "SLURM_RESTART_COUNT": str(restarts),
            "GLOO_SOCKET_IFNAME": self._nodes.interface,
            **environment,
        }
        return subprocess.Popen(
            ["bash", str(LAUNCH / "slurm.sbatch"), *arguments],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def requeued(self) -> int:
        notes = self.folder / "requeued"
        return len(notes.read_text().split()) if notes.is_file() else 0

    def environment(self, task: int) -> dict[str, str]:
        lines = (self.folder / f"environment{task}").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    with network.make(NODES) as nodes:
        yield Slurm(tmp_path, nodes)


@pytest.fixture
def trainer(tmp_path: Path) -> str:
    path = tmp_path / "trainer"
    path.write_text(TRAINER)
    path.chmod(0o755)
    return str(path)


def test_slurm_tasks_are_ranks_that_find_each_other(slurm: Slurm, trainer: str) -> None:
    job = slurm.start("my.yaml", "lr=1e-4", PYTHON=trainer, DO="0")
    assert job.wait(30) == 0 and slurm.requeued == 0
    for task in range(NODES):
        assert (slurm.folder / f"arguments{task}").read_text().split() == [
            "tools/continual_pretrain.py",
            "my.yaml",
            "lr=1e-4",
        ]
        seen = slurm.environment(task)
        assert (seen["RANK"], seen["WORLD_SIZE"], seen["LOCAL_RANK"], seen["LOCAL_WORLD_SIZE"]) == (
            str(task),
            "2",
            "0",
            "1",
        )
        assert seen["MASTER_ADDR"] == slurm._nodes.addresses[0]
        assert 20000 <= int(seen["MASTER_PORT"]) < 32768


@pytest.mark.parametrize(
    ("ends", "restarts", "status", "requeued"),
    [
        ("0", 0, 0, 0),  # finished
        ("2", 0, 2, 0),  # bad input is bad the next time too
        (str(RESTART), 0, 0, 1),  # lost contact
        ("1", 3, 0, 1),
        ("1", 20, 1, 0),  # it has been tried often enough
    ],
)
def test_slurm_requeues_what_may_do_better(
    slurm: Slurm, trainer: str, ends: str, restarts: int, status: int, requeued: int
) -> None:
    job = slurm.start("my.yaml", PYTHON=trainer, DO=ends, restarts=restarts)
    assert job.wait(30) == status
    assert slurm.requeued == requeued


def test_slurm_out_of_time_saves_and_requeues(slurm: Slurm, trainer: str) -> None:
    job = slurm.start("my.yaml", PYTHON=trainer, DO="wait")
    end = time.monotonic() + 20
    while not all((slurm.folder / f"environment{task}").is_file() for task in range(NODES)):
        assert time.monotonic() < end
        time.sleep(0.02)
    time.sleep(0.2)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(30) == 0
    assert slurm.requeued == 1


def test_scripts_say_how_they_are_used(slurm: Slurm) -> None:
    job = slurm.start()
    assert job.wait(30) == 2 and "usage: sbatch" in job.communicate()[0]
    refused = subprocess.run(["bash", str(LAUNCH / "torchrun.sh"), "my.yaml"], capture_output=True, text=True)
    assert refused.returncode == 2 and "usage: NNODES=N HEAD=HOST" in refused.stderr
    environment = {**os.environ, "NNODES": "2", "HEAD": "no.such.host.invalid", "PYTHON": sys.executable}
    command = ["bash", str(LAUNCH / "torchrun.sh"), "my.yaml"]
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode == 2 and "error: no way to HEAD no.such.host.invalid" in refused.stderr


def test_torchrun_takes_what_the_script_gives_it(tmp_path: Path) -> None:
    """By its own parser."""
    from torch.distributed.run import config_from_args, parse_args

    echo = tmp_path / "echo"
    echo.write_text(f'#!/usr/bin/env bash\n[ "$1" != -c ] || exec {sys.executable} "$@"\nprintf "%s\\n" "$@"\n')
    echo.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(echo), "NNODES": "4", "HEAD": "127.0.0.1", "GPUS": "2", "LEAD": "300"}
    given = subprocess.run(
        ["bash", str(LAUNCH / "torchrun.sh"), "my.yaml", "lr=1"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    assert given[:2] == ["-m", "torch.distributed.run"]
    config, _, arguments = config_from_args(parse_args(given[2:-1]))
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (4, 4, 2)
    assert (config.rdzv_endpoint, config.rdzv_backend, config.run_id) == ("127.0.0.1:29400", "c10d", "lengthgen")
    assert config.max_restarts == 10 and config.shutdown_timeout == 300
    assert config.rdzv_configs["is_host"] == "1" and config.local_addr == "127.0.0.1"
    assert arguments[-3:] == [str(ROOT / "tools" / "continual_pretrain.py"), "my.yaml", "lr=1"]


def _nemo_options(**changed: Any) -> Any:
    from argparse import Namespace

    options = {"gpus": 4, "nodes": 1, "account": None, "partition": None, "time": "1:00:00", "container": None}
    return Namespace(**{**options, **changed})


def test_nemo_run_starts_the_same_command() -> None:
    pytest.importorskip("nemo_run", reason="nemo_run is not installed: pip install nemo-run")
    spec = util.spec_from_file_location("nemo_entry", LAUNCH / "nemo.py")
    assert spec is not None and spec.loader is not None
    entry = util.module_from_spec(spec)
    spec.loader.exec_module(entry)
    task = entry.task("conf.yaml", ["lr=1"])
    assert task.args == [os.path.abspath("conf.yaml"), "lr=1"]
    local = entry.executor(_nemo_options())
    assert local.launcher is not None
    slurm = entry.executor(_nemo_options(account="a", partition="p", nodes=3))
    assert (slurm.nodes, slurm.ntasks_per_node) == (3, 4)


STEPS = "train_iters=400 use_distributed_optimizer=true save_interval=1000"


@pytest.mark.slow
def test_a_slurm_job_runs_out_of_time_and_goes_on(slurm: Slurm) -> None:
    save = slurm.folder / "run"
    arguments = [str(CONF), f"save={save}", *STEPS.split()]
    whole = slurm.start(str(CONF), f"save={slurm.folder / 'whole'}", *STEPS.split(), PYTHON=sys.executable)
    assert whole.wait(300) == 0, (slurm.folder / "task0.log").read_text()
    job = slurm.start(*arguments, PYTHON=sys.executable)
    end = time.monotonic() + 200
    while cluster.steps_done(save) < 3:
        assert time.monotonic() < end and job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(120) == 0 and slurm.requeued == 1
    assert 3 <= int((save / TRACKER).read_text()) < 400
    again = slurm.start(*arguments, restarts=1, PYTHON=sys.executable)
    assert again.wait(300) == 0 and slurm.requeued == 1
    assert losses(save) == losses(slurm.folder / "whole")


@pytest.mark.slow
def test_torchrun_on_two_nodes_starts_again_when_a_rank_is_killed(tmp_path: Path) -> None:
    """The agents stay; their ranks meet again and go on from the last checkpoint."""
    run = ["train_iters=200", "use_distributed_optimizer=true", "save_interval=20"]
    with network.make(NODES) as nodes:

        def launch(save: str) -> list[subprocess.Popen[bytes]]:
            processes = []
            for node, namespace in enumerate(nodes.namespaces):
                enter = ["ip", "netns", "exec", namespace] if namespace else []
                environment = {
                    **os.environ,
                    "NNODES": str(NODES),
                    "HEAD": nodes.addresses[0],
                    "GPUS": "1",
                    "PYTHON": sys.executable,
                    "GLOO_SOCKET_IFNAME": nodes.interface,
                }
                with (tmp_path / f"{save}{node}.log").open("wb") as log:
                    command = [*enter, "bash", str(LAUNCH / "torchrun.sh"), str(CONF), f"save={tmp_path / save}", *run]
                    processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            return processes

        assert [process.wait(300) for process in launch("whole")] == [0, 0], (tmp_path / "whole0.log").read_text()
        agents = launch("killed")
        end = time.monotonic() + 200
        while cluster.steps_done(tmp_path / "killed") < 30:
            assert time.monotonic() < end
            time.sleep(0.02)
        holder = json.loads((tmp_path / "killed" / "run.lock").read_text())
        os.kill(holder["pid"], signal.SIGKILL)
        assert [process.wait(400) for process in agents] == [0, 0], (tmp_path / "killed0.log").read_text()
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
