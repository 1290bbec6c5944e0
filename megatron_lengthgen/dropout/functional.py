"""Dropout between a norm and its linear: Pre-Linear dropout and its variance-preserving affine form (VPAD)."""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengthgen.dropout.masks import (
    MaskCoordinates,
    check_probability,
    counter_keep_mask,
    draw_keep_mask,
    quantize,
)
from megatron_lengthgen.dropout.moments import Moments, merge_moments, moments

__all__ = ["Moments", "merge_moments", "moments", "pre_linear_dropout", "vpad"]


class _Mask:
    """A keep mask of the shape of ``x``, and the drop probability that it was really drawn with.

    Args:
        x: The activations.
        p: The wanted drop probability.
        source: A bool tensor drawn with exactly ``p``; coordinates to compute it from; or None for a plain draw.
    """

    def __init__(self, x: Tensor, p: float, source: Tensor | MaskCoordinates | None) -> None:
        self._shape, self._device, self._source = x.shape, x.device, source
        self.p = p if isinstance(source, Tensor) else quantize(p)
        if isinstance(source, Tensor) and (source.dtype != torch.bool or source.shape != x.shape):
            raise ValueError(
                f"mask must be a bool tensor of shape {tuple(x.shape)}, got {source.dtype} of shape "
                f"{tuple(source.shape)}"
            )

    @property
    def is_recomputed(self) -> bool:
        """Is it cheaper to compute the mask again than to keep it? On a GPU memory is what is scarce."""
        return isinstance(self._source, MaskCoordinates) and self._device.type != "cpu"

    def tensor(self) -> Tensor:
        if isinstance(self._source, Tensor):
            return self._source
        if self._source is None:
            return draw_keep_mask(self._shape, self.p, self._device)
        return counter_keep_mask(self._shape, self.p, self._source, self._device)


