"""The processes that torchrun or Slurm started together, on one node or several, and what they must agree on."""

import os
import sys
from collections.abc import Callable

from megatron_lengthgen.errors import UserError

__all__ = ["from_leader", "join", "leads", "rank", "world_size"]


def world_size() -> int:
    """Processes of this launch."""
    return int(os.environ.get("WORLD_SIZE", 1))


def rank() -> int:
    """The number of this process among them, from 0."""
    return int(os.environ.get("RANK", 0))


def leads() -> bool:
    """Whether this process speaks for all: opens the run, shows progress, writes the report."""
    return rank() == 0


def join(megatron: bool) -> None:
    """torch.distributed among the processes of this launch; nothing for one that was started alone.

    Args:
        megatron: whether they are to hold one Megatron model, and so may need NCCL.
    """
    if world_size() == 1:
        return
    import torch

    if torch.distributed.is_initialized():
        return
    if not megatron:
        torch.distributed.init_process_group("gloo")
        return
    from megatron_lengthgen.models.build import connect

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    connect()


def from_leader[T](make: Callable[[], T]) -> T:
    """What ``make`` returns in the leading process, in every process.

    On a shared folder the others may see old listings for a while, so none of them looks for itself.

    Raises:
        UserError: in the leading process, when ``make`` does; the others then end quietly, with its exit status.
    """
    if world_size() == 1:
        return make()
    import torch

    value: T | None = None
    error: UserError | None = None
    if leads():
        try:
            value = make()
        except UserError as raised:
            error = raised
    box = [(value, error is None)]
    torch.distributed.broadcast_object_list(box, src=0)
    value, fine = box[0]
    if error is not None:
        raise error
    if not fine:
        sys.exit(2)
    return value  # type: ignore[return-value]
