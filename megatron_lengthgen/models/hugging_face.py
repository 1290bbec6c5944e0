"""Which Hugging Face architecture a model is, from its ``config.json`` and from Megatron's arguments."""

import argparse
from collections.abc import Mapping
from typing import Any

from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models import llama, mamba2, smollm3
from megatron_lengthgen.models.entries import Entry

__all__ = ["config_json", "key_map", "megatron_args"]

_FAMILIES = {family.ARCHITECTURE: family for family in (llama, smollm3, mamba2)}

# Arguments of Megatron with which a model computes something else than these architectures, and the values with which
# it does not. What brings parameters of its own is found by them, too.
_EXPRESSIBLE: dict[str, tuple[Any, ...]] = {
    "num_experts": (None, 0),
    "mtp_num_layers": (None, 0),
    "normalization": ("RMSNorm",),
    "use_mup": (False,),
}
_EXPRESSIBLE_ATTENTION: dict[str, tuple[Any, ...]] = {
    "heterogeneous_layers_config_path": (None,),
    "heterogeneous_layers_config_encoded_json": (None,),
    "multi_latent_attention": (False,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "add_bias_linear": (False,),
    "add_qkv_bias": (False,),
    "swiglu": (True,),
    "activation_func_clamp_value": (None,),
    "glu_linear_offset": (0,),
    "qk_layernorm": (False,),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "softmax_type": ("vanilla",),
    "softmax_scale": (None,),
    "position_embedding_type": ("rope",),
    "rotary_percent": (1,),
    "rotary_interleaved": (False,),
}


def megatron_args(hf_config: Mapping[str, Any], *, make_vocab_size_divisible_by: int = 128) -> dict[str, Any]:
    """Megatron's arguments for the model that ``hf_config`` (the content of a ``config.json``) describes.

    Raises:
        UserError: another architecture, a missing value, or a feature that Megatron does not compute the same way.
    """
    architectures = list(hf_config.get("architectures") or [])
    family = next((_FAMILIES[name] for name in architectures if name in _FAMILIES), None)
    if family is None:
        raise UserError(
            f"cannot import architecture {', '.join(architectures) or '(none named in config.json)'}; "
            f"supported: {', '.join(_FAMILIES)}"
        )
    return family.megatron_args(hf_config, make_vocab_size_divisible_by=make_vocab_size_divisible_by)


def config_json(args: argparse.Namespace) -> dict[str, Any]:
    """The ``config.json`` of a Megatron model: of a Llama, a SmolLM3 (windows, layers without RoPE), or a Mamba-2.

    Args:
        args: A checkpoint's arguments, with ``vocab_size``.

    Raises:
        UserError: naming what neither architecture computes.
    """
    spec = getattr(args, "spec", None)
    if spec and not str(spec[0]).startswith("megatron_lengthgen."):
        raise UserError(f"the checkpoint was trained with --spec {' '.join(spec)}, whose layers are unknown here")
    is_hybrid = bool(getattr(args, "hybrid_layer_pattern", None))
    names = (mamba2.ARCHITECTURE,) if is_hybrid else (llama.ARCHITECTURE, smollm3.ARCHITECTURE)
    for name, neutral in (_EXPRESSIBLE | ({} if is_hybrid else _EXPRESSIBLE_ATTENTION)).items():
        value = getattr(args, name, neutral[0])
        if value not in neutral:
            raise UserError(
                f"the checkpoint has {name}={value!r}, which {' and '.join(names)} of transformers cannot express: "
                f"only {name}={neutral[0]!r} can be exported"
            )
    if is_hybrid:
        return mamba2.config_json(vars(args))
    pattern = AttentionPattern.from_megatron(args)
    if pattern.window is None and all(pattern.rope):
        return llama.config_json(vars(args))
    return smollm3.config_json(vars(args), pattern)


def key_map(args: Mapping[str, Any]) -> list[Entry]:
    """Every parameter of a Megatron model with its Hugging Face tensors; the input embedding is first.

    Args:
        args: Megatron's arguments by name, as :func:`megatron_args` gives them or ``vars()`` of a checkpoint's.
    """
    return (mamba2 if args.get("hybrid_layer_pattern") else llama).key_map(args)
