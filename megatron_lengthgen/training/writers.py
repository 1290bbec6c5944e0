"""The processes beside a rank that write its checkpoints.

Slurm sends its signals to all processes of a task. These must outlive the warning, or there is no last save: Megatron
waits for its asynchronous writer for ever where that has been killed, so the rank ends then. And they must not outlive
the rank.
"""

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any

from megatron_lengthgen import backends
from megatron_lengthgen.checkpoint.common import prepare_saving
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training.faults import RESTART

__all__ = ["end_writers", "start_writers"]

#: Seconds between two looks at the writer, and those that Megatron has to forget one that it ended itself.
_PAUSE = 1.0
#: Set when the writer's end is nobody's fault any more.
_ended = threading.Event()


def start_writers(asynchronous: bool) -> None:
    """Start what writes checkpoints, before there are sockets that it would keep open when this rank is killed.

    Args:
        asynchronous: whether the run saves so; Megatron then forks its writer from Python's fork server, which hands
            down what it ignores.
    """
    global _ended
    _ended = threading.Event()
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        prepare_saving()
        if asynchronous:
            preload = ["__main__", "megatron_lengthgen.training.writer_process"]
            if backends.prepare() == "cpu":
                preload.append("megatron_lengthgen.training.writer_on_cpu")
            forkserver.set_forkserver_preload(preload)
            forkserver.ensure_running()
            # Imported here, since two threads that import Megatron at once may each see half of it.
            from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

            threading.Thread(target=_watch_writer, args=(PersistentAsyncCaller, _ended), daemon=True).start()
    finally:
        signal.signal(signal.SIGTERM, handler)


def end_writers() -> None:
    """Kill an asynchronous writer that Megatron did not end, after an error; Python would wait for it."""
    _ended.set()
    for process in multiprocessing.active_children():
        if isinstance(process, ForkServerProcess):
            process.kill()


def _watch_writer(caller: Any, ended: threading.Event) -> None:
    """End this process where the writer of ``caller``, a ``PersistentAsyncCaller``, ends before it is told to."""
    while not ended.is_set():
        process = caller._persistent_process
        if process is not None and process.pid and connection.wait([process.sentinel], timeout=_PAUSE):
            time.sleep(_PAUSE)
            if caller._persistent_process is process and not ended.is_set():
                _give_up(process.exitcode)
        time.sleep(_PAUSE)


def _give_up(exit_status: int) -> None:
    """Say that the writer is gone and end this process, whose main thread would wait for it."""
    rank = f"rank {os.environ.get('RANK', '0')} on host {socket.gethostname()}"
    if exit_status < 0:
        cause = f"was killed by {signal.Signals(-exit_status).name}: see whether the node has too little memory"
    else:
        cause = "failed, as its traceback above says: see whether the disk is full"
    print(
        f"error: the process that writes the checkpoints of {rank} {cause}; the same command goes on from the last "
        "whole checkpoint",
        file=sys.stderr,
        flush=True,
    )
    os._exit(RESTART if exit_status < 0 else UserError.exit_status)
