"""Mamba-2 models in Megatron terms: arguments and ``config.json``, and the key map, both ways.

Megatron names are those of a hybrid model whose pattern is ``M`` throughout
(:func:`megatron_lengthgen.specs.hybrid.stock_stack`). ``in_proj`` and the convolution are packed alike on both sides,
``[z, x, B, C, dt]`` and ``[x, B, C]``; a checkpoint keeps the parts apart, so that every part is split over
tensor-parallel ranks for itself.

With several groups the gated norm of ``MambaMixer`` takes each group by itself, as ``mamba_ssm`` does, with which such
models were trained, and as transformers does through its CUDA kernels; transformers' plain PyTorch path takes all
channels together, and so answers otherwise.
"""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models.entries import Entry, one, padded_vocab_size, vocabulary

__all__ = ["ARCHITECTURE", "config_json", "key_map", "megatron_args"]

ARCHITECTURE = "Mamba2ForCausalLM"

#: Taps of the convolution, and epsilon of the gated norm: constants of ``megatron/core/ssm/mamba_mixer.py``.
_CONVOLUTION, _GATED_EPSILON = 4, 1e-5
_REQUIRED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_heads", "head_dim", "state_size", "n_groups")
#: What Megatron computes; a config.json may leave each out, and transformers' default is the same.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "use_bias": False,
    "use_conv_bias": True,
    "conv_kernel": _CONVOLUTION,
    "rms_norm": True,
    "layer_norm_epsilon": _GATED_EPSILON,
}
_LENGTH = 2048  # of the published models' pretraining; their config.json does not say


def megatron_args(hf_config: Mapping[str, Any], *, make_vocab_size_divisible_by: int = 128) -> dict[str, Any]:
    """Megatron's arguments for the model that ``hf_config`` (the content of a Mamba-2's ``config.json``) describes.

    Raises:
        UserError: a missing value, or a feature that Megatron does not compute the same way.
    """
    for name in _REQUIRED:
        value = hf_config.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"config.json has {name}={value!r}; import needs a positive integer there")
    for name, computed in _FIXED.items():
        if hf_config.get(name, computed) != computed:
            raise UserError(f"config.json has {name}={hf_config[name]!r}; Megatron's Mamba computes {computed!r} alone")
    limits = hf_config.get("time_step_limit") or (0.0, math.inf)
    if [_number(limit) for limit in limits] != [0.0, math.inf]:
        raise UserError(f"config.json has time_step_limit={list(limits)}; Megatron's Mamba does not limit time steps")
    heads, groups = hf_config["num_heads"], hf_config["n_groups"]
    if heads % groups:
        raise UserError(f"config.json has num_heads={heads}, not a multiple of n_groups={groups}")
    vocab_size, length = hf_config["vocab_size"], hf_config.get("max_position_embeddings") or _LENGTH
    return {
        "hybrid_layer_pattern": "M" * hf_config["num_hidden_layers"],
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hf_config["hidden_size"],
        "mamba_num_heads": heads,
        "mamba_head_dim": hf_config["head_dim"],
        "mamba_state_dim": hf_config["state_size"],
        "mamba_num_groups": groups,
        # Megatron asks for attention heads of every model; tensor-parallel ranks must be able to share them.
        "num_attention_heads": heads,
        "kv_channels": hf_config["head_dim"],
        "seq_length": length,
        "max_position_embeddings": length,
        "position_embedding_type": "none",
        "normalization": "RMSNorm",
        "norm_epsilon": _GATED_EPSILON,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not hf_config.get("tie_word_embeddings", False),
        "init_method_std": hf_config.get("initializer_range", 0.1),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": vocab_size,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "padded_vocab_size": padded_vocab_size(vocab_size, make_vocab_size_divisible_by),
    }


def _number(value: Any) -> float:
    """A number of config.json, where transformers 5 writes ``{"__float__": "Infinity"}`` for one that JSON lacks."""
    return float(value["__float__"] if isinstance(value, dict) else value)


