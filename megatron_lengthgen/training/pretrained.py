"""The checkpoint that a run starts from: is it the model that the run describes?"""

import argparse
from typing import Any

from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.checkpoint.load import checkpoint_args
from megatron_lengthgen.errors import UserError

__all__ = ["check_pretrained"]

#: What weights are made for. Others, such as ``rotary_base``, may change from one stage of training to the next.
_MODEL = (
    "num_layers",
    "hybrid_layer_pattern",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "padded_vocab_size",
    "num_experts",
    "swiglu",
    "normalization",
    "position_embedding_type",
    "untie_embeddings_and_output_weights",
)


def check_pretrained(args: argparse.Namespace) -> str | None:
    """Hold a run's model against the checkpoint in ``args.pretrained_checkpoint``.

    Megatron loads weights by name and shape, so a model of the same shape with other heads, or without the windows that
    the checkpoint was trained with, would start without a word.

    Args:
        args: Megatron's arguments of this run.

    Returns:
        What the run changes in the model's attention, as a sentence; None where that is nothing.

    Raises:
        UserError: another model, or attention that differs without the run saying so; or as
            :func:`.checkpoint.load.find_checkpoint`.
    """
    if args.pretrained_checkpoint is None:
        return None
    stored = checkpoint_args(args.pretrained_checkpoint)
    for name in _MODEL:
        old, new = _value(stored, name), _value(args, name)
        if old is not None and new is not None and old != new:
            raise UserError(
                f"pretrained_checkpoint {args.pretrained_checkpoint} has {name} {old}, and this run {new}: write the "
                "checkpoint's values, which tools/convert_checkpoint.py info shows"
            )
    old_pattern, new_pattern = AttentionPattern.from_megatron(stored), AttentionPattern.from_megatron(args)
    if old_pattern == new_pattern:
        return None
    section = getattr(args, "lengthgen", {}).get("attention")
    if not section and args.window_size is None and args.no_rope_freq is None:
        raise UserError(
            f"pretrained_checkpoint {args.pretrained_checkpoint} has {old_pattern}, and this run says nothing of its "
            f"attention: write lengthgen.attention: {_flow(old_pattern)}, or {{pattern: F}} for full attention with "
            "RoPE in every layer"
        )
    return f"attention: {new_pattern}; the pretrained checkpoint has {old_pattern}"


def _value(args: argparse.Namespace, name: str) -> Any:
    """An argument's value in a form that compares; None where it is not known, as a vocabulary before its tokenizer."""
    value = getattr(args, name, None)
    if name == "num_query_groups" and not args.group_query_attention:
        return args.num_attention_heads
    if name == "hybrid_layer_pattern":
        return (value or "").replace("|", "")
    return value


def _flow(pattern: AttentionPattern) -> str:
    mapping = pattern.to_mapping()
    return "{" + ", ".join(f"{name}: {value}" for name, value in mapping.items()) + "}"
