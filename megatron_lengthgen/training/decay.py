"""Which parameters a run's weight decay acts on, told by Megatron's own rule."""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping

import torch

__all__ = ["count", "describe", "kind"]

Counts = dict[str, dict[str, int]]


def kind(name: str, parameter: torch.nn.Parameter) -> str:
    """What a parameter is to a reader: embeddings, weight matrices, norms, biases or other vectors."""
    if "embedding" in name:
        return "embeddings"
    if "norm" in name:
        return "norms"
    if name.endswith("bias"):
        return "biases"
    return "weight matrices" if parameter.dim() > 1 else "other vectors"


def count(args: argparse.Namespace, models: Iterable[torch.nn.Module]) -> Counts:
    """Parameters of ``models`` that this rank answers for, by whether weight decay acts on them, and by kind.

    Each parameter of the whole model is counted by one rank: what ranks hold in common, by the first of them.

    Args:
        args: Megatron's arguments of this run.
        models: this rank's model chunks.

    Returns:
        ``{"decayed": {kind: parameters}, "kept": {kind: parameters}}``.

    Source: ``megatron/core/optimizer/__init__.py::_get_param_groups``, which turns the same overrides into groups.
    """
    from megatron.core import mpu
    from megatron.core.optimizer_param_scheduler import combine_param_group_overrides
    from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
    from megatron.core.transformer.module import param_is_not_shared
    from megatron.training.training import get_megatron_optimizer_config

    _, overrides = get_megatron_optimizer_config(args)
    counts: dict[str, Counter[str]] = {"decayed": Counter(), "kept": Counter()}
    first_of_data = mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    first_of_experts = mpu.get_expert_data_parallel_rank() == 0
    for model in models:
        for name, parameter in model.named_parameters():
            is_ours = first_of_data if getattr(parameter, "allreduce", True) else first_of_experts
            if not (
                is_ours
                and parameter.requires_grad
                and param_is_not_shared(parameter)
                and param_is_not_tensor_parallel_duplicate(
                    parameter, expert_tp_group=mpu.get_expert_tensor_parallel_group()
                )
            ):
                continue
            changes = combine_param_group_overrides(
                [new for key, new in overrides.items() if key.matches(parameter, name)]
            )
            side = "decayed" if changes.get("wd_mult", 1.0) else "kept"
            counts[side][kind(name, parameter)] += parameter.numel()
    return {side: dict(found) for side, found in counts.items()}


def describe(args: argparse.Namespace, counts: Iterable[Mapping[str, Mapping[str, int]]]) -> str:
    """One line: the value, and the parameters that it acts on and does not.

    Args:
        args: Megatron's arguments of this run.
        counts: of all ranks, as :func:`count` gives them.
    """
    sums: dict[str, Counter[str]] = {"decayed": Counter(), "kept": Counter()}
    for found in counts:
        for side, kinds in found.items():
            sums[side].update(kinds)
    first, last = args.start_weight_decay, args.end_weight_decay
    value = f"{first:g}" if first == last else f"{first:g} to {last:g} ({args.weight_decay_incr_style})"
    acts = "on" if last else "on nothing; another value would act on"
    return f"weight decay: {value}, {acts} {_list(sums['decayed'])}; never on {_list(sums['kept'])}"


def _list(kinds: Counter[str]) -> str:
    each = ", ".join(f"{name} {number:,}" for name, number in kinds.most_common())
    return f"{kinds.total():,} parameters" + (f" ({each})" if each else "")
