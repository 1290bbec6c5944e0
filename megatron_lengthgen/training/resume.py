"""A run that goes on from a checkpoint goes on with the dropout that it began with, or not at all.

Dropout leaves no trace in the weights: a run that changes it half-way is neither the old run nor the new one, and its
checkpoints would not say so. What a run dropped is read from the arguments in its checkpoint (``args.lengthgen``); no
weights are loaded for it.
"""

import argparse
from pathlib import Path
from typing import Any

from megatron_lengthgen.checkpoint.load import TRACKER, checkpoint_args
from megatron_lengthgen.dropout.masks import MASK_VERSION
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models.build import regularization
from megatron_lengthgen.regularization import SITES
from megatron_lengthgen.training.optimizer_state import check_optimizer_state

__all__ = ["check_resume", "record"]

_VERSION = "lengthgen.mask_version"


def record(lengthgen: dict[str, Any]) -> dict[str, Any]:
    """What every checkpoint of a run carries as ``args.lengthgen``.

    Args:
        lengthgen: The resolved section of the configuration, defaults included.

    Returns:
        The section and ``mask_version``, the generator that its masks come from.
    """
    return {**lengthgen, "mask_version": MASK_VERSION}


def check_resume(args: argparse.Namespace) -> int:
    """Refuse to go on from a checkpoint of a run with another dropout.

    A run without dropout may go on with one that starts where the checkpoint ends, or later: both did the same so far.
    The seed counts where there are masks of this package, which follow from it.

    Args:
        args: Megatron's arguments of this run.

    Returns:
        Training steps that the checkpoint has behind it; 0 where a new run starts.

    Raises:
        UserError: naming what differs, with both values; or as :func:`.checkpoint.load.find_checkpoint`.
    """
    checkpoint = _resumed(args)
    if checkpoint is None:
        return 0
    check_optimizer_state(args, checkpoint)
    stored = checkpoint_args(checkpoint)
    step: int = stored.iteration
    old, new = _dropout(stored), _dropout(args)
    was_none = not _acts(old)
    if old == new or (was_none and not _acts_before(step, new)):
        return step
    changed = [name for name in old if name in new and old[name] != new[name]]
    ways = []
    if changed != [_VERSION]:
        ways.append(f"write the old value{'s' if len(changed) > 1 else ''}")
    if _VERSION in changed:
        ways.append("use the release of this package that wrote it")
    way = " and ".join(ways)
    if was_none and "lengthgen.start_step" in new:
        way += f", let the dropout begin now with lengthgen.start_step: {step}"
    raise UserError(
        f"the run in {args.load} did its {step:,} steps with {_written(old, changed)}, and would go on with "
        f"{_written(new, changed)}: {way}, or start a new run from its weights with pretrained_checkpoint: "
        f"{args.load} and another save"
    )


def _resumed(args: argparse.Namespace) -> Path | None:
    """The checkpoint whose run Megatron goes on with; None where it starts one, from weights or from nothing.

    Source: ``megatron/training/checkpointing.py::load_checkpoint`` and ``_load_base_checkpoint``.
    """
    if args.load is None or args.finetune:
        return None
    load = Path(args.load)
    if (load / TRACKER).is_file():
        if (load / TRACKER).read_text(encoding="utf-8", errors="replace").strip() == "release":
            return None
    elif args.pretrained_checkpoint is not None or not args.ckpt_step:
        return None
    return load / f"iter_{args.ckpt_step:07d}" if args.ckpt_step else load


def _dropout(args: argparse.Namespace) -> dict[str, Any]:
    """What decides a run's dropout, by the names in a configuration; values without any effect are left out."""
    section = getattr(args, "lengthgen", None)
    if not section:
        return _stock_dropout(args)
    chosen = regularization(args)
    values: dict[str, Any] = {"lengthgen.placement": chosen.placement}
    if chosen.placement != "none":
        values["lengthgen.p"] = args.hidden_dropout if chosen.p is None else chosen.p
    if chosen.placement == "vpad":
        values |= {"lengthgen.fill": chosen.fill, "lengthgen.statistics": chosen.statistics}
    if chosen.is_active:
        values |= {
            "lengthgen.sites": [site for site in SITES if site in chosen.sites],
            "lengthgen.start_step": chosen.start_step,
            "lengthgen.ramp_steps": chosen.ramp_steps,
            _VERSION: section.get("mask_version"),
            "seed": args.seed,
        }
    return values


def _stock_dropout(args: argparse.Namespace) -> dict[str, Any]:
    """The same for a checkpoint of somebody else's trainer: Megatron's own dropout, if any."""
    if getattr(args, "spec", None):
        raise UserError(
            f"the run in the checkpoint chose its layers with --spec {' '.join(args.spec)} and left no record of their "
            "dropout: go on with the trainer that wrote it, or start a new run from its weights with "
            "pretrained_checkpoint and another save"
        )
    if args.hidden_dropout:
        return {"lengthgen.placement": "pre_norm", "lengthgen.p": args.hidden_dropout}
    return {"lengthgen.placement": "none"}


def _acts(dropout: dict[str, Any]) -> bool:
    return bool(dropout.get("lengthgen.p"))


def _acts_before(step: int, dropout: dict[str, Any]) -> bool:
    """Has it dropped anything in the first ``step`` steps?"""
    return _acts(dropout) and dropout.get("lengthgen.start_step", 0) < step


def _written(dropout: dict[str, Any], names: list[str]) -> str:
    return ", ".join(f"{name}: {_yaml(dropout[name])}" for name in names)


def _yaml(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)
