"""Tiny random models of transformers, saved as directories, and logits of Megatron's models."""

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedTokenizerFast,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

__all__ = ["MAMBA2", "SMOLLM3", "TINY", "add_tokenizer", "edit_config", "logits", "make_model"]

TINY: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
SMOLLM3: dict[str, Any] = {
    **{name: value for name, value in TINY.items() if name not in ("rope_parameters", "tie_word_embeddings")},
    "num_hidden_layers": 5,
    "no_rope_layers": [1, 0, 1, 1, 0],
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full", "full")],
    "use_sliding_window": True,
    "sliding_window": 24,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
"""Windows in the first and third layer alone, no RoPE in the second and fifth, embeddings tied by default."""

MAMBA2: dict[str, Any] = {
    "vocab_size": 1003,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_heads": 6,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 1,
    "tie_word_embeddings": True,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 3,
}
_FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, TINY),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config, SMOLLM3),
    "mamba2": (Mamba2ForCausalLM, Mamba2Config, MAMBA2),
}


def make_model(
    directory: Path,
    dtype: torch.dtype = torch.float32,
    shard: str = "50GB",
    *,
    family: str = "llama",
    **changes: Any,
) -> Any:
    """A random model with random norms, saved to ``directory`` in ``dtype``; the same weights in a float32 model."""
    torch.manual_seed(7)
    model_class, config_class, sizes = _FAMILIES[family]
    model = model_class(config_class(**sizes | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.rpartition(".")[2] in ("D", "dt_bias"):
                parameter.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard)
    # A fresh model, because conversion to bfloat16 has rounded the rotary frequencies as well.
    reference = model_class(model.config).eval()
    reference.load_state_dict(model.state_dict())
    return reference


def add_tokenizer(directory: Path) -> None:
    """A tokenizer of 1003 words in ``directory``."""
    tokenizer = Tokenizer(WordLevel({f"w{token}": token for token in range(1003)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1").save_pretrained(directory)


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def logits(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Of a Megatron model on one process: [batch, length] -> [batch, length, padded vocabulary]."""
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, None).float()
