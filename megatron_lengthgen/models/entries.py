"""The rows of a key map: a Megatron parameter and the Hugging Face tensors that it is made of."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Entry", "one", "padded_vocab_size", "vocabulary"]


@dataclass(frozen=True)
class Entry:
    """One Megatron parameter and the Hugging Face tensors that it is made of.

    Attributes:
        megatron: name in the ``state_dict()`` of an unsplit Megatron model (TP=1, PP=1).
        hugging_face: names in the Hugging Face model, in the order that ``pack`` takes and ``unpack`` gives.
        shapes: shapes of those tensors.
        pack: Hugging Face tensors -> Megatron tensor.
        unpack: Megatron tensor -> Hugging Face tensors; the exact inverse.
        is_layer_norm: whether it is the gain of a norm that Megatron may keep zero-centred.
    """

    megatron: str
    hugging_face: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    pack: Callable[[Sequence[Tensor]], Tensor]
    unpack: Callable[[Tensor], tuple[Tensor, ...]]
    is_layer_norm: bool = False


def one(megatron: str, hugging_face: str, *shape: int, is_layer_norm: bool = False) -> Entry:
    """A tensor that is the same on both sides."""
    return Entry(
        megatron, (hugging_face,), (shape,), lambda tensors: tensors[0], lambda tensor: (tensor,), is_layer_norm
    )


def vocabulary(megatron: str, hugging_face: str, *, rows: int, padded: int, hidden: int) -> Entry:
    """A matrix with a row for each token, which Megatron pads with zeros from ``rows`` to ``padded``."""
    return Entry(
        megatron,
        (hugging_face,),
        ((rows, hidden),),
        lambda tensors: torch.nn.functional.pad(tensors[0], (0, 0, 0, padded - rows)) if padded > rows else tensors[0],
        lambda tensor: (tensor[:rows],),
    )


def padded_vocab_size(vocab_size: int, make_vocab_size_divisible_by: int) -> int:
    """Rows of the embedding: ``vocab_size`` rounded up, whatever the tensor parallel size.

    Megatron rounds to a multiple of ``make_vocab_size_divisible_by * tensor_model_parallel_size``
    (``megatron/training/vocab_utils.py``), which would make the same model another one on another layout.
    """
    return math.ceil(vocab_size / make_vocab_size_divisible_by) * make_vocab_size_divisible_by
