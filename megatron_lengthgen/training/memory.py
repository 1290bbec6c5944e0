"""Memory that a run needs on each GPU, by Megatron's own estimate."""

import argparse
import copy
from typing import NamedTuple

__all__ = ["Memory", "checkpoint_size", "estimate", "parameters"]

#: Megatron's estimate for a parameter whose optimizer state is not shared out.
_BYTES = 18


class Memory(NamedTuple):
    """Bytes on the GPU that needs most.

    Attributes:
        states: Weights, gradients and optimizer state of bf16 training.
        activations: Of the first pipeline stage, with as many microbatches in flight as it holds.
    """

    states: float
    activations: float


def estimate(args: argparse.Namespace) -> Memory | None:
    """What Megatron expects ``args`` to take; None for hybrid models, of which it has no estimate.

    Its formulas (``megatron/training/theoretical_memory_usage.py``) count activations for full attention without
    recomputation of whole layers, and leave out what the last stage needs for the logits.

    Args:
        args: Parsed arguments, for the number of processes of the run.
    """
    if args.hybrid_layer_pattern:
        return None
    from megatron.training import theoretical_memory_usage as usage

    microbatches = max(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size), 1)
    selective = args.sequence_parallel and args.recompute_granularity == "selective"
    activations = usage.compute_activation_memory if selective else usage.compute_activation_memory_without_sp
    return Memory(usage.compute_weight_and_optimizer_memory(args), activations(args, num_microbatches=microbatches))


def parameters(args: argparse.Namespace) -> int | None:
    """How many parameters the whole model has, as Megatron counts them; None for hybrid models."""
    if args.hybrid_layer_pattern:
        return None
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    alone = copy.copy(args)
    alone.tensor_model_parallel_size = alone.pipeline_model_parallel_size = alone.world_size = 1
    alone.expert_tensor_parallel_size = alone.expert_model_parallel_size = alone.data_parallel_size = 1
    alone.use_distributed_optimizer = False
    return round(compute_weight_and_optimizer_memory(alone) / _BYTES)


def checkpoint_size(args: argparse.Namespace) -> float | None:
    """Bytes of a ``torch_dist`` checkpoint of the run; None for hybrid models.

    Weights in the run's type and, unless ``no_save_optim``, Adam's two moments and the weights that they update, in
    float32; in float32 training those are the weights themselves, which the distributed optimizer alone writes again.
    """
    count = parameters(args)
    if count is None:
        return None
    is_half = args.bf16 or args.fp16
    weights = 2 if is_half else 4
    optimizer = 12 if is_half or args.use_distributed_optimizer else 8
    return float(count * (weights + (0 if args.no_save_optim else optimizer)))
