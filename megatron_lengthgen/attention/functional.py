"""Causal and sliding-window attention over PyTorch's scaled dot product attention (SDPA).

Shapes: b batch, h query heads, g key heads (h a multiple of g), sq queries, sk keys, d head size. Queries are the last
``sq`` of ``sk`` positions (bottom-right alignment), so a cached prefix or a prefill chunk needs no extra argument. A
window of W tokens lets a query see exactly W keys, itself included.

Memory is linear in length, except for SDPA's own choice with dropout on a CPU. The time of a windowed call is linear in
length: the first W queries see everything before them (plain causal attention); the others are cut into blocks of B
queries against B + W keys that share one band mask and go through one SDPA call.

An attention sink is a logit per head that takes part in the softmax and has no value: weights are
``exp(score) / (exp(sink) + sum of exp(score))`` (Megatron's ``softmax_type``; a sink of 0 is "off-by-one"). SDPA has
none, so each call gets one key more: :func:`_with_sink`.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lengthgen.attention import cpu_backward

__all__ = ["block_length", "causal_attention", "masked_attention"]


_PREFIX_BLOCK = 256
_PAD = 8  # kernels want head sizes that are multiples of 8


def causal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Attention of the last sq positions to themselves and to what stands before them.

    Args:
        query: [b, h, sq, d].
        key: [b, g, sk, d] with sk >= sq.
        value: [b, g, sk, d].
        window: number of keys that a query sees, itself included; None for all before it.
        scale: factor of the scores; None for ``1/sqrt(d)``.
        dropout: probability with which an attention weight is dropped.
        sink: [h], logits of the heads' attention sinks; None for none.

    Returns:
        [b, h, sq, d]

    Raises:
        ValueError: sk < sq, or a window below 1.
    """
    sq, sk = query.size(2), key.size(2)
    if sk < sq:
        raise ValueError(f"causal attention needs a key for each query, got {sq} queries and {sk} keys")
    if window is not None and window < 1:
        raise ValueError(f"a window must hold at least the query itself, got {window}")
    if window is None or window >= sk:
        return _causal(query, key, value, scale, dropout, sink)
    if sq == 1:
        return _sdpa(query, key[:, :, -window:], value[:, :, -window:], scale, dropout, sink)
    if sink is None and cpu_backward.pays_off(query, key, value, dropout):
        factor = query.size(3) ** -0.5 if scale is None else scale
        return cpu_backward.WindowedAttention.apply(
            query, key, value, window, factor, lambda: _windowed(query, key, value, window, scale, dropout, None)
        )
    return _windowed(query, key, value, window, scale, dropout, sink)


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    sink: Tensor | None = None,
) -> Tensor:
    """Causal attention that a dense mask narrows further: quadratic memory, for callers that bring such a mask.

    Args:
        query: [b, h, sq, d].
        key: [b, g, sk, d].
        value: [b, g, sk, d].
        keep: bool, broadcastable to [b, h, sq, sk]; True where the key may be seen. A query that may see none gives 0.
        window: as in :func:`causal_attention`.
        scale: as in :func:`causal_attention`.
        dropout: as in :func:`causal_attention`.
        sink: as in :func:`causal_attention`.

    Returns:
        [b, h, sq, d]
    """
    sq, sk = query.size(2), key.size(2)
    causal = torch.ones(sq, sk, dtype=torch.bool, device=query.device).tril_(sk - sq)
    if window is not None:
        causal.triu_(sk - sq - window + 1)
    return _sdpa(query, key, value, scale, dropout, sink, mask=keep & causal)


