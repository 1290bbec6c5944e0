"""Runs side by side: the same samples, paired with those of the first run."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import write_json, write_text

from . import plot
from .benchmark import find_benchmark
from .lengths import length_name
from .report import curves, markdown_table, show, summarise
from .run_store import RunStore, expected_samples
from .statistics import paired_bootstrap

__all__ = ["COMPARISON_FILES", "compare", "print_comparison", "write_comparison"]

COMPARISON_FILES = ("compare.md", "compare.json", "compare.png")

_SAME = ("benchmark", "seed", "data_version")

METHOD = (
    "Differences are between the same samples (seed, task, length, index), in points, with 95 % intervals from a "
    "paired bootstrap over samples (10,000 resamples, tasks weigh the same in a mean). An interval that is a point "
    "says that all pairs differ alike, not that the difference is known exactly. Each interval stands for itself: of "
    "many, one in twenty misses."
)


def compare(runs: Sequence[RunStore], note: str | None = None, train_length: int | None = None) -> dict[str, Any]:
    """Each later run against the first, on the samples that both have: scores, and mean differences, later minus first.

    Args:
        runs: two or more; the first is the baseline.
        train_length: None for the one that all runs were started with, where they agree.

    Raises:
        UserError: when a run has no sample in common with the first, was drawn with another seed, or is given twice.
    """
    if len(runs) < 2:
        raise UserError("compare takes two or more runs")
    places = [run.directory.resolve() for run in runs]
    if repeated := [place for place in places if places.count(place) > 1]:
        raise UserError(f"{repeated[0]} is given twice; compare takes different runs")
    summaries = [summarise(run, train_length=train_length) for run in runs]
    names = _names(runs, [summary["name"] for summary in summaries])
    results = [_pair(runs[0], run) | {"name": name} for run, name in zip(runs[1:], names[1:], strict=True)]
    train_lengths = {summary["train_length"] for summary in summaries}
    return {
        "benchmark": summaries[0]["benchmark"],
        "runs": [{"name": name, "directory": str(run.directory)} for name, run in zip(names, runs, strict=True)],
        "baseline": names[0],
        "note": note,
        "train_length": train_lengths.pop() if len(train_lengths) == 1 else None,
        "comparisons": results,
        "method": METHOD,
        "summaries": [summary | {"name": name} for summary, name in zip(summaries, names, strict=True)],
    }


def _names(runs: Sequence[RunStore], names: Sequence[str]) -> list[str]:
    """Names that tell the runs apart: with the directory where a name alone does not."""
    for tell in (lambda run: run.directory.name, lambda run: str(run.directory)):
        if len(set(names)) == len(names):
            break
        names = [
            f"{name} ({tell(run)})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
        ]
    return list(names)


def _pair(first: RunStore, second: RunStore) -> dict[str, Any]:
    configs = [run.config() for run in (first, second)]
    old, new = (config["identity"] for config in configs)
    for key in _SAME:
        if old.get(key) != new.get(key):
            raise UserError(
                f"the runs cannot be paired: {first.directory} has {key} = {old.get(key)!r}, "
                f"{second.directory} has {new.get(key)!r}"
            )
    scopes = [config["scope"] for config in configs]
    tasks = [task for task in scopes[0]["tasks"] if task in scopes[1]["tasks"]]
    lengths = sorted(set(scopes[0]["lengths"]) & set(scopes[1]["lengths"]))
    benchmark = find_benchmark(old.get("benchmark"))
    rows: list[dict[str, Any]] = []
    means: list[dict[str, Any]] = []
    other_prompts = pairs = unfinished = 0
    for length in lengths:
        here: list[dict[str, Any]] = []
        differences: list[list[float]] = []
        groups: list[list[Any]] = []
        for task in tasks:
            a, b = first.records(task, length), second.records(task, length)
            unfinished += any(
                expected_samples(scope, task, length) > len(found) for scope, found in zip(scopes, (a, b), strict=True)
            )
            shared = sorted(a.keys() & b.keys())
            if not shared:
                continue
            other_prompts += sum(a[i].get("prompt_sha256") != b[i].get("prompt_sha256") for i in shared)
            pairs += len(shared)
            differences.append([b[i]["score"] - a[i]["score"] for i in shared])
            groups.append([a[i].get("group") or i for i in shared])
            scores = [sum(run[i]["score"] for i in shared) / len(shared) for run in (a, b)]
            here.append(_row(task, length, differences[-1:], groups[-1:], scores))
        if len(tasks) > 1 and here:
            present = [row["task"] for row in here]
            weights = benchmark.weights(present)
            scores = [
                sum(w * row[key] for w, row in zip(weights, here, strict=True)) / 100 for key in ("baseline", "score")
            ]
            counts = {
                "label": benchmark.mean_label(present),
                "tasks": len(benchmark.groups(present)),
                "of": benchmark.of,
            }
            if counts["tasks"]:
                means.append(_row("mean", length, differences, groups, scores, weights) | counts)
        rows += here
    if not rows:
        raise UserError(
            f"{first.directory} and {second.directory} have no finished sample in common: "
            f"tasks {scopes[0]['tasks']} and {scopes[1]['tasks']}, "
            f"lengths {scopes[0]['lengths']} and {scopes[1]['lengths']}"
        )
    remarks = [
        f"{key}: {old.get(key)!r} against {new.get(key)!r}"
        for key in dict.fromkeys((*old, *new))
        if key != "model" and old.get(key) != new.get(key)
    ]
    if other_prompts:
        remarks.append(f"{other_prompts} of {pairs} pairs ask the same question in a different haystack")
    if unfinished:
        remarks.append("at least one run is not complete; only finished pairs count")
    return {
        "directory": str(second.directory),
        "tasks": tasks,
        "lengths": lengths,
        "rows": rows,
        "means": means,
        "differing_settings": remarks,
    }


def _row(
    task: str,
    length: int,
    differences: Sequence[Sequence[float]],
    groups: Sequence[Sequence[Any]],
    scores: Sequence[float],
    weights: Sequence[float] | None = None,
) -> dict[str, Any]:
    weights = [1.0] * len(differences) if weights is None else weights
    counted = [at for at, weight in enumerate(weights) if weight]
    differences = [differences[at] for at in counted]
    together = [_together(values, groups[at]) for values, at in zip(differences, counted, strict=True)]
    mean, low, high = paired_bootstrap(together, weights=[weights[at] for at in counted])
    flat = [value for task_differences in differences for value in task_differences]
    return {
        "task": task,
        "length": length,
        "pairs": len(flat),
        "baseline": round(100 * scores[0], 2),
        "score": round(100 * scores[1], 2),
        "difference": round(100 * mean, 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "better": sum(value > 0 for value in flat),
        "worse": sum(value < 0 for value in flat),
    }


def _together(differences: Sequence[float], groups: Sequence[Any]) -> list[float]:
    """One difference for each question, the mean of those that it was asked with at several depths."""
    found: dict[Any, list[float]] = {}
    for value, group in zip(differences, groups, strict=True):
        found.setdefault(group, []).append(value)
    return [sum(values) / len(values) for values in found.values()]


def write_comparison(result: Mapping[str, Any], output: Path) -> None:
    """Write ``COMPARISON_FILES`` into ``output``.

    Raises:
        UserError: when that is not possible.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        _write(result, output)
    except OSError as error:
        raise UserError(f"cannot write to --output {output}: {error.strerror or error}") from error


