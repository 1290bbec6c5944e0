"""One job at a time writes to a run's folder.

The lock is a file that its holder rewrites every few seconds. File locks of the operating system are not kept across
the nodes of every shared file system, and times of different machines do not compare; whether a file changes while one
watches it is the same everywhere. A holder that was killed leaves a file that changes no more.
"""

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import write_json

__all__ = ["LOCK", "RunLock"]

LOCK = "run.lock"


class RunLock:
    """Holds ``folder``/run.lock while its ``with`` block runs.

    Args:
        folder: the run's folder; made if absent.
        interval: seconds between two signs of life.
        patience: signs of life that a holder may miss before it counts as dead.
        lost: called, from another thread, when another job has taken the lock while this process slept; by default the
            process ends at once, for what it would save now could destroy what the other one saves.

    Raises:
        UserError: on entry, where another job holds the lock and lives.
    """

    def __init__(
        self, folder: Path, *, interval: float = 5.0, patience: int = 6, lost: Callable[[str], None] | None = None
    ) -> None:
        self.path = folder / LOCK
        self._interval, self._patience, self._lost = interval, patience, lost or _end
        self._owner = {**_identity(), "token": uuid.uuid4().hex}
        self._beats = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="run lock", daemon=True)

    def __enter__(self) -> Self:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self._create():
            self._check_dead(self._read())
            self._beat()
            # Two jobs may have found the same lock dead; the one that wrote last has it.
            time.sleep(min(self._interval, 1.0))
            holder = self._read()
            if holder.get("token") != self._owner["token"]:
                raise self._refusal(holder)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopped.set()
        self._thread.join()
        if self._is_mine():
            self.path.unlink(missing_ok=True)

    def _create(self) -> bool:
        """Write the lock unless there is one; network file systems too create a file for one process alone."""
        try:
            with self.path.open("x", encoding="utf-8") as file:
                file.write(json.dumps({**self._owner, "beats": 0}))
        except FileExistsError:
            return False
        return True

    def _beat(self) -> None:
        self._beats += 1
        write_json(self.path, {**self._owner, "beats": self._beats})

    def _read(self) -> dict[str, Any]:
        try:
            value = json.loads(self.path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def _is_mine(self) -> bool:
        return self._read().get("token") == self._owner["token"]

    def _check_dead(self, holder: dict[str, Any]) -> None:
        if _has_ended(holder):
            return
        print(f"{self.path} is held by {_described(holder)}: seeing whether it lives", flush=True)
        for _ in range(self._patience):
            time.sleep(self._interval)
            now = self._read()
            if not self.path.exists():
                return
            if now != holder:
                raise self._refusal(now)

    def _refusal(self, holder: dict[str, Any]) -> UserError:
        return UserError(
            f"{self.path.parent} is in use by {_described(holder)}: wait for it to end, end it, or choose another save"
        )

    def _keep(self) -> None:
        while not self._stopped.wait(self._interval):
            holder = self._read()
            if holder and holder.get("token") != self._owner["token"]:
                self._lost(
                    f"{self.path.parent} was taken over by {_described(holder)} while this job gave no sign of life: "
                    "it ends without saving"
                )
                return
            # A file system that is away for a while, or full, ends no run by this.
            with contextlib.suppress(OSError):
                self._beat()


def _identity() -> dict[str, Any]:
    """Who this process is: its machine since it was booted, its process namespace, its job and the job's restarts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": _started(os.getpid()),
        "machine": f"{boot.read_text().strip()} {os.readlink(namespace)}" if boot.is_file() else None,
        "job": os.environ.get("SLURM_JOB_ID"),
        "restart": int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    }


def _started(pid: int) -> str | None:
    """When a process was started, in ticks since boot; None where it has ended. Process numbers are given again."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _has_ended(holder: dict[str, Any]) -> bool:
    """Whether the holder is known to be dead without watching it."""
    me = _identity()
    if holder.get("machine") and holder.get("machine") == me["machine"]:
        return _started(holder.get("pid", 0)) != holder.get("started")
    # Slurm requeues a job once all its processes have ended.
    return holder.get("job") is not None and holder["job"] == me["job"] and holder.get("restart", 0) < me["restart"]


def _described(holder: dict[str, Any]) -> str:
    if not holder:
        return "another job"
    job = f", Slurm job {holder['job']}" if holder.get("job") else ""
    return f"process {holder.get('pid')} on host {holder.get('host')}{job}"


def _end(message: str) -> None:
    print(f"error: {message}", flush=True)
    os._exit(2)
