"""SmolLM3 in Megatron terms: a Llama some of whose layers attend through a window or use no rotary positions.

Tensors and their names are Llama's (:func:`.llama.key_map`).
"""

from collections.abc import Mapping
from typing import Any

from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.models import llama

__all__ = ["ARCHITECTURE", "config_json", "megatron_args"]

ARCHITECTURE = "SmolLM3ForCausalLM"

# What a config.json may leave out, where it differs from Llama: transformers/models/smollm3/configuration_smollm3.py.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 32768,
    "rope_theta": 2000000.0,
    "tie_word_embeddings": True,
}


def megatron_args(hf_config: Mapping[str, Any], *, make_vocab_size_divisible_by: int = 128) -> dict[str, Any]:
    """Megatron's arguments for the model that ``hf_config`` (the content of a SmolLM3's ``config.json``) describes.

    Raises:
        UserError: as :func:`.llama.megatron_args` and :meth:`.AttentionPattern.from_hugging_face`.
    """
    args = llama.megatron_args({**_DEFAULTS, **hf_config}, make_vocab_size_divisible_by=make_vocab_size_divisible_by)
    return args | AttentionPattern.from_hugging_face(hf_config, args["num_layers"]).to_megatron()


def config_json(args: Mapping[str, Any], pattern: AttentionPattern) -> dict[str, Any]:
    """The inverse of :func:`megatron_args`, with the pattern written out layer by layer.

    Raises:
        UserError: as :func:`.llama.config_json`.
    """
    return {
        **llama.config_json(args),
        "architectures": [ARCHITECTURE],
        "model_type": "smollm3",
        **pattern.to_hugging_face(),
    }
