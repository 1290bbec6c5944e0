"""Several documents in one sequence, each attended alone: where they are, and how to take them one by one.

A layout is a list of ``(length, padding)`` pairs, in order: a document's tokens and the tokens after it that belong to
none. Megatron says it in two ways, by the offsets of packed sequences and by a dense mask (``reset_attention_mask``).
Position ids that start again (``reset_position_ids``) say nothing about attention and never reach it: ``GPTModel``
gives them to its embedding alone (``megatron/core/models/gpt/gpt_model.py::_preprocess``).
"""

from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_lengthgen.errors import UserError

__all__ = ["Layout", "attend_apart", "mask_layouts", "packed_layouts"]

Layout = list[tuple[int, int]]

_ROWS = 256
"""Rows of a dense mask that are compared at once."""


def attend_apart(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_layout: Layout,
    key_layout: Layout,
    attend: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Attention within each document; memory is linear in the total length if that of ``attend`` is.

    Args:
        query: [b, h, sq, d], documents and padding one behind the other as in ``query_layout``.
        key: [b, g, sk, d], as in ``key_layout``.
        value: [b, g, sk, d].
        query_layout: its sum is sq.
        key_layout: its sum is sk; as many documents as queries have.
        attend: from a document's query, key and value to its result, shaped like its query.

    Returns:
        [b, h, sq, d], zero at padding.
    """
    # One split and one concatenation: the gradient of a slice is as long as the whole, and there is one per document.
    queries = query.split([n for pair in query_layout for n in pair], dim=2)
    keys, values = (x.split([n for pair in key_layout for n in pair], dim=2) for x in (key, value))
    parts = []
    for q, padding, k, v in zip(queries[::2], queries[1::2], keys[::2], values[::2], strict=True):
        parts += [attend(q, k, v) if q.size(2) else q, torch.zeros_like(padding)]
    return torch.cat(parts, dim=2)


def packed_layouts(packed: PackedSeqParams, sq: int, sk: int) -> tuple[Layout, Layout]:
    """Layouts of queries and keys of packed sequences. Reading the offsets waits for the device.

    Args:
        packed: ``cu_seqlens_*`` counts each document's tokens; ``cu_seqlens_*_padded``, where given, says where they
            stand. Documents may be empty.
        sq: query tokens, all documents and padding together.
        sk: key tokens.

    Raises:
        UserError: another format than ``thd``, or offsets that do not fit the tokens.

    Source: ``megatron/core/packed_seq_params.py``, ``megatron/core/models/common/embeddings/rope_utils.py``.
    """
    if packed.qkv_format != "thd":
        raise UserError(f"packed sequences come as qkv_format 'thd', got {packed.qkv_format!r}: set it to 'thd'")
    queries = _packed_layout("q", packed.cu_seqlens_q, packed.cu_seqlens_q_padded, sq)
    keys = _packed_layout("kv", packed.cu_seqlens_kv, packed.cu_seqlens_kv_padded, sk)
    if len(queries) != len(keys) or any(q > k for (q, _), (k, _) in zip(queries, keys, strict=True)):
        raise UserError(
            f"cu_seqlens_q has documents of {[n for n, _ in queries]} tokens and cu_seqlens_kv of "
            f"{[n for n, _ in keys]}: each query needs a key in its document"
        )
    return queries, keys


def _packed_layout(name: str, counts: Tensor | None, places: Tensor | None, total: int) -> Layout:
    if counts is None:
        raise UserError(f"packed sequences need cu_seqlens_{name}, got None")
    count = counts.tolist()
    place = count if places is None else places.tolist()
    layout = [
        (stop - start, end - begin - (stop - start))
        for start, stop, begin, end in zip(count, count[1:], place, place[1:], strict=False)
    ]
    is_whole = len(count) == len(place) > 1 and count[0] == place[0] == 0 and place[-1] <= total
    if not is_whole or any(length < 0 or padding < 0 for length, padding in layout):
        padded = "" if places is None else f" with cu_seqlens_{name}_padded {place}"
        raise UserError(
            f"cu_seqlens_{name} {count}{padded} does not divide {total} tokens: offsets start at 0, never fall and end "
            "within the tokens"
        )
    length, padding = layout[-1]
    return [*layout[:-1], (length, padding + total - place[-1])]


def mask_layouts(hidden: Tensor) -> list[Layout] | None:
    """The documents that a dense mask keeps apart, row by row of the batch.

    A mask costs quadratic memory where it is made; attention through its documents needs no more of that.

    Args:
        hidden: bool, [b, 1, s, s], True where a key is hidden from a query.

    Returns:
        b layouts; None where the mask says anything else than "causal within consecutive documents".

    Source of such masks: ``megatron/core/datasets/gpt_dataset.py::_get_ltor_masks_and_position_ids``.
    """
    if hidden.dtype is not torch.bool or hidden.dim() != 4 or hidden.size(1) != 1 or hidden.size(2) != hidden.size(3):
        return None
    hidden = hidden[:, 0]
    # A document begins where a query does not see the key before it.
    begins = torch.cat([hidden.new_zeros(hidden.size(0), 1), hidden.diagonal(-1, 1, 2)], dim=1)
    document = begins.cumsum(1)
    position = torch.arange(hidden.size(2), device=hidden.device)
    for rows in position.split(_ROWS):
        apart = document[:, rows, None] != document[:, None]
        if not torch.equal(hidden[:, rows], apart | (position > rows[:, None])):
            return None
    return [[(length, 0) for length in torch.bincount(row).tolist()] for row in document]
