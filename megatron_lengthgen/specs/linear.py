"""Megatron's linears, straight to the product where no gradient is asked for.

A decoded token costs a small model more in the autograd function around each product than in the product.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ProductAlone(torch.nn.Module):
    """Before a linear of Megatron's among the bases: the same parameters, checkpoint keys and output bits.

    Source: ``megatron/core/tensor_parallel/layers.py``.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # With sequence parallelism or sharded weights, the function gathers before it multiplies.
        if torch.is_grad_enabled() or kwargs["sequence_parallel"] or kwargs["gtp_remat_size"] > 1:
            return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]
        output, bias = torch.matmul(input, weight.t()), kwargs["bias"]
        return output if bias is None else output + bias


class ColumnParallelLinear(_ProductAlone, tensor_parallel.ColumnParallelLinear):
    """Megatron's ``ColumnParallelLinear``."""


class RowParallelLinear(_ProductAlone, tensor_parallel.RowParallelLinear):
    """Megatron's ``RowParallelLinear``."""
