"""Estimates over seeds and sequences, and differences of variants on the same ones, as plain data."""

import math
from typing import Any

import numpy as np

from megatron_lengthgen.study.results import Results, Scores, Variant
from megatron_lengthgen.study.statistics import clustered_interval, paired_differences

__all__ = ["ACCURACY", "compare", "difference", "estimate", "mean_over_seeds"]

#: The smallest and the largest accuracy.
ACCURACY = (0.0, 1.0)


def estimate(scores: Scores, bounds: tuple[float, float]) -> dict[str, Any]:
    """Mean over seeds with its interval, and the means of the seeds; ``bounds`` as in :func:`clustered_interval`."""
    mean, low, high = clustered_interval(list(scores.values()), bounds)
    return {
        "mean": mean,
        "low": low,
        "high": high,
        "seeds": {str(seed): values.mean() for seed, values in scores.items()},
        "sequences": sum(map(len, scores.values())),
        "within_seed_only": len(scores) == 1,
    }


def difference(upper: Scores, lower: Scores, size: float = 1.0) -> dict[str, Any] | None:
    """``upper - lower``, paired; None where they have no seed in common. ``size``: the largest difference."""
    pairs = paired_differences(upper, lower)
    if not pairs:
        return None
    found = estimate(pairs, (-size, size))
    # Sums of the same numbers in another order differ in the last digit: that is a tie.
    found["mean"] = round(found["mean"], 9)
    found["seeds"] = {seed: round(value, 9) for seed, value in found["seeds"].items()}
    signs = [np.sign(value) for value in found["seeds"].values()]
    counts = {"above": signs.count(1), "below": signs.count(-1), "ties": signs.count(0)}
    return found | counts | {"excludes_zero": found["low"] > 0 or found["high"] < 0}


def compare(results: Results, upper: Variant, lower: Variant) -> list[dict[str, Any]]:
    """Differences of accuracy at every length that both have."""
    entries = []
    for multiple in results.multiples(upper):
        found = difference(results.scores(upper, multiple), results.scores(lower, multiple))
        if found:
            entries.append({"variant": upper.name, "against": lower.name, "multiple": multiple, **found})
    return entries


def mean_over_seeds(scores: Scores) -> float:
    """Mean over seeds, which weigh the same; NaN without any."""
    return float(np.mean([values.mean() for values in scores.values()])) if scores else math.nan
