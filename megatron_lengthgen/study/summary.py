"""What the cells of a study say, as plain data: estimates, paired differences and the statements that follow."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from megatron_lengthgen.choices import check_choice
from megatron_lengthgen.study import controls, tasks
from megatron_lengthgen.study.comparison import ACCURACY, compare, difference, estimate, mean_over_seeds
from megatron_lengthgen.study.results import PLACEMENTS, Results, Variant
from megatron_lengthgen.study.statistics import paired_differences

__all__ = ["summarise"]

_CLAIMED_MULTIPLE = 32


def summarise(
    cells: Sequence[Mapping[str, Any]],
    *,
    baseline: str | None = None,
    expected: Iterable[tuple[str, int]] = (),
) -> dict[str, Any]:
    """All numbers of the report, as values that JSON takes (NaN becomes None).

    Args:
        cells: Results of finished cells.
        baseline: Variant that every other is compared with; None takes the variant without dropout in whose settings
            most others were run.
        expected: ``(variant, seed)`` of all cells of the study, so that missing ones are named; cells that are
            missing in the square of what was found are named in any case.

    Raises:
        UserError: see :class:`Results`; a baseline that is no variant.
    """
    results = Results(cells)
    reached = [variant for variant in results.variants if results.multiples(variant)]
    common = set.intersection(*(set(results.multiples(v)) for v in reached)) if reached else set()
    target = max((m for m in common if m <= _CLAIMED_MULTIPLE), default=min(common, default=None))
    base = _baseline(results, baseline)
    wanted = [*expected, *itertools.product((v.name for v in results.variants), results.seeds)]
    missing = [list(key) for key in dict.fromkeys(wanted) if key not in results.cells]
    return _plain(
        {
            "task": results.task,
            "training_length": results.training_length,
            "phase1_steps": sorted({(cell.get("phase1") or {}).get("steps", 0) for cell in results.cells.values()}),
            "last_step": results.last_step,
            "seeds": results.seeds,
            "target_multiple": target,
            "multiples": sorted({m for variant in results.variants for m in results.multiples(variant)}),
            "baseline": base.name if base else None,
            "missing": missing,
            "notes": _notes(results, target),
            "variants": [_describe(results, variant) for variant in results.variants],
            "panels": _panels(results),
            "order": [_order(results, ladder, target) for ladder in _ladders(results)],
            "accuracy": _by_length(results, "accuracy", ACCURACY),
            "error": _by_length(results, "error", (0.0, _largest_error(results))) if _counts(results) else [],
            "differences": _differences(results, base),
            "training": _training(results),
            "training_loss": _logged_losses(results),
            "decline": _decline(results, target),
            "weight_decay": controls.weight_decay(results),
            "attention_scale": controls.attention_scale(results, base, target),
            "equal_strength": controls.equal_strength(results, target),
        }
    )


def _baseline(results: Results, name: str | None) -> Variant | None:
    if name is not None:
        check_choice("baseline", name, [variant.name for variant in results.variants])
        return next(variant for variant in results.variants if variant.name == name)
    without = [variant for variant in results.variants if variant.placement == "none"]
    return max(without, key=lambda v: sum(v.is_below(other) for other in results.variants), default=None)


def _counts(results: Results) -> bool:
    """Do neighbouring answers stand for neighbouring numbers, so that a distance between them means something?"""
    return results.task.get("name") == tasks.Counting.name


def _largest_error(results: Results) -> float:
    return float(len(tasks.from_mapping(results.task).candidates) - 1)


def _notes(results: Results, target: float | None) -> list[str]:
    notes = []
    if len(results.seeds) == 1:
        notes.append(
            "There is one seed. Its intervals are over its sequences alone and say nothing about other seeds, which "
            "scatter far more."
        )
    elif len(results.seeds) < 5:
        notes.append(f"With {len(results.seeds)} seeds the intervals are wide, as they have to be.")
    if target is None:
        notes.append("No length was evaluated for all variants: there is no common length to compare them at.")
    elif target <= 1:
        notes.append("No common length beyond the training length was evaluated: nothing is said about length.")
    for (variant, seed), cell in results.cells.items():
        if not any(entry["step"] == results.last_step for entry in cell["evaluations"]):
            notes.append(f"{variant}-seed{seed} was not evaluated at step {results.last_step} and is left out there.")
        losses = [loss for entry in cell["evaluations"] for loss in entry["loss"]]
        if not all(map(math.isfinite, losses)):
            notes.append(f"{variant}-seed{seed} has losses that are no finite numbers.")
    return notes


def _describe(results: Results, variant: Variant) -> dict[str, Any]:
    family, context = _labels(results, variant)
    return {
        "name": variant.name,
        "placement": variant.placement,
        "p": variant.p,
        "family": family,
        "context": context,
        "settings": {**variant.options, **variant.context},
        "seeds": [seed for name, seed in results.cells if name == variant.name],
    }


def _labels(results: Results, variant: Variant) -> tuple[str, str]:
    """What distinguishes the variant's dropout, p apart, and its other settings, from those of other variants."""
    kin = [other for other in results.variants if other.placement == variant.placement]
    parts = [PLACEMENTS[variant.placement]]
    for key, value in variant.options.items():
        if any(other.options.get(key) != value for other in kin):
            text = ", ".join(value) if isinstance(value, list) else str(value)
            parts.append(f"{text} fill" if key == "fill" else f"{key} {text}")
    differing = [
        f"{key.replace('_', ' ')} {value}"
        for key, value in variant.context.items()
        if key == "weight_decay" or any(other.context.get(key) != value for other in results.variants)
    ]
    return ", ".join(parts), ", ".join(differing)


