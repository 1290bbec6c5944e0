"""Keep masks: which activations a dropout leaves standing.

Two ways to draw one. :func:`draw_keep_mask` takes the next numbers of the device's default generator.
:func:`counter_keep_mask` computes each element from its coordinates alone (which sample, position, channel, stream)
and a key, so that any rank, at any time, gets the same bit for the same element.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "MASK_VERSION",
    "MaskCoordinates",
    "check_probability",
    "counter_keep_mask",
    "draw_keep_mask",
    "philox4x32",
    "quantize",
]

#: Changes whenever :func:`counter_keep_mask` gives other bits for the same coordinates.
MASK_VERSION = 1

_LEVELS = 1 << 16
_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LANES = 8  # 16-bit draws in the four words of one counter
_BLOCK = 1 << 16  # counters computed at once: the temporaries stay in the cache


def check_probability(p: float) -> float:
    """Return ``p`` when it is a drop probability in ``[0, 1)``; raise ``ValueError`` that names it otherwise."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0.0 <= p < 1.0:
        raise ValueError(f"the drop probability p must be a number in [0, 1), got {p!r}")
    return float(p)


def quantize(p: float) -> float:
    """The drop probability that is really drawn: ``p`` in (0, 1) to the nearest multiple of 1/65536, never 0 or 1."""
    return min(max(round(p * _LEVELS), 1), _LEVELS - 1) / _LEVELS


def _keep(draws: Tensor, p: float) -> Tensor:
    """Threshold int16 draws in place: one uniform over [-2^15, 2^15) is kept at ``first`` and above."""
    first = round(quantize(p) * _LEVELS) - _LEVELS // 2
    # Saturation to 0 or 1 vectorizes; a comparison into bool does not, and costs more than the draw.
    return draws.clamp_(first - 1, first).sub_(first - 1).to(torch.bool)


def draw_keep_mask(shape: torch.Size | tuple[int, ...], p: float, device: torch.device | str = "cpu") -> Tensor:
    """Independent draws that are True (keep) with probability ``1 - quantize(p)``.

    One 64-bit word of the device's default generator gives four draws: on a CPU this takes a sixth of the time of
    ``Tensor.bernoulli_``, which spends a word and a division on each.

    Args:
        shape: Shape of the mask.
        p: Drop probability in (0, 1).
        device: Where to draw; the caller has selected the stream of that device's default generator.

    Returns:
        Bool tensor of ``shape``.
    """
    count = torch.Size(shape).numel()
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    return _keep(words.view(torch.int16)[:count], p).view(shape)


def philox4x32(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10: four 32-bit words that are a pseudo-random function of a 128-bit counter and a 64-bit key.

    Args:
        counter: Four int64 tensors with values in [0, 2^32), of shapes that broadcast together.
        key: Two integers in [0, 2^32).

    Returns:
        Four int64 tensors of the broadcast shape with values in [0, 2^32).

    Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product modulo 2^64 has the right 64 bits, signed or not; the mask removes what >> copies of the sign.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((p1 >> 32) ^ (c1 ^ k0)).bitwise_and_(_WORD),
            p1 & _WORD,
            ((p0 >> 32) ^ (c3 ^ k1)).bitwise_and_(_WORD),
            p0 & _WORD,
        )
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1, c2, c3


@dataclasses.dataclass(frozen=True)
class MaskCoordinates:
    """Where a tensor of activations ``[s, b, h]`` lies in the whole model's, in one training step.

    Attributes:
        key: 64-bit key of the training step.
        stream: 32-bit number of the layer and site.
        positions: Sequence positions of the tensor's rows: ``(first, count)`` runs whose counts sum to ``s``.
        sample: Number of the tensor's first sample in the step's global batch.
        channel: Number of the tensor's first channel.
    """

    key: int
    stream: int
    positions: tuple[tuple[int, int], ...]
    sample: int = 0
    channel: int = 0


def counter_keep_mask(
    shape: torch.Size | tuple[int, int, int], p: float, where: MaskCoordinates, device: torch.device | str = "cpu"
) -> Tensor:
    """Keep mask of which each element is a function of its coordinates: equal elements get equal bits anywhere.

    The counter of :func:`philox4x32` is (position, sample, channel // 8, stream); channel % 8 selects one of the eight
    16-bit halves of its four words (word 0 first, low half first), which is kept if it is, as a signed number,
    ``65536 * quantize(p) - 32768`` or more.

    Args:
        shape: ``(s, b, h)``.
        p: Drop probability in (0, 1); elements kept at one ``p`` are kept at all smaller ones.
        where: Coordinates of the tensor.
        device: Of the mask.

    Returns:
        Bool tensor of ``shape``; True (keep) with probability ``1 - quantize(p)``.
    """
    s, b, h = shape
    key = (where.key & _WORD, (where.key >> 32) & _WORD)
    first, last = where.channel // _LANES, -(-(where.channel + h) // _LANES)
    groups = torch.arange(first, last, device=device)
    samples = torch.arange(where.sample, where.sample + b, device=device).view(b, 1)
    stream = torch.full((1,), where.stream, dtype=torch.int64, device=device)
    positions = torch.cat([torch.arange(start, start + count, device=device) for start, count in where.positions])
    if positions.numel() != s:
        raise ValueError(f"positions cover {positions.numel()} rows, and the tensor has {s}")
    mask = torch.empty(s, b, h, dtype=torch.bool, device=device)
    skip = where.channel - first * _LANES
    rows = max(_BLOCK // max(b * (last - first), 1), 1)
    for start in range(0, s, rows):
        counter = (positions[start : start + rows].view(-1, 1, 1), samples, groups, stream)
        words = torch.broadcast_tensors(*philox4x32(counter, key))
        draws = torch.stack([word.to(torch.int32) for word in words], dim=-1).view(torch.int16).flatten(-2)
        mask[start : start + rows] = _keep(draws, p)[..., skip : skip + h]
    return mask
