"""What a Megatron checkpoint holds, in plain values, without building the model."""

import math
import os
from typing import Any

from megatron_lengthgen.checkpoint import load

__all__ = ["describe"]

_ARCHITECTURE = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "max_position_embeddings",
    "position_embedding_type",
    "rotary_base",
    "use_rope_scaling",
    "rope_scaling_factor",
    "normalization",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "vocab_size",
    "padded_vocab_size",
    "window_size",
    "window_attn_skip_freq",
    "no_rope_freq",
    "hybrid_layer_pattern",
)
_LAYOUT = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "data_parallel_size",
    "sequence_parallel",
    "use_distributed_optimizer",
)


def describe(checkpoint: str | os.PathLike[str]) -> dict[str, Any]:
    """Path, iteration, architecture, the layout that saved it, the ``lengthgen`` section and the sizes.

    Values can be written as JSON. Parameters are counted from the stored tensors, vocabulary padding included.

    Raises:
        UserError: as :func:`megatron_lengthgen.checkpoint.load.find_checkpoint`.
    """
    path = load.find_checkpoint(checkpoint)
    args = load.checkpoint_args(path)
    from megatron.core import dist_checkpointing

    tensors = dist_checkpointing.load_tensors_metadata(str(path))
    model = {key: tensor for key, tensor in tensors.items() if load.is_model_key(key)}
    tokenizer = load.tokenizer_dir(path)
    return {
        "checkpoint": str(path),
        "iteration": args.iteration,
        "consumed_train_samples": getattr(args, "consumed_train_samples", 0),
        "parameters": sum(math.prod(tensor.global_shape) for tensor in model.values()),
        "dtype": ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in model.values()})),
        "optimizer_state": any("optimizer" in key for key in tensors),
        "tokenizer": str(tokenizer) if tokenizer else None,
        "architecture": {name: _plain(getattr(args, name)) for name in _ARCHITECTURE if _is_set(args, name)},
        "saved_on": {name: _plain(getattr(args, name)) for name in _LAYOUT if hasattr(args, name)},
        "lengthgen": args.lengthgen,
    }


def _is_set(args: Any, name: str) -> bool:
    return getattr(args, name, None) is not None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
