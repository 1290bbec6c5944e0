"""Memory that a run needs on each GPU, by Megatron's own estimate."""

import argparse
from typing import NamedTuple

__all__ = ["Memory", "estimate"]


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
