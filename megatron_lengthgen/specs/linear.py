"""Megatron's linears, straight to the product where no gradient is asked for.

A decoded token costs a small model more in the autograd function around each product than in the product.
"""

from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


def _is_plain(sequence_parallel: bool, gtp_remat_size: int) -> bool:
    """Whether the function does nothing but multiply; else it gathers tokens or weights first."""
    return not (torch.is_grad_enabled() or sequence_parallel or gtp_remat_size > 1)


def _product(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    output = torch.matmul(input, weight.t())
    return output if bias is None else output + bias


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """``ColumnParallelLinear`` with the same parameters, checkpoint keys and output bits.

    Source: ``megatron/core/tensor_parallel/layers.py``.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _is_plain(kwargs["sequence_parallel"], kwargs["gtp_remat_size"]):
            return _product(input, weight, kwargs["bias"])
        return super()._forward_impl(input, weight, *args, **kwargs)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """``RowParallelLinear`` with the same parameters, checkpoint keys and output bits; source as above."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if _is_plain(kwargs["sequence_parallel"], kwargs["gtp_remat_size"]):
            return _product(input, weight, kwargs["bias"])
        return super()._forward_impl(input, weight, *args, **kwargs)
