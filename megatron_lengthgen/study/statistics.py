"""Intervals for scores that come in clusters: sequences within seeds."""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

__all__ = ["Interval", "clustered_interval", "paired_differences"]

_RESAMPLES = 4000
_TAIL = 0.025
_Z = 1.959963984540054  # the 97.5 % point of the normal distribution


class Interval(NamedTuple):
    """A mean and its 95 % interval."""

    mean: float
    low: float
    high: float


def clustered_interval(clusters: Sequence[np.ndarray], bounds: tuple[float, float]) -> Interval:
    r"""Mean over clusters, which weigh the same, with a 95 % interval from a bootstrap on two levels.

    A resample draws :math:`n` of the :math:`n` clusters with replacement and, within each drawn one, as many values as
    it has. Percentiles of such means fall short when clusters are few: they cannot leave the range of the clusters'
    means, which for three clusters holds the true mean in three of four studies. So the distances of the percentiles
    from the mean are stretched by

    .. math:: \frac{t_{n-1}}{z} \sqrt{\frac{n}{n-1}}

    with the 97.5 % points of Student's and of the normal distribution and the bootstrap's own bias in the variance of
    a mean (Hesterberg, "What Teachers Should Know About the Bootstrap", The American Statistician 69, 2015). The
    factor is 2.7 for three clusters and 1.3 for eight. A single cluster is not stretched: its interval is for that
    cluster alone and says nothing about others.

    Values that are all equal tell nothing about their spread, and a bootstrap would give a point. The interval then
    reaches as far as :math:`N` values that agree leave open: another value may have a probability of up to
    :math:`1 - 0.025^{1/N}` (Clopper and Pearson, Biometrika 26, 1934), and may lie at either bound.

    Args:
        clusters: Values ``[count]`` of each cluster; counts may differ.
        bounds: The smallest and the largest possible value; the interval is cut there.

    Raises:
        ValueError: no cluster, or one without values.
    """
    if not clusters or not all(len(values) for values in clusters):
        raise ValueError("every cluster needs at least one value")
    counts = tuple(len(values) for values in clusters)
    flat = np.concatenate(clusters).astype(np.float64)
    mean = float(np.mean([np.mean(values) for values in clusters]))
    if np.ptp(flat) == 0:
        unseen = 1 - _TAIL ** (1 / len(flat))
        low, high = mean - unseen * (mean - bounds[0]), mean + unseen * (bounds[1] - mean)
    else:
        ends = np.quantile(_resampling_weights(counts) @ flat, [_TAIL, 1 - _TAIL])
        low, high = (mean + _stretch(len(clusters)) * (float(end) - mean) for end in ends)
    return Interval(mean, max(low, bounds[0]), min(high, bounds[1]))


def _stretch(clusters: int) -> float:
    if clusters == 1:
        return 1.0
    from scipy.special import stdtrit

    return float(stdtrit(clusters - 1, 1 - _TAIL)) / _Z * (clusters / (clusters - 1)) ** 0.5


@functools.lru_cache(maxsize=4)
def _resampling_weights(counts: tuple[int, ...]) -> np.ndarray:
    """Weights ``[resamples, values]`` whose products with the values are the means of resamples.

    They depend on the counts alone, so that all intervals of a study come from the same resamples.
    """
    random = np.random.default_rng(0)
    clusters = len(counts)
    drawn = random.multinomial(clusters, np.full(clusters, 1 / clusters), size=_RESAMPLES)
    return np.concatenate(
        [
            random.multinomial(drawn[:, place] * count, np.full(count, 1 / count)) / (clusters * count)
            for place, count in enumerate(counts)
        ],
        axis=1,
    )


def paired_differences(upper: Mapping[int, np.ndarray], lower: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """``upper - lower`` of the same sequences, by seed, for the seeds that both have.

    Where one has fewer sequences they are the first of the other's.

    Args:
        upper, lower: By seed, values ``[sequences]``.
    """
    pairs = {seed: (upper[seed], lower[seed]) for seed in sorted(upper.keys() & lower.keys())}
    return {seed: a[: len(b)] - b[: len(a)] for seed, (a, b) in pairs.items()}
