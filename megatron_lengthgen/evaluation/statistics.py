"""Intervals for scores."""

import math
from collections.abc import Sequence

import numpy as np

__all__ = ["mean_interval", "paired_bootstrap", "wilson"]

_Z = 1.959963984540054  # the 97.5 % point of the normal distribution


def wilson(mean: float, count: int) -> tuple[float, float]:
    """95 % Wilson score interval of the mean of ``count`` scores in [0, 1].

    Exact in form for scores that are 0 or 1. A fractional score varies less than such a score with the same mean
    (its variance is at most m(1 - m)), so for tasks with several references the interval is on the wide side.
    Unlike a bootstrap it does not shrink to a point when every sample scored the same.

    Raises:
        ValueError: when ``count`` is not positive or ``mean`` is outside [0, 1].
    """
    if count < 1:
        raise ValueError(f"count must be positive, got {count}")
    if not 0.0 <= mean <= 1.0:
        raise ValueError(f"mean must be in [0, 1], got {mean}")
    square = _Z * _Z
    centre = (mean + square / (2 * count)) / (1 + square / count)
    half = _Z * math.sqrt(mean * (1 - mean) / count + square / (4 * count * count)) / (1 + square / count)
    # The formula gives the end points 0 and 1 only up to rounding.
    low = 0.0 if mean == 0.0 else max(0.0, centre - half)
    high = 1.0 if mean == 1.0 else min(1.0, centre + half)
    return low, high


def mean_interval(
    parts: Sequence[tuple[float, float, float]], top: float = 1.0, weights: Sequence[float] | None = None
) -> tuple[float, float, float]:
    """Mean of independent estimates in [0, top] with a 95 % interval, from each one's ``(mean, low, high)``.

    The method of variance estimates recovery (Zou and Donner, Statistics in Medicine 27, 2008): distances to the ends
    add in squares.

    Args:
        weights: of the estimates; None where all weigh the same.
    """
    if not parts:
        raise ValueError("no estimates to average")
    weights = [1.0] * len(parts) if weights is None else weights
    total = sum(weights)
    shares = [weight / total for weight in weights]
    mean = sum(w * m for w, (m, _, _) in zip(shares, parts, strict=True))
    below = math.sqrt(sum((w * (m - low)) ** 2 for w, (m, low, _) in zip(shares, parts, strict=True)))
    above = math.sqrt(sum((w * (high - m)) ** 2 for w, (m, _, high) in zip(shares, parts, strict=True)))
    return mean, max(0.0, mean - below), min(top, mean + above)


def paired_bootstrap(
    differences: Sequence[Sequence[float]],
    resamples: int = 10_000,
    seed: int = 0,
    weights: Sequence[float] | None = None,
) -> tuple[float, float, float]:
    """Mean difference over tasks with a 95 % percentile bootstrap interval.

    Args:
        differences: for each task, the differences of paired samples. Samples are drawn with replacement within their
            task.
        weights: of the tasks; None where all weigh the same.

    Returns:
        ``(mean, low, high)``. The interval is a point when all differences of every task are equal.
    """
    if not differences or not all(len(task) for task in differences):
        raise ValueError("every task needs at least one pair")
    weights = [1.0] * len(differences) if weights is None else weights
    total = sum(weights)
    rng = np.random.default_rng(seed)
    means = np.zeros(resamples)
    for task, weight in zip(differences, weights, strict=True):
        values = np.asarray(task, dtype=np.float64)
        # In blocks: resamples x samples indices at once would take gigabytes for large runs.
        for start in range(0, resamples, 1000):
            block = rng.integers(0, len(values), size=(min(1000, resamples - start), len(values)))
            means[start : start + len(block)] += weight * values[block].mean(axis=1)
    means /= total
    mean = sum(w * float(np.mean(task)) for w, task in zip(weights, differences, strict=True)) / total
    low, high = np.quantile(means, [0.025, 0.975])
    return mean, float(low), float(high)
