"""Core attention for Megatron-Core's local backend: SDPA in place of ``DotProductAttention``."""

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from megatron_lengthgen.attention.cache import SequenceCache
from megatron_lengthgen.attention.functional import causal_attention, masked_attention
from megatron_lengthgen.errors import UserError

__all__ = ["SDPACoreAttention", "layer_window"]

# Mask types that mean "causal, aligned bottom-right" to a causal layer. Attention.forward passes `no_mask` for what
# follows a cached prefix (attention.py::_adjust_key_value_for_inference).
_CAUSAL = (None, AttnMaskType.causal, AttnMaskType.causal_bottom_right, AttnMaskType.no_mask)


def layer_window(config: TransformerConfig, layer_number: int) -> int | None:
    """Number of keys that a query of this layer (counted from 1) sees, itself included; None for all.

    Raises:
        UserError: ``config.window_size`` is not ``(W - 1, 0)``.
    """
    if not is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number):
        return None
    left, right = config.window_size
    if left < 0 or right != 0:
        raise UserError(f"window_size={config.window_size} is not causal: a window of W tokens is (W - 1, 0)")
    return left + 1


class SDPACoreAttention(MegatronModule):
    """Causal self-attention with per-layer windows and grouped queries; no parameters, so no checkpoint keys.

    A drop-in for ``megatron.core.transformer.dot_product_attention.DotProductAttention`` in the ``core_attention``
    place of a layer spec. Memory is linear in length, and so is the time of a windowed layer. Which layers have a
    window is Megatron's decision (``config.window_size`` and ``config.window_attn_skip_freq``).

    Args:
        config: the model's configuration.
        layer_number: global number of the layer, counted from 1.
        attn_mask_type: must be causal.
        attention_type: must be "self".
        attention_dropout: None for ``config.attention_dropout``.
        softmax_scale: None for ``1 / sqrt(kv_channels)``.
        cp_comm_type: not used, context parallelism is refused.
        pg_collection: not used, the heads of this rank are those that arrive.

    Raises:
        UserError: the configuration asks for something that this attention does not compute.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ):
        super().__init__(config=config)
        _refuse_unsupported(config, attn_mask_type, attention_type)
        self.layer_number = max(1, layer_number)
        self.window = layer_window(config, self.layer_number)
        # apply_query_key_layer_scaling divides the scores by the layer number before the softmax and multiplies them
        # back within it, for half precision's sake; SDPA accumulates in float32, so nothing is left to do.
        assert config.kv_channels is not None
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.attention_dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        #: Key-value caches, one per row of the batch, while a generation engine runs this layer; else None.
        self.caches: Sequence[SequenceCache] | None = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [sq, b, np, hn], the last sq of sk positions.
            key: [sk, b, ng, hn].
            value: [sk, b, ng, hn].
            attention_mask: None (the causal mask needs none), or bool, broadcastable to [b, np, sq, sk], True where
                hidden; it narrows the causal mask and the window and costs quadratic memory.
            attn_mask_type: causal or absent; `no_mask` comes with a cached prefix and is causal too.
            attention_bias: refused.
            packed_seq_params: refused.

        Returns:
            [sq, b, np * hn]
        """
        if attn_mask_type not in _CAUSAL and attention_mask is None:
            raise UserError(f"SDPACoreAttention is causal, got attn_mask_type={attn_mask_type} without a mask")
        if attention_bias is not None:
            raise UserError("SDPACoreAttention takes no attention_bias; use relative positions by RoPE")
        if packed_seq_params is not None:
            raise UserError("SDPACoreAttention takes no packed sequences; use Transformer Engine's attention for them")
        # [s, b, n, hn] -> [b, n, s, hn], views
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.caches is not None:
            if attention_mask is not None:
                raise UserError("a layer that runs from key-value caches takes no attention_mask")
            context = self._attend_from_caches(q, k, v)
        else:
            dropout = self.attention_dropout if self.training else 0.0
            with self._random_stream(dropout):
                if attention_mask is None:
                    context = causal_attention(q, k, v, window=self.window, scale=self.softmax_scale, dropout=dropout)
                else:
                    context = masked_attention(
                        q, k, v, ~attention_mask, window=self.window, scale=self.softmax_scale, dropout=dropout
                    )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _attend_from_caches(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self.caches is not None and not self.training
        rows = []
        for row, cache in enumerate(self.caches):
            part = slice(row, row + 1)
            keys, values = cache.append(self.layer_number, key[part], value[part], self.window)
            rows.append(causal_attention(query[part], keys, values, window=self.window, scale=self.softmax_scale))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _random_stream(self, dropout: float):
        # Heads differ between tensor parallel ranks, so their masks must; under sequence parallelism the block has
        # already forked, and forking twice replays wrong masks in a recompute.
        if dropout == 0.0 or self.config.sequence_parallel:
            return nullcontext()
        return tensor_parallel.get_cuda_rng_tracker().fork()


def _refuse_unsupported(config: TransformerConfig, attn_mask_type: AttnMaskType, attention_type: str) -> None:
    use_te = "use Transformer Engine's attention for it"
    if attention_type != "self" or attn_mask_type not in (AttnMaskType.causal, AttnMaskType.causal_bottom_right):
        raise UserError(
            f"SDPACoreAttention computes causal self-attention, got attention_type={attention_type!r} with "
            f"attn_mask_type={attn_mask_type}; keep the stock core_attention there"
        )
    if config.context_parallel_size > 1:
        raise UserError(
            f"SDPACoreAttention has no context parallelism (context_parallel_size={config.context_parallel_size}); "
            f"{use_te}"
        )
    if config.softmax_type != "vanilla":
        raise UserError(f"SDPACoreAttention has no softmax_type={config.softmax_type!r}; {use_te}")
    if config.multi_latent_attention:
        raise UserError(f"SDPACoreAttention has no multi-latent attention; {use_te}")
    if config.flash_decode:
        raise UserError("flash_decode bypasses the core attention and its windows; set flash_decode=False")
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, name):
            raise UserError(f"SDPACoreAttention does not see attention logits, so it has no {name}; set it to False")
