"""What else could explain a gain: weight decay, sharper attention, stronger dropout."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from megatron_lengthgen.study.comparison import ACCURACY, compare, difference, estimate, mean_over_seeds
from megatron_lengthgen.study.evaluation import AttentionScale
from megatron_lengthgen.study.results import Results, Variant
from megatron_lengthgen.study.statistics import paired_differences

__all__ = ["attention_scale", "equal_strength", "weight_decay"]


def weight_decay(results: Results) -> list[dict[str, Any]]:
    """Variants that differ in weight decay only, each against the one with the largest."""
    groups: list[list[Variant]] = []
    for variant in sorted(results.variants, key=lambda v: -(v.weight_decay or 0)):
        for group in groups:
            if group[0].without_decay() == variant.without_decay():
                group.append(variant)
                break
        else:
            groups.append([variant])
    return [
        {
            "variants": [{"name": variant.name, "weight_decay": variant.weight_decay} for variant in group],
            "differences": [entry for variant in group[1:] for entry in compare(results, variant, group[0])],
        }
        for group in groups
        if len(group) > 1
    ]


def attention_scale(results: Results, base: Variant | None, target: float | None) -> list[dict[str, Any]]:
    """Accuracy with sharper and flatter attention, and what is left of a gain once both sides have their best scale."""
    if target is None:
        return []
    entries = []
    for variant in results.variants:
        found = []
        for multiple in results.multiples(variant):
            for scale in results.scales(variant):
                scores = results.scores(variant, multiple, scale=scale)
                if scores:
                    found.append({"multiple": multiple, "scale": scale, **estimate(scores, ACCURACY)})
        best = _best_scale(results, variant, target)
        if len(results.scales(variant)) < 2 or best is None:
            continue
        entry: dict[str, Any] = {
            "variant": variant.name,
            "multiple": target,
            "best_scale": best,
            "sharpening": difference(results.scores(variant, target, scale=best), results.scores(variant, target)),
            "scales": found,
        }
        base_best = _best_scale(results, base, target) if base else None
        if base and base.name != variant.name and base_best is not None:
            sharp = results.scores(base, target, scale=base_best)
            entry |= {
                "gain": difference(results.scores(variant, target), results.scores(base, target)),
                "gain_over_sharpened": difference(results.scores(variant, target), sharp),
                "gain_both_at_best": difference(results.scores(variant, target, scale=best), sharp),
            }
        entries.append(entry)
    return entries


def _best_scale(results: Results, variant: Variant, multiple: float) -> AttentionScale | None:
    """Scale with the highest mean accuracy; of equal ones the number that is nearest to 1."""
    means = {scale: results.scores(variant, multiple, scale=scale) for scale in results.scales(variant)}
    return max(
        (scale for scale, scores in means.items() if scores),
        key=lambda scale: (round(mean_over_seeds(means[scale]), 9), -_distance(scale)),
        default=None,
    )


def _distance(scale: AttentionScale) -> float:
    return math.inf if isinstance(scale, str) else abs(math.log(scale))


def equal_strength(results: Results, target: float | None) -> dict[str, Any]:
    """Families whose p was swept, and each of their variants beside the nearest one of a later placement.

    Nearest in loss at the training length, in evaluation: dropout that costs the same there is of equal strength.
    """
    families: list[list[Variant]] = []
    for variant in results.variants:
        for family in families:
            first = family[0]
            if (first.placement, first.options, first.context) == (variant.placement, variant.options, variant.context):
                family.append(variant)
                break
        else:
            families.append([variant])
    swept = [family for family in families if family[0].placement != "none"]
    if target is None or all(len(family) == 1 for family in swept):
        return {"points": [], "matches": []}
    points = []
    for variant in itertools.chain(*families):
        near, far = results.scores(variant, 1), results.scores(variant, target)
        if near and far:
            points.append(
                {
                    "variant": variant.name,
                    "multiple": target,
                    "loss": mean_over_seeds(results.scores(variant, 1, of="loss")),
                    "near": estimate(near, ACCURACY),
                    "far": estimate(far, ACCURACY),
                }
            )
    matches = []
    for lower, upper in itertools.permutations(swept, 2):
        if lower[0].rank >= upper[0].rank or lower[0].context != upper[0].context:
            continue
        for variant in lower:
            match = _nearest(results, variant, upper)
            if match:
                other, loss = match
                change = difference(results.scores(other, target), results.scores(variant, target))
                cost = difference(results.scores(other, 1), results.scores(variant, 1))
                if change and cost:
                    pair = {"variant": other.name, "against": variant.name, "multiple": target}
                    matches.append({**pair, "loss": loss, "near": cost, "far": change})
    return {"points": points, "matches": matches}


def _nearest(results: Results, variant: Variant, among: Sequence[Variant]) -> tuple[Variant, float] | None:
    """The one of ``among`` with the nearest loss at the training length over shared seeds, and how much it is above."""
    own = results.scores(variant, 1, of="loss")
    gaps = [(other, mean_over_seeds(paired_differences(results.scores(other, 1, of="loss"), own))) for other in among]
    return min((gap for gap in gaps if math.isfinite(gap[1])), key=lambda gap: abs(gap[1]), default=None)
