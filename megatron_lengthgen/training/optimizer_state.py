"""Adam's state in a checkpoint that Megatron would give back to the wrong parameters, refused before a model is built.

Megatron's distributed optimizer writes its state by position unless ``dist_ckpt_optim_fully_reshardable`` is set: one
flat tensor per bucket, read back in the order of the running model's parameters. A norm that dropout has taken out of
Transformer Engine's fused layer stands elsewhere in that order than it did inside. The sizes agree, so that nothing
fails: moments, and with them Megatron's main parameters, silently land in other parameters.

Source: ``megatron/core/optimizer/distrib_optimizer.py::load_parameter_state_from_dp_reshardable``.
"""

import argparse
import os
from typing import Any

from megatron_lengthgen import backends
from megatron_lengthgen.checkpoint.load import checkpoint_args, find_checkpoint
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models.build import regularization

__all__ = ["MOVING", "check_optimizer_state"]

#: Sites whose norm moves when it is taken out of its linear; ``linear_fc1``'s stands right before it either way.
MOVING = ("attention", "mamba")


def check_optimizer_state(args: argparse.Namespace, checkpoint: str | os.PathLike[str]) -> None:
    """Refuse to resume from ``checkpoint`` where its optimizer state is by position and this run's order is another.

    Args:
        args: Megatron's arguments of this run, with ``args.lengthgen``.
        checkpoint: what the run goes on with, as for :func:`.checkpoint.load.find_checkpoint`. Do not call this for a
            run that takes weights alone (``finetune``, ``pretrained_checkpoint``).

    Raises:
        UserError: naming the format, and the flags that help.
    """
    if not args.use_distributed_optimizer or args.no_load_optim:
        return
    path = find_checkpoint(checkpoint)
    stored = checkpoint_args(path)
    sharding = _sharding(stored, str(path))
    if stored.no_save_optim or _is_by_name(sharding) or _order(stored) == _order(args):
        return
    raise UserError(
        f"the optimizer state in {path} is stored by position ({sharding}), and this run has its norms in other "
        "positions, so that moments and weights would land in other parameters: let the run that wrote it save once "
        "more with dist_ckpt_optim_fully_reshardable: true, or begin with a fresh optimizer by no_load_optim: true"
    )


def _sharding(stored: argparse.Namespace, path: str) -> str:
    """As Megatron reads it (``megatron/training/checkpointing.py::load_checkpoint``)."""
    backends.prepare()
    from megatron.core import dist_checkpointing

    content = dist_checkpointing.load_content_metadata(path)
    if content is None:  # older than the entry
        return "fully_sharded_model_space" if stored.ckpt_fully_parallel_save else "dp_zero_gather_scatter"
    # Absent where the optimizer was not distributed, whose state is by name.
    return content.get("distrib_optim_sharding_type", "fully_sharded_model_space")


def _is_by_name(sharding: str) -> bool:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    return sharding in (*DistributedOptimizer.checkpoint_fully_reshardable_formats, "fsdp_dtensor")


def _order(args: argparse.Namespace) -> tuple[Any, ...]:
    """What decides the order of the parameters of one architecture."""
    if args.spec:  # somebody else's, or ours without this package's trainer
        return tuple(args.spec)
    chosen = regularization(args)
    if args.transformer_impl == "local" or not chosen.is_active:
        return (args.transformer_impl,)
    return (args.transformer_impl, *(site for site in MOVING if site in chosen.sites))
