"""Transformer Engine's fused norm and linear taken apart, so that dropout fits between them."""

import functools
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import (
    HAVE_TE,
    TEColumnParallelLinear,
    TEFusedMLP,
    TELayerNormColumnParallelLinear,
    TENorm,
)
from megatron.core.tensor_parallel import InferenceColumnParallelLinear, InferenceRowParallelLinear
from megatron.core.transformer.moe.router import InferenceTopKRouter

__all__ = ["column_parallel_linear", "is_for_inference", "is_fused", "is_op_fused", "norm_classes", "unfused_norm"]

_FOR_INFERENCE = (InferenceColumnParallelLinear, InferenceRowParallelLinear, InferenceTopKRouter)


def is_fused(builder: Any) -> bool:
    """Does ``builder`` build a linear with a norm of its own in front?"""
    return HAVE_TE and builder is TELayerNormColumnParallelLinear


def is_op_fused(builder: Any) -> bool:
    """Does ``builder`` build an MLP that runs as one fused operation, past the hooks of its parts?"""
    function = builder.func if isinstance(builder, functools.partial) else builder
    owner = getattr(function, "__self__", None)  # of the class method as_mlp_submodule
    return HAVE_TE and TEFusedMLP is not None and isinstance(owner, type) and issubclass(owner, TEFusedMLP)


def is_for_inference(part: Any) -> bool:
    """Is ``part`` of a spec one that Megatron's ``inference_optimized`` specs, and no others, are made of?"""
    return any(part is known for known in _FOR_INFERENCE)


def column_parallel_linear() -> Any:
    """The linear of the fused layer, alone: its GEMM, FP8 cast, gather and overlap stay Transformer Engine's."""
    return TEColumnParallelLinear


def norm_classes() -> tuple[type[torch.nn.Module], ...]:
    """What ``TENorm`` builds, but for the norm that adds the residual; none without Transformer Engine."""
    if not HAVE_TE:
        return ()
    import transformer_engine.pytorch as te

    return te.LayerNorm, te.RMSNorm


def unfused_norm(*, config: Any, hidden_size: int, eps: float) -> torch.nn.Module:
    """The norm of the fused layer, alone.

    Its ``_extra_state`` (FP8 bookkeeping, which a norm has no use for) is kept out of state dicts: the fused layer has
    one extra state, the linear's, and a checkpoint of either layer must load into the other.
    """
    module = TENorm(config=config, hidden_size=hidden_size, eps=eps)
    module._register_state_dict_hook(_without_extra_state)
    module.register_load_state_dict_pre_hook(_with_empty_extra_state)
    return module


def _without_extra_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state.pop(f"{prefix}_extra_state", None)


def _with_empty_extra_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, *args: Any) -> None:
    state.setdefault(f"{prefix}_extra_state", None)
