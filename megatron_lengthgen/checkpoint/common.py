"""What reading and writing checkpoints share: arguments of a portable model, room on the disk, errors in one line."""

import contextlib
import os
import shutil
import threading
import uuid
from collections.abc import Iterator
from multiprocessing import util
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import atomic_directory
from megatron_lengthgen.orphans import end_with_parent

__all__ = ["LOCAL", "check_space", "make_readable", "prepare_saving", "reason", "replacing_directory"]

LOCAL: dict[str, Any] = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
}
"""Megatron arguments for building a model without kernels that not every machine has.

The sharded keys of the local spec are Transformer Engine's too (``gpt_layer_specs.py::get_gpt_layer_local_spec``)."""


def reason(error: BaseException) -> str:
    """One line for the innermost cause; torch.distributed.checkpoint wraps it in tracebacks, one for each rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def prepare_saving() -> None:
    """Start the process through which Megatron's checkpoint writer collects its results, by a fork.

    At the first save Megatron would spawn it, and a spawned process imports torch and Megatron once more: seconds of
    every rank. Call it before process groups and CUDA are initialised; a second call does nothing. The process ends
    with this one, also where that is killed.

    Source: ``megatron/core/dist_checkpointing/strategies/filesystem_async.py::get_write_results_queue``.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    mark = threading.Event()  # what is registered counts as long as this lives
    util.register_after_fork(mark, lambda mark: end_with_parent())
    get_write_results_queue(mp_mode="fork")


def check_space(destination: Path, needed: int) -> None:
    """Refuse a disk without room for ``needed`` bytes; writers say so less clearly, and minutes later."""
    existing = next(parent for parent in destination.resolve().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{destination} needs {needed / 1e6:,.0f} MB, but {existing} has {free / 1e6:,.0f} MB free: "
            "make room or choose another disk"
        )


@contextlib.contextmanager
def replacing_directory(destination: Path, replaces: bool) -> Iterator[Path]:
    """A temporary directory that becomes ``destination``; what it replaces is moved aside until then."""
    aside = destination.with_name(f".{destination.name}.{uuid.uuid4().hex[:8]}.old")
    try:
        with atomic_directory(destination) as temporary:
            yield temporary
            if replaces:
                os.replace(destination, aside)
    except BaseException:
        if aside.exists() and not destination.exists():
            os.replace(aside, destination)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def make_readable(file: Path) -> None:
    """Give ``file`` the permissions of a new file; safetensors writes for its owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)
