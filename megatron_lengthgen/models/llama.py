"""Llama-architecture models in Megatron terms: arguments and ``config.json``, and the key map, both ways.

Everything here is pure: configurations and tensors in, arguments and tensors out. The key map serves import
(:attr:`Entry.pack`) and export (:attr:`Entry.unpack`) alike, one Megatron parameter at a time, so that a caller can
stream. Megatron names are those of the local layer spec (``megatron/core/models/gpt/gpt_layer_specs.py``), with global
layer numbers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models.entries import Entry, one, padded_vocab_size, vocabulary

__all__ = [
    "ARCHITECTURE",
    "config_json",
    "key_map",
    "megatron_args",
    "pack_gate_up",
    "pack_qkv",
    "unpack_gate_up",
    "unpack_qkv",
]

ARCHITECTURE = "LlamaForCausalLM"

# Constants of megatron/core/models/common/embeddings/rotary_pos_embedding.py::RotaryEmbedding._apply_scaling.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "initializer_range": 0.02}
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def megatron_args(hf_config: Mapping[str, Any], *, make_vocab_size_divisible_by: int = 128) -> dict[str, Any]:
    """Megatron's arguments for the model that ``hf_config`` (the content of a Llama's ``config.json``) describes.

    Raises:
        UserError: a missing value, or a feature that Megatron does not compute the same way.
    """
    for name in _REQUIRED:
        _positive_integer(hf_config, name)
    if hf_config.get("quantization_config"):
        raise UserError(
            "config.json has a quantization_config; import needs plain weights: take the unquantized model "
            "or dequantize it first"
        )
    for name in ("attention_bias", "mlp_bias"):
        if hf_config.get(name):
            raise UserError(f"config.json sets {name}=true; only models without biases can be imported")
    activation = hf_config.get("hidden_act", "silu")
    if activation != "silu":
        raise UserError(f"config.json sets hidden_act={activation!r}; only 'silu' (SwiGLU) can be imported")

    heads, hidden = hf_config["num_attention_heads"], hf_config["hidden_size"]
    groups = hf_config.get("num_key_value_heads") or heads
    if heads % groups:
        raise UserError(f"config.json has num_attention_heads={heads}, not a multiple of num_key_value_heads={groups}")
    head_dim = hf_config.get("head_dim")
    if head_dim is None:
        if hidden % heads:
            raise UserError(
                f"config.json has no head_dim and hidden_size={hidden} is not a multiple of num_attention_heads={heads}"
            )
        head_dim = hidden // heads
    if head_dim % 2:
        raise UserError(f"config.json has head_dim={head_dim}; rotary embeddings need an even one")

    vocab_size = hf_config["vocab_size"]
    positions = hf_config.get("max_position_embeddings", _DEFAULTS["max_position_embeddings"])
    args: dict[str, Any] = {
        "num_layers": hf_config["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": hf_config["intermediate_size"],
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        "num_query_groups": groups,
        "kv_channels": head_dim,
        "seq_length": positions,
        "max_position_embeddings": positions,
        "position_embedding_type": "rope",
        "rotary_percent": 1.0,
        "normalization": "RMSNorm",
        "norm_epsilon": hf_config.get("rms_norm_eps", _DEFAULTS["rms_norm_eps"]),
        "swiglu": True,
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": not hf_config.get("tie_word_embeddings", False),
        "init_method_std": hf_config.get("initializer_range", _DEFAULTS["initializer_range"]),
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab_size": vocab_size,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "padded_vocab_size": padded_vocab_size(vocab_size, make_vocab_size_divisible_by),
    }
    return args | _rope_args(hf_config)


def _positive_integer(hf_config: Mapping[str, Any], name: str) -> None:
    value = hf_config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.json has {name}={value!r}; import needs a positive integer there")


def _rope_args(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE, as transformers 5 writes it (``rope_parameters``) or as 4 did (``rope_theta`` and ``rope_scaling``).

    Of both, transformers takes ``rope_scaling``, which people add to a ``config.json`` for longer contexts, and all of
    it: a base that ``rope_parameters`` alone names is then lost (``modeling_rope_utils.py``,
    ``convert_rope_params_to_dict``).
    """
    name = "rope_scaling" if hf_config.get("rope_scaling") else "rope_parameters"
    rope = hf_config.get(name) or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"config.json has {name}={rope!r}; import needs an object such as {{'rope_type': 'default'}}")
    if by_layer := sorted(key for key, value in rope.items() if isinstance(value, Mapping)):
        raise UserError(
            f"config.json has {name} per kind of layer ({', '.join(by_layer)}); Megatron computes one RoPE for all "
            "layers: only a model with one can be imported"
        )
    theta = rope.get("rope_theta", hf_config.get("rope_theta", 10000.0))
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise UserError(f"config.json has rope_theta={theta!r}; import needs a positive number there, or none at all")
    if theta != int(theta):
        raise UserError(f"config.json has rope_theta={theta}; Megatron's rotary_base is an integer")
    args: dict[str, Any] = {"rotary_base": int(theta)}
    partial = rope.get("partial_rotary_factor", hf_config.get("partial_rotary_factor", 1.0))
    if partial not in (None, 1.0):
        raise UserError(f"config.json has partial_rotary_factor={partial}; only full rotary embeddings can be imported")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return args
    factor = rope.get("factor")
    if kind == "linear" and factor == int(factor or 0):
        return args | {"rotary_seq_len_interpolation_factor": int(factor)}
    if kind == "llama3":
        fixed = {name: rope.get(name, hf_config.get(name)) for name in _LLAMA3_ROPE}
        if factor is not None and fixed == _LLAMA3_ROPE:
            return args | {"use_rope_scaling": True, "rope_scaling_factor": float(factor)}
    raise UserError(
        f"config.json scales RoPE by {kind!r} with {rope}; Megatron computes 'default', 'linear' with an integer "
        f"factor and 'llama3' with {_LLAMA3_ROPE} alone"
    )


