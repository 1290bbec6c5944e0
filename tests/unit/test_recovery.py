"""A damaged newest checkpoint is found, said, and the one before it used."""

import os
import shutil
import socket
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from megatron_lengthgen.checkpoint.common import prepare_saving
from megatron_lengthgen.checkpoint.load import TRACKER, find_checkpoint
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training.recovery import recover

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.fixture(scope="module")
def checkpoint(megatron_single, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``torch_dist`` checkpoint as Megatron writes one, with hashes."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor

    path = tmp_path_factory.mktemp("checkpoint") / "one"
    path.mkdir()
    weight = torch.randn(64, 64)
    state = {
        "args": Namespace(num_layers=2),
        "iteration": 10,
        "w": ShardedTensor.from_rank_offsets("decoder.w", weight, replica_id=0),
    }
    prepare_saving()
    dist_checkpointing.save(state, str(path), async_strategy="mcore", verify_integrity=True)
    return path


@pytest.fixture
def run(checkpoint: Path, tmp_path: Path) -> Path:
    """A run's folder with checkpoints at steps 10, 20 and 30, and one at 40 whose save never ended."""
    for step in (10, 20, 30, 40):
        shutil.copytree(checkpoint, tmp_path / f"iter_{step:07d}")
    (tmp_path / "iter_0000040" / "metadata.json").unlink()
    (tmp_path / TRACKER).write_text("30")
    return tmp_path


def shard(checkpoint: Path) -> Path:
    return next(file for file in sorted(checkpoint.glob("*.distcp")) if file.stat().st_size > 4096)


def truncate(checkpoint: Path) -> None:
    file = shard(checkpoint)
    file.write_bytes(file.read_bytes()[:-100])


def corrupt_index(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"\0" * 100)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: shard(path).unlink(), "is missing, but .metadata names it"),
    "truncated": (truncate, "bytes instead of"),
    "index": (corrupt_index, ".metadata cannot be read"),
    "no index": (lambda path: (path / ".metadata").unlink(), "has no .metadata"),
    "no end": (lambda path: (path / "metadata.json").unlink(), "was not saved to the end"),
}


def test_a_whole_newest_checkpoint_is_left_alone(run: Path) -> None:
    before = sorted(run.iterdir())
    assert recover(run) == []
    assert sorted(run.iterdir()) == before
    assert (run / TRACKER).read_text() == "30"


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_one_before_a_damaged_one_is_used(run: Path, damage: str) -> None:
    harm, words = DAMAGES[damage]
    harm(run / "iter_0000030")
    remarks = recover(run)
    assert len(remarks) == 2, remarks
    damaged, used = remarks
    assert damaged.startswith("iter_0000030 is damaged: ") and words in damaged
    assert damaged.endswith("it was moved to iter_0000030.damaged")
    assert used == "the run goes on from iter_0000020, the newest checkpoint that is whole"
    assert find_checkpoint(run) == run / "iter_0000020"
    assert (run / "iter_0000030.damaged").is_dir() and not (run / "iter_0000030").exists()
    assert recover(run) == []


def test_hashes_find_what_sizes_do_not(run: Path) -> None:
    file = shard(run / "iter_0000030")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert recover(run) == []
    damaged, _ = recover(run, verify=True)
    assert "hash mismatch" in damaged


def test_two_damaged_ones_are_both_passed_over(run: Path) -> None:
    truncate(run / "iter_0000030")
    corrupt_index(run / "iter_0000020")
    assert len(recover(run)) == 3
    assert find_checkpoint(run) == run / "iter_0000010"
    assert (run / "iter_0000020.damaged").is_dir()


def test_a_second_damage_at_the_same_step_has_a_name_too(run: Path) -> None:
    (run / "iter_0000030.damaged").mkdir()
    truncate(run / "iter_0000030")
    assert recover(run)[0].endswith("it was moved to iter_0000030.damaged1")


@pytest.mark.parametrize("text", ["", "thirty"])
def test_a_tracker_that_was_not_written_to_the_end_is_mended(run: Path, text: str) -> None:
    (run / TRACKER).write_text(text)
    first, used = recover(run)
    assert f"holds {text!r}, no iteration" in first
    assert "iter_0000030" in used
    assert find_checkpoint(run) == run / "iter_0000030"


