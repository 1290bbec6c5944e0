"""How long a stage of training is and how its learning rate moves, in tokens instead of steps."""

import argparse
import math
from collections.abc import Mapping
from typing import Any

from megatron_lengthgen.errors import UserError

__all__ = ["TOKEN_BUDGETS", "check", "describe", "in_steps", "positive_number", "tokens_per_step"]

_STEPS = {
    "train_tokens": "train_iters",
    "lr_warmup_tokens": "lr_warmup_iters",
    "lr_decay_tokens": "lr_decay_iters",
    "lr_wsd_decay_tokens": "lr_wsd_decay_iters",
}
#: Keys of a run's YAML that Megatron does not know.
TOKEN_BUDGETS = tuple(_STEPS)
#: Under these a step's number of tokens changes while a run goes on.
_CHANGING_BATCH = ("rampup_batch_size", "step_batch_size_schedule")
#: Other ways to say the same as a budget.
_RIVALS = {"train_tokens": ("train_samples",), "lr_warmup_tokens": ("lr_warmup_fraction", "lr_warmup_samples")}


def in_steps(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace token budgets by Megatron's numbers of steps, each rounded up to a whole step.

    Args:
        values: Megatron's argument names to values, and any of :data:`TOKEN_BUDGETS`.

    Raises:
        UserError: for a budget that is given in steps or samples too, or that no number of whole steps is.
    """
    budgets = {name: values[name] for name in _STEPS if values.get(name) is not None}
    rest = {name: value for name, value in values.items() if name not in _STEPS}
    if not budgets:
        return rest
    step = tokens_per_step(values, next(iter(budgets)))
    for name, budget in budgets.items():
        for other in (_STEPS[name], *_RIVALS.get(name, ())):
            if rest.get(other) is not None:
                raise UserError(f"{name} and {other} say the same thing twice: keep one")
        if rest.get("train_samples") is not None:
            raise UserError(f"{name} counts tokens and train_samples counts samples: write train_tokens for the latter")
        # A warm-up of 0 tokens is one that a configuration leaves out.
        smallest = 0 if name == "lr_warmup_tokens" else 1
        rest[_STEPS[name]] = math.ceil(positive_number(name, budget, smallest) / step)
    return rest


def tokens_per_step(values: Mapping[str, Any], name: str) -> int:
    """Tokens of a training step, for the budget ``name``.

    Raises:
        UserError: where they are not known, or not the same in all steps.
    """
    for changing in _CHANGING_BATCH:
        if values.get(changing) is not None:
            raise UserError(
                f"{name} cannot be turned into steps exactly under {changing}, whose steps differ in tokens: leave "
                f"{changing} out, or write train_samples and Megatron's other _samples"
            )
    batch, length = values.get("global_batch_size"), values.get("seq_length")
    for needed, value in (("global_batch_size", batch), ("seq_length", length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f"{name} needs {needed} to count a step's tokens, got {value!r}: write a number")
    assert batch is not None and length is not None
    return batch * length


def positive_number(name: str, value: Any, smallest: float = 0) -> float:
    """``value``, if it is a finite number of ``smallest`` or more.

    Raises:
        UserError: naming it by ``name``.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < smallest:
        raise UserError(f"{name} must be a number of {smallest:g} or more, such as 5e9, got {value!r}")
    return value


def check(args: argparse.Namespace) -> None:
    """Refuse a schedule that Megatron would fail on only once the model is built, or that would not do what it says.

    Source: ``megatron/core/optimizer_param_scheduler.py::OptimizerParamScheduler.get_lr``.

    Args:
        args: Megatron's arguments of this run.

    Raises:
        UserError: naming the values.
    """
    if not (args.train_iters or args.train_samples):
        raise UserError("the run has no length: set train_tokens, train_iters or train_samples")
    unit = "iters" if args.train_iters else "samples"
    decay = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    warmup = getattr(args, f"lr_warmup_{unit}")
    if args.lr_warmup_fraction is not None and decay:
        warmup = args.lr_warmup_fraction * decay
    if args.lr_decay_style == "inverse-square-root" and not warmup:
        # Its unit of time is the warm-up; without one Megatron takes a single sample.
        raise UserError(
            f"lr_decay_style inverse-square-root without a warm-up would start at lr {args.lr:g} / sqrt("
            f"{args.global_batch_size}), since Megatron counts from the first sample: set lr_warmup_tokens or "
            f"lr_warmup_{unit}"
        )
    if args.lr_decay_style != "WSD":
        return
    last = getattr(args, f"lr_wsd_decay_{unit}")
    if last is None:
        raise UserError(
            f"lr_decay_style WSD needs the length of its decay: set lr_wsd_decay_tokens or lr_wsd_decay_{unit}"
        )
    if decay and warmup + last > decay:
        raise UserError(
            f"lr_decay_style WSD has a warm-up of {warmup:g} {unit} and a decay of {last:,}, more than the {decay:,} "
            f"in all: lower lr_warmup_{unit} or lr_wsd_decay_{unit}"
        )


def describe(args: argparse.Namespace) -> str:
    """The learning rate's course in one line, in steps and tokens."""
    if not args.train_iters:
        return f"learning rate: {args.lr:g}, {args.lr_decay_style}, counted in samples"
    step = args.global_batch_size * args.seq_length

    def length(steps: float) -> str:
        return f"{steps:,.0f} steps ({steps * step:,.0f} tokens)"

    decay = args.lr_decay_iters or args.train_iters
    warmup = args.lr_warmup_iters if args.lr_warmup_fraction is None else args.lr_warmup_fraction * decay
    up = f"up from {args.lr_warmup_init:g} over {length(warmup)}, " if warmup else ""
    if args.lr_decay_style == "constant":
        return f"learning rate: {up}then constant at {args.lr:g}"
    down = f"{args.lr_decay_style} to {args.min_lr:g} at {length(decay)}"
    if args.lr_decay_style == "WSD":
        down += f", constant until the last {length(args.lr_wsd_decay_iters)}"
    return f"learning rate: {up}{args.lr:g}, {down}"
