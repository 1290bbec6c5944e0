"""Mean and variance of a norm's output for VPAD: of the whole microbatch, or as the norm's parameters imply them."""

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lengthgen.dropout.functional import Moments, merge_moments, moments

__all__ = ["batch_statistics", "merge_over_ranks", "norm_statistics", "token_group"]


def token_group(*, sequence_parallel: bool, context_parallel: bool) -> dist.ProcessGroup | None:
    """The group whose ranks hold different tokens of the same microbatch; None where this rank holds them all."""
    from megatron.core import parallel_state

    if sequence_parallel and context_parallel:
        return parallel_state.get_tensor_and_context_parallel_group()
    if sequence_parallel:
        return parallel_state.get_tensor_model_parallel_group()
    if context_parallel:
        return parallel_state.get_context_parallel_group()
    return None


@torch.no_grad()
def batch_statistics(x: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Mean and variance of each coordinate over all tokens of the microbatch.

    They depend on the microbatch size, and not on how its tokens are split over ``group``. Padding counts as tokens.

    Args:
        x: Norm output ``[s, b, h]``, this rank's tokens.
        group: Ranks that hold the other tokens, or None.

    Returns:
        ``mean, variance``, each ``[h]`` in float32, the same bits on every rank of ``group``.
    """
    total = merge_over_ranks(moments(x), group)
    return total.mean, total.variance


@torch.no_grad()
def merge_over_ranks(mine: Moments, group: dist.ProcessGroup | None) -> Moments:
    """Moments of the tokens of all ranks of ``group`` (None: of this one), the same bits on each of them."""
    if group is None or group.size() == 1:
        return mine
    # One collective of 2h + 1 numbers; merged in rank order, so that all ranks get the same bits.
    values = torch.cat([mine.tokens.view(1), mine.mean, mine.m2])
    everyone = [torch.empty_like(values) for _ in range(group.size())]
    dist.all_gather(everyone, values, group=group)
    h = mine.mean.shape[0]
    return merge_moments(Moments(part[0], part[1 : h + 1], part[h + 1 :]) for part in everyone)


def norm_statistics(norm: torch.nn.Module, *, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """Mean and variance of a norm's output if its normalised coordinates had mean 0 and variance 1.

    Args:
        norm: RMSNorm or LayerNorm with ``weight`` ``[h]`` and, for LayerNorm, ``bias`` ``[h]``.
        zero_centered: The gain is ``1 + weight`` (``config.layernorm_zero_centered_gamma``).

    Returns:
        ``mean, variance``, each ``[h]`` in float32: the bias (or 0) and the squared gain.
    """
    parameters = dict(norm.named_parameters(recurse=False))
    weight = parameters["weight"].detach().float()
    gain = weight + 1.0 if zero_centered else weight
    bias = parameters.get("bias")
    return torch.zeros_like(gain) if bias is None else bias.detach().float(), gain.square()
