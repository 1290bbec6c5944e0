"""Cross entropy over a sharded vocabulary, a few tokens at a time: no float32 copy of the logits is ever made.

Tokens that the loss mask leaves out have no logits either. Where a task asks for a few tokens of each sequence, or a
document's questions count and its text does not, most of the output layer's work would be multiplied by 0.

Megatron's own (``megatron/core/tensor_parallel/cross_entropy.py``) turns all logits into float32 and keeps their
softmax for backward; on a CPU, where fresh memory is slow, that costs more than the output layer's matrix products.
"""

from typing import Any

import torch
from torch import Tensor

__all__ = ["language_model_loss", "vocab_parallel_cross_entropy"]

_ROWS, _ELEMENTS = 64, 2**18
"""Tokens at a time: 64 rows of a vocabulary of 50,000 in float32 are 13 MB; of a small vocabulary more rows make 1 MB,
so that the loop over blocks costs nothing beside its arithmetic."""


def language_model_loss(
    *,
    hidden_states: Tensor,
    output_layer: torch.nn.Module,
    output_weight: Tensor | None,
    labels: Tensor,
    loss_mask: Tensor | None,
    scale_logits: Any,
    runtime_gather_output: bool | None,
    **_: Any,
) -> Tensor:
    """Output processor of ``GPTModel.forward``: ``compute_language_model_loss`` of the tokens that count, 0 elsewhere.

    Args:
        hidden_states: [s, b, h].
        output_layer: Megatron's ``ColumnParallelLinear``.
        output_weight: the shared embedding, or None for the layer's own weight.
        labels: [b, s].
        loss_mask: [b, s], 0 where a token does not count; None where all do.
        scale_logits: MuP's scaling, the identity elsewhere.
        runtime_gather_output: handed to the output layer.

    Returns:
        [b, s], float32.
    """
    from megatron.core import parallel_state

    group = parallel_state.get_tensor_model_parallel_group()
    wanted = labels.t().contiguous()
    places = _counted(loss_mask, hidden_states)
    if places is not None:
        hidden_states = hidden_states.flatten(0, 1).index_select(0, places).unsqueeze(1)
        wanted = wanted.flatten().index_select(0, places).unsqueeze(1)
    logits, _bias = output_layer(hidden_states, weight=output_weight, runtime_gather_output=runtime_gather_output)
    losses = vocab_parallel_cross_entropy(scale_logits(logits), wanted, group)
    if places is not None:
        losses = losses.new_zeros(labels.numel()).index_copy(0, places, losses[:, 0]).view(labels.t().shape)
    return losses.t().contiguous()


def _counted(loss_mask: Tensor | None, hidden_states: Tensor) -> Tensor | None:
    """Places in ``hidden_states.flatten(0, 1)`` of the tokens that count; None where every place is wanted."""
    # With sequence parallelism this rank holds some of the tokens only, and the output layer gathers them.
    if loss_mask is None or loss_mask.t().shape != hidden_states.shape[:2]:
        return None
    places = loss_mask.t().flatten().nonzero()[:, 0]
    return None if len(places) == loss_mask.numel() else places


def vocab_parallel_cross_entropy(logits: Tensor, labels: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
    """Negative log likelihood of ``labels``, in float32 arithmetic.

    Args:
        logits: [s, b, V / tp], this rank's rows of the vocabulary, of any floating-point dtype.
        labels: [s, b], global token ids.
        group: the tensor-parallel group, over which the vocabulary is split evenly in the order of its ranks.

    Returns:
        [s, b], float32.
    """
    losses: Tensor = _CrossEntropy.apply(logits.flatten(0, -2), labels.flatten(), group)
    return losses.view_as(labels)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        width = logits.size(1)
        local = labels - group.rank() * width
        elsewhere = (local < 0) | (local >= width)
        local = local.masked_fill(elsewhere, 0)
        largest = logits.amax(-1).float()
        if group.size() > 1:
            torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
        sums = torch.empty_like(largest)
        for rows, block in _blocks(logits):
            torch.sum(block.sub_(largest[rows, None]).exp_(), -1, out=sums[rows])
        target = logits.gather(1, local[:, None])[:, 0].float().sub_(largest).masked_fill_(elsewhere, 0.0)
        if group.size() > 1:
            both = torch.stack([sums, target])
            torch.distributed.all_reduce(both, group=group)
            sums, target = both
        ctx.save_for_backward(logits, local, elsewhere, largest + sums.log())
        return sums.log() - target

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, local, elsewhere, log_sums = ctx.saved_tensors
        (factor,) = gradients
        result = torch.empty_like(logits)
        here = -(~elsewhere).float()[:, None]
        for rows, block in _blocks(logits):
            block.sub_(log_sums[rows, None]).exp_()
            block.scatter_add_(1, local[rows, None], here[rows])
            result[rows] = block.mul_(factor[rows, None])
        return result, None, None


def _blocks(logits: Tensor):
    """Float32 copies of some rows at a time, all in the same memory."""
    size = min(max(_ROWS, _ELEMENTS // logits.size(1)), logits.size(0))
    buffer = torch.empty(size, logits.size(1), dtype=torch.float32, device=logits.device)
    for start in range(0, logits.size(0), max(size, 1)):
        rows = slice(start, min(start + size, logits.size(0)))
        block = buffer[: rows.stop - start]
        block.copy_(logits[rows])
        yield rows, block
