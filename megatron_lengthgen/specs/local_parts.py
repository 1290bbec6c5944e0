"""Megatron's local parts that this package has leaner ones for, exchanged all over a spec."""

import dataclasses
import functools
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

from megatron_lengthgen.specs import linear
from megatron_lengthgen.specs.torch_norm import TorchNorm

__all__ = ["replace_local_parts"]

_OURS: dict[Any, Any] = {
    WrappedTorchNorm: TorchNorm,
    tensor_parallel.ColumnParallelLinear: linear.ColumnParallelLinear,
    tensor_parallel.RowParallelLinear: linear.RowParallelLinear,
}


def replace_local_parts(part: Any) -> None:
    """Exchange norms and linears in ``part``: a ``ModuleSpec``, a partial of a builder, submodules, or a list of them.

    It changes ``part``; give it a copy of what others hold too.
    """
    if isinstance(part, ModuleSpec):
        replace_local_parts(part.submodules)
    elif isinstance(part, functools.partial):
        replace_local_parts(part.keywords.get("submodules"))
    elif isinstance(part, list):
        for item in part:
            replace_local_parts(item)
    elif dataclasses.is_dataclass(part) and not isinstance(part, type):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, type) and value in _OURS:
                setattr(part, field.name, _OURS[value])
            else:
                replace_local_parts(value)
