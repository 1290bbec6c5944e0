"""The processes beside a rank that write its checkpoints.

Slurm sends its signals to all processes of a task. These must outlive the warning, or there is no last save: Megatron
waits for its asynchronous writer for ever where that has been killed. And they must not outlive the rank.
"""

import multiprocessing
import signal
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess

from megatron_lengthgen import backends
from megatron_lengthgen.checkpoint.common import prepare_saving

__all__ = ["end_writers", "start_writers"]


def start_writers(asynchronous: bool) -> None:
    """Start what writes checkpoints, before there are sockets that it would keep open when this rank is killed.

    Args:
        asynchronous: whether the run saves so; Megatron then forks its writer from Python's fork server, which hands
            down what it ignores.
    """
    handler = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        prepare_saving()
        if asynchronous:
            # On a GPU the server must not touch CUDA before it forks.
            if backends.prepare() == "cpu":
                forkserver.set_forkserver_preload(["__main__", "megatron_lengthgen.training.writer_process"])
            forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGTERM, handler)


def end_writers() -> None:
    """Kill an asynchronous writer that Megatron did not end, after an error; Python would wait for it."""
    for process in multiprocessing.active_children():
        if isinstance(process, ForkServerProcess):
            process.kill()
