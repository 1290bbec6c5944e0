"""Mean and variance of each coordinate over tokens, in pieces that can be merged."""

from collections.abc import Iterable
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Moments", "merge_moments", "moments"]


class Moments(NamedTuple):
    """Sufficient statistics of a set of tokens.

    Attributes:
        tokens: Their number ``n``, a float32 scalar (exact up to 2^24 tokens in a microbatch).
        mean: Mean of each coordinate, ``[h]``.
        m2: Sum of squared deviations from that mean, ``[h]``.
    """

    tokens: Tensor
    mean: Tensor
    m2: Tensor

    @property
    def variance(self) -> Tensor:
        """Population variance (divided by ``n``) of each coordinate, ``[h]``."""
        return self.m2 / self.tokens.clamp(min=1)


@torch.no_grad()
def moments(x: Tensor) -> Moments:
    """Two-pass moments of each coordinate over all but the last dimension, detached.

    The second pass sums squares of deviations, not of values: coordinates whose mean is a thousand times their
    spread occur in real models, and the one-pass difference of squares has no correct digit left there.

    Args:
        x: Activations ``[..., h]``; computed in float32 (float64 for float64 input).

    Returns:
        :class:`Moments` with ``mean`` and ``m2`` of shape ``[h]``.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    rows = rows.to(torch.promote_types(x.dtype, torch.float32))
    count = rows.new_tensor(float(rows.shape[0]))
    if rows.shape[0] == 0:
        zero = rows.new_zeros(x.shape[-1])
        return Moments(count, zero, zero.clone())
    mean = rows.mean(0)
    return Moments(count, mean, (rows - mean).square_().sum(0))


def _merge(a: Moments, b: Moments) -> Moments:
    count = a.tokens + b.tokens
    share = b.tokens / count.clamp(min=1)
    delta = b.mean - a.mean
    return Moments(count, a.mean + delta * share, a.m2 + b.m2 + delta.square() * (a.tokens * share))


def merge_moments(parts: Iterable[Moments]) -> Moments:
    r"""Moments of the union of disjoint sets of tokens.

    .. math:: M_2 = M_2^a + M_2^b + (\mu_b - \mu_a)^2 \frac{n_a n_b}{n_a + n_b}

    Args:
        parts: One :class:`Moments` per set, at least one; merged from left to right, so equal order gives equal bits.

    Source: Chan, Golub & LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances" (1979).
    """
    return reduce(_merge, parts)