def _settings_label(results: Results, variant: Variant) -> str:
    """What a variant's placement is compared at."""
    context = _labels(results, variant)[1]
    return ", ".join(filter(None, (context, "" if variant.p is None else f"p = {variant.p:g}")))


def _panels(results: Results) -> list[dict[str, Any]]:
    """Variants that belong into one picture: the same settings but for the placement and its options, the same p.

    The variant without dropout is in each panel of its settings; one that is alone in its settings joins all panels.
    """
    groups: list[tuple[dict[str, Any], float | None, list[Variant]]] = []
    for variant in results.variants:
        if variant.placement != "none":
            for context, p, members in groups:
                if (context, p) == (variant.context, variant.p):
                    members.append(variant)
                    break
            else:
                groups.append((variant.context, variant.p, [variant]))
    alone = [v for v in results.variants if v.placement == "none" and all(v.context != c for c, _, _ in groups)]
    if not groups:
        return [{"title": "", "variants": [variant.name for variant in alone]}]
    panels = []
    for context, _, members in groups:
        without = [v for v in results.variants if v.placement == "none" and v.context == context]
        panels.append(
            {"title": _settings_label(results, members[0]), "variants": [v.name for v in [*without, *members, *alone]]}
        )
    return panels


def _ladders(results: Results) -> list[list[Variant]]:
    """Chains of variants that differ in placement only, in the claimed order, each as long as it can be."""
    ladders: list[list[Variant]] = []
    for top in sorted(results.variants, key=lambda variant: -variant.rank):
        if top.placement == "none" or any(top in ladder for ladder in ladders):
            continue
        below = [variant for variant in results.variants if variant.is_below(top)]
        # One of each placement; where an option leaves several, the first of the study.
        rungs = [next((v for v in below if v.placement == name), None) for name in PLACEMENTS]
        ladder = [*(rung for rung in rungs if rung), top]
        if len(ladder) > 1:
            ladders.append(ladder)
    return sorted(ladders, key=len, reverse=True)


def _order(results: Results, ladder: list[Variant], target: float | None) -> dict[str, Any]:
    """Is mean accuracy at the target length ordered as claimed, over the seeds that all rungs have?"""
    absent = [PLACEMENTS[name] for name in PLACEMENTS if all(variant.placement != name for variant in ladder)]
    entry: dict[str, Any] = {
        "variants": [variant.name for variant in ladder],
        "settings": _settings_label(results, ladder[-1]),
        "multiple": target,
        "absent_placements": absent,
        "seeds": [],
        "holds": None,
    }
    scores = [{} if target is None else results.scores(variant, target) for variant in ladder]
    seeds = sorted(set.intersection(*(set(found) for found in scores)))
    names = [PLACEMENTS[variant.placement] for variant in ladder]
    claim = " < ".join(names)
    if not seeds:
        return entry | {"statement": f"Not tested: {claim} have no seed with a common length."}
    scores = [{seed: found[seed] for seed in seeds} for found in scores]
    means = [float(np.mean([values.mean() for values in found.values()])) for found in scores]
    steps = [difference(upper, lower) for lower, upper in itertools.pairwise(scores)]
    rises = [step["mean"] > 0 for step in steps if step]
    in_order = sum(all(step["seeds"][str(seed)] > 0 for step in steps if step) for seed in seeds)
    where = f"at {target:g}x the training length, mean over {len(seeds)} seed{'s' * (len(seeds) > 1)}"
    values = ", ".join(f"{name} {mean:.3f}" for name, mean in zip(names, means, strict=True))
    pairs = [f"{upper} over {lower}" for lower, upper in itertools.pairwise(names)]
    if all(rises):
        sure = [pair for pair, step in zip(pairs, steps, strict=True) if step and step["excludes_zero"]]
        text = (
            f"Found: accuracy is ordered {claim} {where} ({values}); the whole order holds in {in_order} of "
            f"{len(seeds)}. The 95 % interval of the difference excludes 0 for {_listed(sure) or 'none of the steps'}"
            f"{' (within this one seed)' * (len(seeds) == 1)}."
        )
    else:
        wrong = [pair for pair, rise in zip(pairs, rises, strict=True) if not rise]
        text = f"Not found: accuracy is not ordered {claim} {where} ({values}). No gain of {_listed(wrong)}."
    if absent:
        text += f" The order is incomplete: no {' and no '.join(absent)} at these settings."
    return entry | {
        "seeds": seeds,
        "means": dict(zip(entry["variants"], means, strict=True)),
        "steps": steps,
        "seeds_in_order": in_order,
        "holds": all(rises),
        "statement": text,
    }