def config_json(args: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`megatron_args`; it says nothing of special tokens, which Megatron's arguments do not hold.

    Args:
        args: ``vars()`` of a checkpoint's arguments, of a hybrid model.

    Raises:
        UserError: layers of other kinds, or sizes that transformers' Mamba-2 cannot have.
    """
    symbols, epsilon = args["hybrid_layer_pattern"].replace("|", ""), args["layernorm_epsilon"]
    if set(symbols) != {"M"}:
        raise UserError(
            f"the checkpoint has hybrid_layer_pattern={symbols!r}, and {ARCHITECTURE} of transformers has Mamba layers "
            "(M) alone: it cannot be exported"
        )
    if args["position_embedding_type"] == "learned_absolute":
        raise UserError(
            f"the checkpoint has position_embedding_type='learned_absolute', and {ARCHITECTURE} of transformers has no "
            "positions: it cannot be exported"
        )
    if epsilon != _GATED_EPSILON:
        raise UserError(
            f"the checkpoint has norm_epsilon={epsilon} and {_GATED_EPSILON} in its gated norms, and {ARCHITECTURE} of "
            "transformers has one for both: it cannot be exported"
        )
    hidden, inner = args["hidden_size"], _inner(args)
    if inner % hidden:
        raise UserError(
            f"the checkpoint has {inner} channels in its Mamba layers, no multiple of hidden_size={hidden}, which "
            f"{ARCHITECTURE} of transformers asks for: it cannot be exported"
        )
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "mamba2",
        "vocab_size": args["vocab_size"],
        "hidden_size": hidden,
        "num_hidden_layers": len(symbols),
        "num_heads": inner // args["mamba_head_dim"],
        "head_dim": args["mamba_head_dim"],
        "state_size": args["mamba_state_dim"],
        "n_groups": args["mamba_num_groups"],
        "expand": inner // hidden,
        **_FIXED,
        "initializer_range": args["init_method_std"],
        # Whatever the run did: it is transformers' default, and no less precise.
        "residual_in_fp32": True,
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
    }


def _inner(args: Mapping[str, Any]) -> int:
    """Channels of a mixer: ``d_inner`` of ``MambaMixer``, which expands twofold where no number of heads is given."""
    heads = args.get("mamba_num_heads")
    return heads * args["mamba_head_dim"] if heads else 2 * args["hidden_size"]


def key_map(args: Mapping[str, Any]) -> list[Entry]:
    """Every parameter of the model, in the order of the layers.

    Args:
        args: Megatron's arguments by name, as :func:`megatron_args` gives them or ``vars()`` of a checkpoint's.
    """
    hidden, inner, groups = args["hidden_size"], _inner(args), args["mamba_num_groups"] * args["mamba_state_dim"]
    heads, convolved = inner // args["mamba_head_dim"], inner + 2 * groups
    rows = partial(vocabulary, rows=args["vocab_size"], padded=args["padded_vocab_size"], hidden=hidden)
    entries = [rows("embedding.word_embeddings.weight", "backbone.embeddings.weight")]
    for layer in range(args["num_layers"]):
        here, there = f"decoder.layers.{layer}.", f"backbone.layers.{layer}."
        mixer, hf_mixer = here + "mixer.", there + "mixer."
        entries += [
            one(here + "norm.weight", there + "norm.weight", hidden, is_layer_norm=True),
            one(mixer + "in_proj.weight", hf_mixer + "in_proj.weight", inner + convolved + heads, hidden),
            one(mixer + "conv1d_weight", hf_mixer + "conv1d.weight", convolved, 1, _CONVOLUTION),
            one(mixer + "conv1d_bias", hf_mixer + "conv1d.bias", convolved),
            one(mixer + "dt_bias", hf_mixer + "dt_bias", heads),
            one(mixer + "A_log", hf_mixer + "A_log", heads),
            one(mixer + "D", hf_mixer + "D", heads),
            one(mixer + "norm.weight", hf_mixer + "norm.weight", inner),
            one(mixer + "out_proj.weight", hf_mixer + "out_proj.weight", hidden, inner),
        ]
    entries.append(one("decoder.final_norm.weight", "backbone.norm_f.weight", hidden, is_layer_norm=True))
    if args["untie_embeddings_and_output_weights"]:
        entries.append(rows("output_layer.weight", "lm_head.weight"))
    return entries
