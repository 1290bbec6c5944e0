"""Rotary positions of a few tokens among many, computed once for all layers."""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Rotary", "rotate"]


class Rotary(NamedTuple):
    """Cosines and sines of tokens' angles.

    Attributes:
        cos: [b, 1, s, d / 2], for rows of the batch and their tokens; d is the number of channels that are rotated.
        sin: The same.
        interleaved: A pair is two neighbouring channels; else one of the first half and one of the second
            (``config.rotary_interleaved``).
    """

    cos: Tensor
    sin: Tensor
    interleaved: bool = False

    @classmethod
    def table(cls, angles: Tensor, *, interleaved: bool, scale: float, dtype: torch.dtype) -> "Rotary":
        """Of all positions, [length, d / 2] each.

        Args:
            angles: [length, d], as ``RotaryEmbedding`` of Megatron gives them: an angle stands at both of a pair.
            interleaved: see the class.
            scale: factor on both (``mscale`` of YaRN).
            dtype: that of what will be rotated.
        """
        angles = angles[:, ::2] if interleaved else angles[:, : angles.size(1) // 2]
        return cls((angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype), interleaved)

    def at(self, positions: Tensor) -> "Rotary":
        """Rows of a table for ``positions`` [b, s]."""
        return Rotary(self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1), self.interleaved)

    def last(self, tokens: int) -> "Rotary":
        """Of the last ``tokens`` of each row."""
        return Rotary(self.cos[:, :, -tokens:], self.sin[:, :, -tokens:], self.interleaved)


@torch.no_grad()
def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """``_apply_rotary_pos_emb_bshd`` of Megatron (``models/common/embeddings/rope_utils.py``) with a quarter of its
    passes over memory; without gradients.

    Args:
        x: [b, n, s, hn], any strides.
        rotary: of these rows and tokens.

    Returns:
        The shape and dtype of ``x``; each product is rounded to it once less than Megatron's.
    """
    rotated = 2 * rotary.cos.size(-1)
    out = torch.empty_like(x)
    (first, second), (out_first, out_second) = (_pairs(t[..., :rotated], rotary.interleaved) for t in (x, out))
    torch.mul(first, rotary.cos, out=out_first).addcmul_(second, rotary.sin, value=-1)
    torch.mul(second, rotary.cos, out=out_second).addcmul_(first, rotary.sin)
    if rotated < x.size(-1):
        out[..., rotated:] = x[..., rotated:]
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., ::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second