def _listed(items: Sequence[str]) -> str:
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def _by_length(results: Results, of: str, bounds: tuple[float, float]) -> list[dict[str, Any]]:
    return [
        {"variant": variant.name, "multiple": multiple, **estimate(results.scores(variant, multiple, of=of), bounds)}
        for variant in results.variants
        for multiple in results.multiples(variant)
        if results.scores(variant, multiple, of=of)
    ]


def _differences(results: Results, base: Variant | None) -> dict[str, Any]:
    """Against the baseline, and between neighbours in the claimed order."""
    others = [variant for variant in results.variants if base and variant.name != base.name]
    neighbours = {
        (upper.name, lower.name): compare(results, upper, lower)
        for ladder in _ladders(results)
        for lower, upper in itertools.pairwise(ladder)
    }
    return {
        "baseline": [entry for variant in others if base for entry in compare(results, variant, base)],
        "neighbours": list(itertools.chain(*neighbours.values())),
    }


def _training(results: Results) -> list[dict[str, Any]]:
    """Accuracy at each length and both losses along the second phase."""
    entries = []
    for variant in results.variants:
        before = -math.inf
        for step in results.steps(variant):
            accuracy = []
            for multiple in results.multiples(variant):
                scores = results.scores(variant, multiple, step=step)
                if scores:
                    accuracy.append({"multiple": multiple, **estimate(scores, ACCURACY)})
            entries.append(
                {
                    "variant": variant.name,
                    "step": step,
                    "loss": mean_over_seeds(results.scores(variant, 1, step=step, of="loss")),
                    "training_loss": _training_loss(results, variant, before, step),
                    "accuracy": accuracy,
                }
            )
            before = step
    return entries


def _training_loss(results: Results, variant: Variant, after: float, until: int) -> float:
    """Mean over seeds of the logged training losses in ``(after, until]``."""
    means = []
    for (name, _), cell in results.cells.items():
        logged = [
            loss for step, loss in cell.get("training_loss", ()) if name == variant.name and after < step <= until
        ]
        if logged:
            means.append(np.mean(logged))
    return float(np.mean(means)) if means else math.nan


def _logged_losses(results: Results) -> list[dict[str, Any]]:
    """Training loss as it was logged, mean over seeds."""
    found: dict[tuple[str, int], list[float]] = {}
    for (variant, _), cell in results.cells.items():
        for step, loss in cell.get("training_loss", ()):
            found.setdefault((variant, step), []).append(loss)
    return [
        {"variant": variant, "step": step, "loss": float(np.mean(losses))}
        for (variant, step), losses in sorted(found.items())
    ]


def _decline(results: Results, target: float | None) -> list[dict[str, Any]]:
    """From the start and from the best point of the second phase to its end: accuracy at length, loss at 1x."""
    if target is None:
        return []
    entries = []
    for variant in results.variants:
        accuracy = {step: results.scores(variant, target, step=step) for step in results.steps(variant)}
        accuracy = {step: scores for step, scores in accuracy.items() if scores}
        if len(accuracy) < 2:
            continue
        first, last = min(accuracy), max(accuracy)
        best = max(accuracy, key=lambda step: mean_over_seeds(accuracy[step]))
        loss = {step: results.scores(variant, 1, step=step, of="loss") for step in (first, best, last)}
        entry: dict[str, Any] = {
            "variant": variant.name,
            "multiple": target,
            "first": first,
            "best": best,
            "last": last,
        }
        for name, start in (("since_first", first), ("since_best", best)):
            change = None if start == last else difference(accuracy[last], accuracy[start])
            falls = change is not None and change["excludes_zero"] and change["mean"] < 0
            gain = mean_over_seeds(paired_differences(loss[last], loss[start]))
            entry[name] = {
                "accuracy": change,
                "loss": gain,
                "declines_while_loss_improves": bool(falls and gain < 0),
            }
        entries.append(entry)
    return entries


def _plain(value: Any) -> Any:
    """Python's own types; numbers that JSON has no word for become None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