class _MaskedAffine(torch.autograd.Function):
    """``y = shift + scale * mask * (x - center)``; all but ``x`` are constants. Backward keeps only mask and scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, source: _Mask, scale: Tensor | float, center: Tensor | None, shift: Tensor | None
    ) -> Tensor:
        mask = source.tensor()
        ctx.scale, ctx.source = scale, source
        ctx.save_for_backward(*([] if source.is_recomputed else [mask]))
        if center is None:
            y = _affine(_masked(x, mask), scale, shift)
        else:
            wide = torch.sub(x, center)
            y = wide.mul_(_as_factor(mask, wide.dtype)).mul_(scale)
            y = y if shift is None else y.add_(shift)
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        mask = ctx.source.tensor() if ctx.source.is_recomputed else ctx.saved_tensors[0]
        grad = grads[0]
        return _affine(_masked(grad, mask), ctx.scale, None).to(grad.dtype), None, None, None, None


def _as_factor(mask: Tensor, dtype: torch.dtype) -> Tensor:
    # The same bytes read as uint8 convert with vector instructions; a bool does not (7 times slower on a CPU).
    return mask.view(torch.uint8).to(dtype)


def _masked(x: Tensor, mask: Tensor) -> Tensor:
    # Exact in any dtype: the factors are 0 and 1.
    return x * _as_factor(mask, x.dtype)


def _affine(x: Tensor, scale: Tensor | float, shift: Tensor | None) -> Tensor:
    """``scale * x + shift``, computed wide; ``x`` is a temporary that may be overwritten."""
    if not isinstance(scale, Tensor):
        return x.mul_(scale)  # a scalar factor is applied in float32 and rounded once, in any dtype
    wide = x.to(scale.dtype)
    return wide.mul_(scale) if shift is None else torch.addcmul(shift, wide, scale)


def pre_linear_dropout(x: Tensor, p: float, *, mask: Tensor | MaskCoordinates | None = None) -> Tensor:
    r"""Inverted dropout on the normalised activations that enter a linear layer.

    .. math:: y_i = m_i x_i / q, \qquad q = 1 - p, \quad m_i \sim \mathrm{Bernoulli}(q)

    :math:`E[y|x] = x`, and :math:`\mathrm{Var}(y_i) = \sigma_i^2/q + \mu_i^2 p/q`: larger than at inference.

    Args:
        x: Activations ``[..., h]``, any floating dtype.
        p: Drop probability in [0, 1); ``p = 0`` returns ``x`` itself.
        mask: Bool ``[..., h]``, True = keep, drawn with exactly ``p``; or, for ``[s, b, h]``, the coordinates of ``x``,
            from which the mask is computed (on a GPU once more in backward, so that none is stored). By default it is
            drawn from the default generator of ``x``'s device. A mask drawn or computed here has ``p`` rounded to
            1/65536, and the rounded value is the one that scales.

    Returns:
        ``y`` in the shape and dtype of ``x``.

    Raises:
        ValueError: ``p`` outside [0, 1), or a mask of another shape or dtype.

    Source: arXiv 2610.04518.
    """
    p = check_probability(p)
    if p == 0.0:
        return x
    drawn = _Mask(x, p, mask)
    return _MaskedAffine.apply(x, drawn, 1.0 / (1.0 - drawn.p), None, None)


def vpad(
    x: Tensor,
    p: float,
    mean: Tensor,
    variance: Tensor,
    *,
    fill: Literal["zero", "mean"] = "zero",
    mask: Tensor | MaskCoordinates | None = None,
) -> Tensor:
    r"""Variance-preserving affine dropout: each coordinate keeps the mean and variance that it has at inference.

    With :math:`q = 1 - p` and :math:`m_i \sim \mathrm{Bernoulli}(q)`, ``fill="zero"`` is

    .. math::
        y_i = a_i m_i x_i + b_i, \qquad
        a_i = \frac{\sigma_i}{\sqrt{q (\sigma_i^2 + p \mu_i^2)}}, \qquad
        b_i = \mu_i (1 - a_i q),

    the affine correction of alpha dropout (Klambauer et al. 2017) per coordinate, and ``fill="mean"`` puts the mean in
    the place of a dropped value:

    .. math:: y_i = \mu_i + \frac{m_i}{\sqrt q} (x_i - \mu_i).

    Both give :math:`E[y_i] = \mu_i` and :math:`\mathrm{Var}(y_i) = \sigma_i^2`, and are equal where
    :math:`\mu_i = 0`. A coordinate with :math:`\sigma_i = 0` becomes :math:`y_i = \mu_i`.

    Args:
        x: Activations ``[..., h]``, any floating dtype; the map is computed in float32 (float64 for float64) and cast
            once.
        p: Drop probability in [0, 1); ``p = 0`` returns ``x`` itself.
        mean: :math:`\mu`, ``[h]``, taken as a constant in backward.
        variance: :math:`\sigma^2`, ``[h]``, not negative, taken as a constant in backward.
        fill: What a dropped coordinate holds before the correction: zero or its mean.
        mask: As in :func:`pre_linear_dropout`.

    Returns:
        ``y`` in the shape and dtype of ``x``.

    Raises:
        ValueError: ``p`` outside [0, 1), an unknown ``fill``, or a mask of another shape or dtype.

    Source: arXiv 2610.04518.
    """
    p = check_probability(p)
    if fill not in ("zero", "mean"):
        raise ValueError(f"fill must be 'zero' or 'mean', got {fill!r}")
    if p == 0.0:
        return x
    drawn = _Mask(x, p, mask)
    p = drawn.p
    wide = torch.promote_types(x.dtype, torch.float32)
    mu, var = mean.detach().to(wide), variance.detach().to(wide)
    q = 1.0 - p
    if fill == "mean":
        return _MaskedAffine.apply(x, drawn, (var > 0).to(wide) * q**-0.5, mu, mu)
    a = torch.where(var > 0, torch.sqrt(var / (q * (var + p * mu.square()))), 0.0)
    return _MaskedAffine.apply(x, drawn, a, None, mu * (1.0 - a * q))