def _write(result: Mapping[str, Any], output: Path) -> None:
    tasks = [
        task
        for task in result["summaries"][0]["tasks"]
        if all(task in comparison["tasks"] for comparison in result["comparisons"])
    ]
    # Where the runs have no task in common, all that one of them has.
    runs = [curves(_only(summary, tasks)) if tasks else curves(summary) for summary in result["summaries"]]
    plot.score_vs_length(output / "compare.png", runs, train_length=result["train_length"], title=result["benchmark"])
    write_json(output / "compare.json", dict(result))
    parts = [f"# {result['benchmark']}: {', '.join(run['name'] for run in result['runs'])}"]
    if result["note"]:
        parts.append(result["note"])
    for comparison in result["comparisons"]:
        if len(result["comparisons"]) > 1:
            parts.append(f"## {comparison['name']} against {result['baseline']}")
        parts.append(markdown_table(_header(result, comparison), _rows(comparison)))
        if comparison["differing_settings"]:
            remarks = "\n".join(f"- {remark}" for remark in comparison["differing_settings"])
            parts.append(f"The runs differ in:\n\n{remarks}")
    parts += [METHOD, "![score against length](compare.png)"]
    write_text(output / "compare.md", "\n\n".join(parts) + "\n")


def _only(summary: Mapping[str, Any], tasks: list[str]) -> dict[str, Any]:
    """A summary's curves for these tasks; its mean only where it is over exactly these."""
    if set(summary["tasks"]) == set(tasks):
        return dict(summary)
    return {**summary, "tasks": tasks, "means": [], "over": 0}


def _header(result: Mapping[str, Any], comparison: Mapping[str, Any]) -> list[str]:
    return ["task", "length", "pairs", result["baseline"], comparison["name"], "difference", "better / worse"]


def _rows(comparison: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            row.get("label", row["task"]),
            length_name(row["length"]),
            str(row["pairs"]),
            f"{row['baseline']:.1f}",
            f"{row['score']:.1f}",
            f"{row['difference']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]",
            f"{row['better']} / {row['worse']}",
        ]
        for row in [*comparison["means"], *comparison["rows"]]
    ]


def print_comparison(result: Mapping[str, Any]) -> None:
    """Print one table for each run after the first."""
    for comparison in result["comparisons"]:
        show(f"{result['benchmark']}, per cent", _header(result, comparison), _rows(comparison))
        for remark in comparison["differing_settings"]:
            print(f"differs in {remark}" if ":" in remark else remark)
