"""Gradient of windowed attention on a CPU in bfloat16, as matrix products.

PyTorch's flash kernel for CPUs takes several times its forward's time for the gradient, since its inner products do not
use the processor's matrix units; matrix products do. With a window of 512 at 1,024 tokens this gradient takes a third
of the kernel's time (forward and backward together: less than half). It does not pay in float32 or without a window.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["WindowedAttention", "pays_off"]

_ROWS = 128
"""Queries per block: each block computes ``_ROWS + window - 1`` keys, of which ``window`` are seen by a query."""


def pays_off(query: Tensor, key: Tensor, value: Tensor, dropout: float) -> bool:
    """Whether a call of windowed attention is one that :class:`WindowedAttention` is for."""
    return (
        query.device.type == "cpu"
        and query.dtype is torch.bfloat16
        and dropout == 0.0
        and torch.is_grad_enabled()
        and (query.requires_grad or key.requires_grad or value.requires_grad)
    )


class WindowedAttention(torch.autograd.Function):
    """``forward(query, key, value, window, scale, attend)``: attention by ``attend``, its gradient by blocks.

    Args:
        query: [b, h, sq, d], the last sq of sk positions.
        key: [b, g, sk, d].
        value: [b, g, sk, d].
        window: keys that a query sees, itself included.
        scale: factor of the scores.
        attend: computes the result [b, h, sq, d] without a gradient.

    Only the inputs are kept for backward; a block's scores are computed again. Memory is linear in length.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, window: int, scale: float, attend: Callable[[], Tensor]
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.window, ctx.scale = window, scale
        return attend()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        (output_gradient,) = gradients
        groups, sq, sk = key.size(1), query.size(2), key.size(2)
        # [b, g, r, s, d]: the r query heads that share a key head
        q, do = (x.unflatten(1, (groups, -1)) for x in (query, output_gradient))
        dq = torch.empty_like(q)
        dk, dv = (torch.zeros(x.shape, dtype=torch.float32) for x in (key, value))
        for start in range(0, sq, _ROWS):
            rows = slice(start, min(start + _ROWS, sq))
            count = rows.stop - rows.start
            end = sk - sq + rows.stop
            keys = slice(max(0, end - count - ctx.window + 1), end)
            mask = _mask(count, keys.stop - keys.start, ctx.window, q.size(2), q.dtype)
            block = q[:, :, :, rows]
            q_block, do_block = (_flat(x[:, :, :, rows]) for x in (q, do))
            k_block, v_block = (x[:, :, keys].flatten(0, 1) for x in (key, value))
            scores = torch.baddbmm(mask.expand(q_block.size(0), -1, -1), q_block, k_block.mT, alpha=ctx.scale)
            weights = torch.softmax(scores, -1)
            d_weights = torch.bmm(do_block, v_block.mT)
            d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
            dq[:, :, :, rows] = (torch.bmm(d_scores, k_block) * ctx.scale).view_as(block)
            dk[:, :, keys] += (torch.bmm(d_scores.mT, q_block) * ctx.scale).unflatten(0, key.shape[:2])
            dv[:, :, keys] += torch.bmm(weights.mT, do_block).unflatten(0, key.shape[:2])
        return dq.flatten(1, 2), dk.to(key.dtype), dv.to(value.dtype), None, None, None


def _flat(x: Tensor) -> Tensor:
    """[b, g, r, s, d] -> [b * g, r * s, d]"""
    return x.reshape(x.size(0) * x.size(1), -1, x.size(4))


@lru_cache(maxsize=16)
def _mask(rows: int, columns: int, window: int, repeats: int, dtype: torch.dtype) -> Tensor:
    """[repeats * rows, columns], 0 where seen and -inf elsewhere; the last row is the query of the last column."""
    hidden = torch.ones(rows, columns, dtype=torch.bool)
    hidden = hidden.triu(columns - rows + 1) | hidden.tril(columns - rows - window)
    return torch.zeros(rows, columns, dtype=dtype).masked_fill_(hidden, float("-inf")).repeat(repeats, 1)
