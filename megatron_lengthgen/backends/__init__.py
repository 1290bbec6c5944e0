"""Which hardware Megatron-Core runs on."""

from typing import Any

import torch

__all__ = ["argument_defaults", "prepare"]


def prepare() -> str:
    """Make Megatron-Core usable on this machine; call before anything of ``megatron`` is imported.

    Returns:
        ``"cuda"`` where CUDA is present (nothing is touched), else ``"cpu"`` after :mod:`.cpu` was installed.
    """
    from megatron_lengthgen.backends import cpu

    if not cpu.is_installed() and torch.cuda.is_available():
        return "cuda"
    cpu.install()
    return "cpu"


def argument_defaults() -> dict[str, Any]:
    """Megatron arguments that this machine needs and that a user need not write. Empty where CUDA is present."""
    if prepare() == "cuda":
        return {}
    return {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "use_cpu_initialization": True,
        # Fusions are CUDA kernels, or compiled.
        "no_gradient_accumulation_fusion": True,
        "no_persist_layer_norm": True,
        "no_masked_softmax_fusion": True,
        "no_bias_swiglu_fusion": True,
        "no_bias_gelu_fusion": True,
        "no_bias_dropout_fusion": True,
        "no_rope_fusion": True,
    }