def block_length(window: int) -> int:
    """Queries per block of a windowed call.

    Small blocks waste little (a block of B works on B + W keys for W), large ones copy keys less often (each key is in
    1 + W/B blocks). On CPU 256 was the fastest for W = 256 and W = 1024, forward and backward.
    """
    if window < 256:
        return 128 if window >= 128 else 64
    return max(256, window // 4)


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scale: float | None, dropout: float, sink: Tensor | None
) -> Tensor:
    sq, sk = query.size(2), key.size(2)
    if sq == 1:
        return _sdpa(query, key, value, scale, dropout, sink)
    if sq == sk:
        return _sdpa(query, key, value, scale, dropout, sink, causal=True)
    if query.device.type == "cpu" and not dropout and sink is None and not _needs_gradients(query, key, value):
        return _behind_prefix(query, key, value, scale)
    # SDPA's is_causal is aligned top-left, so behind a prefix a mask has to say it. Block by block little is computed
    # in vain, and one mask of a block's height serves all. Additive: SDPA converts a boolean mask on each call.
    capacity = _PREFIX_BLOCK + (1 << (sk - 1).bit_length())
    mask = _lower_right_mask(_PREFIX_BLOCK, capacity, query.dtype, query.device)
    parts = []
    for start in range(0, sq, _PREFIX_BLOCK):
        part = query[:, :, start : start + _PREFIX_BLOCK]
        rows = part.size(2)
        end = sk - sq + start + rows
        # The lower right corner of the mask; a shorter block leaves out rows at the bottom and as many columns.
        last = capacity - (_PREFIX_BLOCK - rows)
        seen = mask[:rows, last - end : last]
        parts.append(_sdpa(part, key[:, :, :end], value[:, :, :end], scale, dropout, sink, mask=seen))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _needs_gradients(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _behind_prefix(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """The prefix without a mask and the new positions with ``is_causal``, merged by their log-sum-exps.

    A fifth faster than masks on a CPU. The operator is the one that SDPA itself calls there; SDPA drops that sum.
    """
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    prefix = key.size(2) - query.size(2)
    before, before_lse = attend(query, key[:, :, :prefix], value[:, :, :prefix], 0.0, False, scale=scale)
    new, new_lse = attend(query, key[:, :, prefix:], value[:, :, prefix:], 0.0, True, scale=scale)
    share = torch.sigmoid(before_lse - new_lse).unsqueeze(-1)  # of the softmax's sum
    return torch.lerp(new.float(), before.float(), share).to(query.dtype)


def _windowed(
    query: Tensor, key: Tensor, value: Tensor, window: int, scale: float | None, dropout: float, sink: Tensor | None
) -> Tensor:
    sq = query.size(2)
    # Blocks carry one key more than they need on the left (masked), so that a block starts at an aligned address.
    visible = min(key.size(2), sq + window)
    key, value = key[:, :, -visible:], value[:, :, -visible:]
    prefix = visible - sq
    head = min(sq, window - prefix)
    parts = []
    if head:
        end = prefix + head
        parts.append(_causal(query[:, :, :head], key[:, :, :end], value[:, :, :end], scale, dropout, sink))
    length = block_length(window)
    blocks, tail = divmod(sq - head, length)
    if blocks:
        end = head + blocks * length
        parts.append(
            _join(
                _sdpa(
                    _cut(query[:, :, head:end], length, length),
                    _cut(key[:, :, : window + blocks * length], length + window, length),
                    _cut(value[:, :, : window + blocks * length], length + window, length),
                    scale,
                    dropout,
                    sink,
                    mask=_band_mask(length, window, query.dtype, query.device),
                ),
                blocks,
            )
        )
    if tail:
        mask = _band_mask(length, window, query.dtype, query.device)[:tail, : tail + window]
        keys = slice(visible - tail - window, None)
        parts.append(_sdpa(query[:, :, -tail:], key[:, :, keys], value[:, :, keys], scale, dropout, sink, mask=mask))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _cut(x: Tensor, size: int, step: int) -> Tensor:
    """[b, n, s, d] -> [b * blocks, n, size, d], blocks starting every ``step`` positions (a view where b is 1)."""
    return x.unfold(2, size, step).permute(0, 2, 1, 4, 3).flatten(0, 1)


def _join(x: Tensor, blocks: int) -> Tensor:
    """[b * blocks, n, size, d] -> [b, n, blocks * size, d]"""
    return x.unflatten(0, (-1, blocks)).transpose(1, 2).flatten(2, 3)


def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    dropout: float,
    sink: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    if sink is not None:
        factor = query.size(3) ** -0.5 if scale is None else scale
        q, k, v, mask = _with_sink(query, key, value, mask, sink / factor, causal=causal)
        return _sdpa(q, k, v, factor, dropout, mask=mask, causal=causal)[:, :, -query.size(2) :, : query.size(3)]
    groups = key.size(1)
    if groups == query.size(1):
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale)
    if query.size(2) == 1 and mask is None:
        # The queries of a group are as good as a sequence of them, which reads the keys once.
        folded = query.reshape(query.size(0), groups, -1, query.size(3))
        out = F.scaled_dot_product_attention(folded, key, value, None, dropout, scale=scale)
        return out.reshape(query.size(0), query.size(1), 1, -1)
    if mask is not None and query.device.type != "cpu":
        # Elsewhere only the kernels without masks share keys between heads; the fallback would build all scores.
        repeats = query.size(1) // groups
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, scale=scale)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale=scale, enable_gqa=True)


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, product: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """A first key that all see, with value 0, whose product with a query is ``product`` [h] of the query's head.

    The head size grows by ``_PAD``: there queries carry the product, the sink has a one, and all other keys have zeros.
    So the logit is learned through the query, and heads that share keys have sinks of their own. SDPA's ``is_causal``
    hides the first key from no query but one before the first, so a ``causal`` call gets a query more, too.
    """
    extra = F.pad(product.to(query.dtype)[None, :, None, None], (0, _PAD - 1))
    query = torch.cat([query, extra.expand(query.size(0), -1, query.size(2), -1)], dim=3)
    if causal:
        query = F.pad(query, (0, 0, 1, 0))
    key, value = (F.pad(x, (0, _PAD, 1, 0)) for x in (key, value))
    key[:, :, 0, -_PAD] = 1
    return query, key, value, None if mask is None else F.pad(mask, (1, 0), value=float(mask.dtype is torch.bool))


@lru_cache(maxsize=2)
def _lower_right_mask(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[rows, columns], 0 where seen and -inf elsewhere, aligned bottom-right; its corner serves any number of keys."""
    with torch.inference_mode(False):  # a mask made during inference must serve training too
        mask = torch.full((rows, columns), float("-inf"), dtype=dtype, device=device)
        return mask.triu_(columns - rows + 1)


@lru_cache(maxsize=16)
def _band_mask(length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[length, length + window]: query r is key ``window + r`` and sees the ``window`` keys that end there."""
    with torch.inference_mode(False):
        keep = torch.ones(length, length + window, dtype=torch.bool, device=device).tril_(window).triu_(1)
        return torch.zeros(length, length + window, dtype=dtype, device=device).masked_fill_(~keep, float("-inf"))
