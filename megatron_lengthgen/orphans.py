"""Child processes do not outlive their parent, also where that is killed: they would wait for work for ever."""

import multiprocessing
import os
import threading

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """Have this process, a child by ``multiprocessing``, end as soon as its parent has. It imports nothing heavy."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
