"""One job at a time writes to a run's folder, and a dead one does not keep it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import run_lock
from megatron_lengthgen.training.run_lock import LOCK, RunLock

HOLD = """
import sys, time
from pathlib import Path
from megatron_lengthgen.training.run_lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""
# Of another machine, about which nothing can be known but what the file shows.
ELSEWHERE: dict[str, Any] = {"host": "node7", "pid": 4, "started": "1", "machine": "m", "job": "81", "restart": 0}


def lock(folder: Path, **options: Any) -> RunLock:
    return RunLock(folder, interval=0.05, patience=4, **options)


def leave(folder: Path, **fields: Any) -> Path:
    path = folder / LOCK
    path.write_text(json.dumps({**ELSEWHERE, "token": "theirs", "beats": 3, **fields}))
    return path


def test_the_second_of_two_jobs_is_refused(tmp_path: Path) -> None:
    with lock(tmp_path / "run"):
        with pytest.raises(UserError, match=rf"{tmp_path / 'run'} is in use by process {os.getpid()} on host"):
            lock(tmp_path / "run").__enter__()
        assert (tmp_path / "run" / LOCK).is_file()
    assert list((tmp_path / "run").iterdir()) == []


def test_a_job_that_was_killed_here_does_not_keep_the_folder(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"in use by process {holder.pid} "):
        RunLock(tmp_path, interval=0.5, patience=20).__enter__()
    holder.send_signal(signal.SIGKILL)
    # Not reaped: a zombie is as dead.
    time.sleep(0.2)
    began = time.monotonic()
    with RunLock(tmp_path, interval=1.0, patience=60):
        assert time.monotonic() - began < 5
    holder.wait()


def test_a_number_that_was_given_to_another_process_does_not_count(tmp_path: Path) -> None:
    me = run_lock._identity()
    leave(tmp_path, **{**me, "started": "1"})
    with RunLock(tmp_path, interval=1.0, patience=60):
        pass


def test_a_holder_elsewhere_counts_as_dead_once_it_gives_no_sign(tmp_path: Path) -> None:
    leave(tmp_path)
    began = time.monotonic()
    with lock(tmp_path) as mine:
        assert time.monotonic() - began >= 4 * 0.05
        assert mine._is_mine()


def test_a_holder_elsewhere_that_lives_is_named(tmp_path: Path) -> None:
    path = leave(tmp_path)
    timer = threading.Timer(0.1, lambda: leave(tmp_path, beats=4))
    timer.start()
    with pytest.raises(UserError, match="in use by process 4 on host node7, Slurm job 81: wait for it to end"):
        RunLock(tmp_path, interval=0.3, patience=3).__enter__()
    timer.join()
    assert json.loads(path.read_text())["token"] == "theirs"


def test_a_requeued_job_goes_on_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "81")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    leave(tmp_path)
    began = time.monotonic()
    with RunLock(tmp_path, interval=1.0, patience=60):
        assert time.monotonic() - began < 5


def test_two_steps_of_one_job_are_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "81")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    leave(tmp_path)
    timer = threading.Timer(0.1, lambda: leave(tmp_path, beats=4))
    timer.start()
    with pytest.raises(UserError, match="in use"):
        RunLock(tmp_path, interval=0.3, patience=3).__enter__()
    timer.join()


def test_of_many_that_find_a_dead_lock_one_gets_it(tmp_path: Path) -> None:
    leave(tmp_path)
    locks = [RunLock(tmp_path, interval=0.3, patience=2) for _ in range(6)]

    def enter(one: RunLock) -> bool:
        try:
            one.__enter__()
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(len(locks)) as pool:
        won = list(pool.map(enter, locks))
    assert sum(won) == 1
    locks[won.index(True)].__exit__(None, None, None)
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_lost_its_folder_learns_it_and_leaves_the_lock(tmp_path: Path) -> None:
    told: list[str] = []
    with lock(tmp_path, lost=told.append):
        path = leave(tmp_path)
        end = time.monotonic() + 10
        while not told and time.monotonic() < end:
            time.sleep(0.02)
    assert told and "was taken over by process 4 on host node7, Slurm job 81" in told[0]
    assert json.loads(path.read_text())["token"] == "theirs"


@pytest.mark.parametrize("content", ["", "{", "[]"])
def test_a_lock_that_holds_nothing_readable_is_watched_like_any_other(tmp_path: Path, content: str) -> None:
    (tmp_path / LOCK).write_text(content)
    with lock(tmp_path) as mine:
        assert mine._is_mine()