def test_a_tracker_that_names_nothing_there_goes_back(run: Path) -> None:
    shutil.rmtree(run / "iter_0000030")
    gone, used = recover(run)
    assert gone == f"iter_0000030 is named by {TRACKER}, but it is not there"
    assert "iter_0000020" in used


def test_a_lost_tracker_is_written_again(run: Path) -> None:
    (run / TRACKER).unlink()
    assert f"{TRACKER} is missing" in recover(run)[0]
    assert find_checkpoint(run) == run / "iter_0000030"


def test_a_tracker_that_was_set_back_stays_there(run: Path) -> None:
    (run / TRACKER).write_text("10")
    assert recover(run) == []
    assert (run / "iter_0000030").is_dir()


def test_nothing_whole_is_refused(run: Path) -> None:
    for step in (10, 20, 30):
        truncate(run / f"iter_{step:07d}")
    with pytest.raises(
        UserError, match=r"no checkpoint in .* is whole, the newest, iter_0000030, because .* bytes instead"
    ):
        recover(run)


def test_a_run_that_was_killed_in_its_first_save_starts_anew(run: Path) -> None:
    (run / TRACKER).unlink()
    for step in (10, 20, 30):
        shutil.rmtree(run / f"iter_{step:07d}")
    assert recover(run) == []


def test_no_run_and_a_converted_checkpoint_are_no_matter(tmp_path: Path) -> None:
    assert recover(tmp_path / "none") == []
    (tmp_path / TRACKER).write_text("release")
    assert recover(tmp_path) == []


def test_no_process_outlives_a_killed_rank() -> None:
    code = """
import time
import psutil
from megatron_lengthgen import backends
backends.prepare()
from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
from megatron_lengthgen.training.writers import start_writers
start_writers(True)
PersistentAsyncCaller._get_process(0, "forkserver")
PersistentAsyncCaller._persistent_queue.put("to start its queue")
while PersistentAsyncCaller._persistent_queue.qsize():
    time.sleep(0.05)
print(*(child.pid for child in psutil.Process().children(recursive=True)), flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as rank:
        assert rank.stdout is not None
        children = [psutil.Process(int(pid)) for pid in rank.stdout.readline().split()]
        # The collector of results, the fork server, the writer, and Python's tracker of their semaphores.
        assert len(children) == 4 and all(map(_runs, children))
        rank.kill()
    end = time.monotonic() + 10
    while any(map(_runs, children)) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(map(_runs, children))


def _runs(process: psutil.Process) -> bool:
    """Whether it does anything; nobody may be there to reap it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


_KILLED = "os.kill(writer.pid, signal.SIGKILL)"
_FAILED = "caller._persistent_queue.put(AsyncRequest(print, (1, 2), [], preload_fn=partial(int, 'x')))"


# As a run that ends with an error of its own ends it.
_ENDED = "end_writers(); time.sleep(5); sys.exit(3)"


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (_KILLED, 75, "was killed by SIGKILL"),
        pytest.param(_FAILED, 2, "failed", marks=pytest.mark.slow),
        pytest.param(_ENDED, 3, None, marks=pytest.mark.slow),
    ],
    ids=["killed", "failed", "ended"],
)
def test_a_rank_ends_with_its_asynchronous_writer(fault: str, status: int, words: str | None) -> None:
    code = f"""
import os, signal, sys, time
from functools import partial
from megatron_lengthgen import backends
backends.prepare()
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, PersistentAsyncCaller as caller
from megatron_lengthgen.training.writers import end_writers, start_writers
start_writers(True)
writer = caller._get_process(0, "forkserver")
{fault}
caller._persistent_preload_q.put(0)
caller._persistent_preload_q.join()
"""
    environment = {**os.environ, "RANK": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == status, done.stderr
    writer = f"the process that writes the checkpoints of rank 3 on host {socket.gethostname()}"
    said = [line for line in done.stderr.splitlines() if writer in line]
    assert [line.startswith(f"error: {writer} {words}") for line in said] == ([True] if words else [])