def config_json(args: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of :func:`megatron_args`: the ``config.json`` of a model with these arguments.

    It says nothing of special tokens, which Megatron's arguments do not hold.

    Args:
        args: ``vars()`` of a checkpoint's arguments, of a model that is a Llama.

    Raises:
        UserError: a scaling of RoPE that transformers does not compute.
    """
    heads = args["num_attention_heads"]
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "vocab_size": args["vocab_size"],
        "hidden_size": args["hidden_size"],
        "intermediate_size": args["ffn_hidden_size"],
        "num_hidden_layers": args["num_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": args["num_query_groups"] if args["group_query_attention"] else heads,
        "head_dim": args["kv_channels"],
        "hidden_act": "silu",
        "max_position_embeddings": args["max_position_embeddings"],
        "initializer_range": args["init_method_std"],
        "rms_norm_eps": args["layernorm_epsilon"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": not args["untie_embeddings_and_output_weights"],
        **_rope_json(args),
    }


def _rope_json(args: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE in the words of transformers 5 and of 4: each passes over the other's, and would take its default base."""
    theta, scaling = float(args["rotary_base"]), None
    interpolation = args.get("rotary_seq_len_interpolation_factor")
    if args.get("use_rope_scaling"):
        if interpolation not in (None, 1):
            raise UserError(
                f"the checkpoint scales RoPE twice, by use_rope_scaling and rotary_seq_len_interpolation_factor "
                f"{interpolation}, and transformers does one of them alone: it cannot be exported"
            )
        scaling = {"rope_type": "llama3", "factor": float(args["rope_scaling_factor"]), **_LLAMA3_ROPE}
    elif interpolation not in (None, 1):
        scaling = {"rope_type": "linear", "factor": float(interpolation)}
    both = {**(scaling or {"rope_type": "default"}), "rope_theta": theta}
    return {"rope_parameters": both, "rope_theta": theta, "rope_scaling": scaling and both}


def key_map(args: Mapping[str, Any]) -> list[Entry]:
    """Every parameter of the model, in the order of the layers.

    Args:
        args: Megatron's arguments by name, as :func:`megatron_args` gives them or ``vars()`` of a checkpoint's.
    """
    hidden, ffn = args["hidden_size"], args["ffn_hidden_size"]
    heads, head_dim = args["num_attention_heads"], args["kv_channels"]
    groups = args["num_query_groups"] if args["group_query_attention"] else heads
    vocab, padded = args["vocab_size"], args["padded_vocab_size"]
    query, key = (heads * head_dim, hidden), (groups * head_dim, hidden)

    rows = partial(vocabulary, rows=vocab, padded=padded, hidden=hidden)
    norm = partial(one, is_layer_norm=True)
    entries = [rows("embedding.word_embeddings.weight", "model.embed_tokens.weight")]
    for layer in range(args["num_layers"]):
        here, there = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        attention, mlp = there + "self_attn.", there + "mlp."
        entries += [
            norm(here + "input_layernorm.weight", there + "input_layernorm.weight", hidden),
            Entry(
                here + "self_attention.linear_qkv.weight",
                tuple(attention + f"{name}_proj.weight" for name in "qkv"),
                (query, key, key),
                lambda tensors: pack_qkv(*tensors, groups=groups),
                lambda tensor: unpack_qkv(tensor, heads=heads, groups=groups),
            ),
            one(here + "self_attention.linear_proj.weight", attention + "o_proj.weight", hidden, heads * head_dim),
            norm(here + "pre_mlp_layernorm.weight", there + "post_attention_layernorm.weight", hidden),
            Entry(
                here + "mlp.linear_fc1.weight",
                (mlp + "gate_proj.weight", mlp + "up_proj.weight"),
                ((ffn, hidden), (ffn, hidden)),
                lambda tensors: pack_gate_up(*tensors),
                unpack_gate_up,
            ),
            one(here + "mlp.linear_fc2.weight", mlp + "down_proj.weight", hidden, ffn),
        ]
    entries.append(norm("decoder.final_layernorm.weight", "model.norm.weight", hidden))
    if args["untie_embeddings_and_output_weights"]:
        entries.append(rows("output_layer.weight", "lm_head.weight"))
    return entries


def pack_qkv(q: Tensor, k: Tensor, v: Tensor, *, groups: int) -> Tensor:
    """Interleave by query group, as ``megatron/core/transformer/attention.py`` splits ``linear_qkv``.

    Args:
        q: [heads * head_dim, hidden]. k, v: [groups * head_dim, hidden].

    Returns:
        [(heads + 2 * groups) * head_dim, hidden]: for each group its queries, its key, its value.
    """
    parts = [part.view(groups, -1, part.shape[-1]) for part in (q, k, v)]
    return torch.cat(parts, dim=1).view(-1, q.shape[-1])


def unpack_qkv(qkv: Tensor, *, heads: int, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse of :func:`pack_qkv`."""
    hidden = qkv.shape[-1]
    head_dim = qkv.shape[0] // (heads + 2 * groups)
    by_group = qkv.view(groups, -1, hidden)
    q, k, v = by_group.split([heads // groups * head_dim, head_dim, head_dim], dim=1)
    return q.reshape(-1, hidden), k.reshape(-1, hidden), v.reshape(-1, hidden)


def pack_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's ``linear_fc1``: [ffn, hidden] twice -> [2 * ffn, hidden], gate first."""
    return torch.cat((gate, up))


def unpack_gate_up(fc1: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`pack_gate_up`."""
    gate, up = fc1.chunk(2)
    return gate, up
