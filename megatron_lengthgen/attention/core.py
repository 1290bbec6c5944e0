"""Core attention for Megatron-Core's local backend: SDPA in place of ``DotProductAttention``."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    is_layer_window_attention,
    make_sharded_tensors_for_checkpoint,
)
from megatron.core.utils import divide
from torch import Tensor

from megatron_lengthgen.attention.cache import SequenceCache
from megatron_lengthgen.attention.documents import attend_apart, mask_layouts, packed_layouts
from megatron_lengthgen.attention.functional import causal_attention, masked_attention
from megatron_lengthgen.attention.rotary import Rotary, rotate
from megatron_lengthgen.choices import check_choice
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
    """Causal self-attention with per-layer windows, grouped queries, attention sinks and documents kept apart.

    A drop-in for ``megatron.core.transformer.dot_product_attention.DotProductAttention`` in the ``core_attention``
    place of a layer spec, with the same checkpoint keys: ``softmax_offset`` [heads], the sinks' logits, where
    ``config.softmax_type`` is "learnable", and none elsewhere. Memory is linear in length, and so is the time of a
    windowed layer. Which layers have a window is Megatron's decision (``config.window_size`` and
    ``config.window_attn_skip_freq``).

    Args:
        config: the model's configuration.
        layer_number: global number of the layer, counted from 1.
        attn_mask_type: must be causal.
        attention_type: must be "self".
        attention_dropout: None for ``config.attention_dropout``.
        softmax_scale: None for ``1 / sqrt(kv_channels)``.
        cp_comm_type: not used, context parallelism is refused.
        pg_collection: its ``tp`` group splits the sinks; None for Megatron's own.

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
        self.tp_group = parallel_state.get_tensor_model_parallel_group() if pg_collection is None else pg_collection.tp
        self._add_sinks()
        #: Key-value caches, one per row of the batch, while a generation engine runs this layer; else None.
        self.caches: Sequence[SequenceCache] | None = None
        #: What such an engine has this layer rotate queries and keys by; None where they are rotated, or stay as is.
        self.rotary: Rotary | None = None
        #: How many of the last queries such an engine wants answers for; None for all.
        self.queries: int | None = None

    def _add_sinks(self) -> None:
        """``softmax_offset``: logits of the sinks of this rank's heads, as in ``DotProductAttention.__init__``."""
        config = self.config
        if config.softmax_type == "vanilla":
            self.softmax_offset = None
            return
        heads = divide(config.num_attention_heads, self.tp_group.size())
        offset = torch.zeros(heads, device=torch.cuda.current_device(), dtype=config.params_dtype)
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", offset, persistent=False)
            return
        self.softmax_offset = torch.nn.Parameter(offset)
        # Megatron counts a parameter without this mark on the first tensor parallel rank alone when it clips gradients.
        tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        if config.perform_initialization:
            config.init_method(self.softmax_offset)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[tuple[int, int, int], ...] = (), metadata: dict | None = None
    ) -> ShardedStateDict:
        """The same keys and shards as ``DotProductAttention``'s."""
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True),
            prefix,
            {"softmax_offset": 0},
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"],
        )

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
            query: [sq, b, np, hn], the last sq of sk positions; [tokens, np, hn] with ``packed_seq_params``.
            key: [sk, b, ng, hn], or [tokens, ng, hn].
            value: [sk, b, ng, hn], or [tokens, ng, hn].
            attention_mask: None (the causal mask needs none), or bool, broadcastable to [b, np, sq, sk], True where
                hidden. One that keeps documents apart (``reset_attention_mask``) has them attended one by one; any
                other narrows the causal mask and the window, and costs quadratic memory.
            attn_mask_type: causal or absent; `no_mask` comes with a cached prefix and is causal too.
            attention_bias: refused.
            packed_seq_params: documents (``thd``), each attended alone; their padding gives 0.

        Returns:
            [sq, b, np * hn], or [tokens, np * hn].
        """
        if attention_bias is not None:
            raise UserError("SDPACoreAttention takes no attention_bias; use relative positions by RoPE")
        if packed_seq_params is not None:
            if attention_mask is not None or self.caches is not None:
                other = "an attention_mask" if self.caches is None else "key-value caches"
                raise UserError(
                    f"packed sequences came with {other}: they keep documents apart by themselves, leave it"
                )
            return self._attend_packed(query, key, value, packed_seq_params)
        if attn_mask_type not in _CAUSAL and attention_mask is None:
            raise UserError(f"SDPACoreAttention is causal, got attn_mask_type={attn_mask_type} without a mask")
        # [s, b, n, hn] -> [b, n, s, hn], views
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.caches is not None:
            if attention_mask is not None:
                raise UserError("a layer that runs from key-value caches takes no attention_mask")
            context = self._attend_from_caches(q, k, v)
        else:
            with self._random_stream():
                context = (
                    self._attend(q, k, v) if attention_mask is None else self._attend_masked(q, k, v, attention_mask)
                )
        return context.permute(2, 0, 1, 3).flatten(2)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *, keep: Tensor | None = None) -> Tensor:
        settings: dict[str, Any] = {
            "window": self.window,
            "scale": self.softmax_scale,
            "dropout": self._dropout,
            "sink": self.softmax_offset,
        }
        if keep is None:
            return causal_attention(query, key, value, **settings)
        return masked_attention(query, key, value, keep, **settings)

    def _attend_masked(self, query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> Tensor:
        layouts = mask_layouts(hidden) if query.size(2) == key.size(2) else None
        if layouts is None:
            return self._attend(query, key, value, keep=~hidden)
        if len(layouts) == 1:
            return attend_apart(query, key, value, layouts[0], layouts[0], self._attend)
        rows = zip(query.split(1), key.split(1), value.split(1), layouts, strict=True)
        return torch.cat([attend_apart(q, k, v, layout, layout, self._attend) for q, k, v, layout in rows])

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams) -> Tensor:
        query_layout, key_layout = packed_layouts(packed, query.size(0), key.size(0))
        # [tokens, n, hn] -> [1, n, tokens, hn], views
        q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
        with self._random_stream():
            context = attend_apart(q, k, v, query_layout, key_layout, self._attend)
        return context[0].transpose(0, 1).flatten(1)

    def _attend_from_caches(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert self.caches is not None and not self.training
        rotary = self.rotary
        if rotary is not None:
            key = rotate(key, rotary)
        if self.queries is not None and self.queries < query.size(2):
            query = query[:, :, -self.queries :]
            rotary = None if rotary is None else rotary.last(self.queries)
        if rotary is not None:
            query = rotate(query, rotary)
        rows = []
        for row, cache in enumerate(self.caches):
            part = slice(row, row + 1)
            keys, values = cache.append(self.layer_number, key[part], value[part], self.window)
            rows.append(self._attend(query[part], keys, values))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @property
    def _dropout(self) -> float:
        return self.attention_dropout if self.training else 0.0

    def _random_stream(self) -> AbstractContextManager[None]:
        # Heads differ between tensor parallel ranks, so their masks must; under sequence parallelism the block has
        # already forked, and forking twice replays wrong masks in a recompute.
        if self._dropout == 0.0 or self.config.sequence_parallel:
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
    check_choice("softmax_type", config.softmax_type, ("vanilla", "off-by-one", "learnable"))
    if config.multi_latent_attention:
        raise UserError(f"SDPACoreAttention has no multi-latent attention; {use_te}")
    if config.flash_decode:
        raise UserError("flash_decode bypasses the core attention and its windows; set flash_decode=False")
    for name in ("qk_clip", "log_max_attention_logit"):
        if getattr(config, name):
            raise UserError(f"SDPACoreAttention does not see attention logits, so it has no {name}; set it to False")
