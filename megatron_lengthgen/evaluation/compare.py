"""Two runs side by side: the same samples, paired."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import write_json, write_text

from . import plot
from .report import curves, length_name, markdown_table, mean_label, show, summarise
from .ruler.tasks import ALL_TASKS
from .run_store import RunStore
from .statistics import paired_bootstrap

__all__ = ["compare", "print_comparison", "write_comparison"]

_SAME = ("seed", "data_version")
_NOTED = ("tokenizer", "essays", "words", "chat_template", "max_new_tokens", "backend", "dtype")

METHOD = (
    "Differences are between the same samples (seed, task, length, index), in points, with 95 % intervals from a "
    "paired bootstrap over samples (10,000 resamples, tasks weigh the same in a mean). An interval that is a point "
    "says that all pairs differ alike, not that the difference is known exactly."
)


def compare(
    first: RunStore, second: RunStore, note: str | None = None, train_length: int | None = None
) -> dict[str, Any]:
    """Scores of two runs on the samples that both have, and the mean difference, second minus first.

    Raises:
        UserError: when the runs have no sample in common, or were drawn with different seeds.
    """
    configs = [run.config() for run in (first, second)]
    identities = [config["identity"] for config in configs]
    for key in _SAME:
        old, new = (identity.get(key) for identity in identities)
        if old != new:
            raise UserError(
                f"the runs cannot be paired: {first.directory} has {key} = {old!r}, {second.directory} has {new!r}"
            )
    names = [
        config["info"].get("name", run.directory.name) for config, run in zip(configs, (first, second), strict=True)
    ]
    if names[0] == names[1]:
        names = [f"{name} ({run.directory.name})" for name, run in zip(names, (first, second), strict=True)]
    scopes = [config["scope"] for config in configs]
    tasks = [task for task in scopes[0]["tasks"] if task in scopes[1]["tasks"]]
    lengths = sorted(set(scopes[0]["lengths"]) & set(scopes[1]["lengths"]))
    rows: list[dict[str, Any]] = []
    differences: dict[tuple[str, int], list[float]] = {}
    other_prompts = pairs = 0
    for length in lengths:
        for task in tasks:
            a, b = first.records(task, length), second.records(task, length)
            shared = sorted(a.keys() & b.keys())
            if not shared:
                continue
            differences[task, length] = [b[i]["score"] - a[i]["score"] for i in shared]
            other_prompts += sum(a[i].get("prompt_sha256") != b[i].get("prompt_sha256") for i in shared)
            pairs += len(shared)
            scores = [[run[i]["score"] for i in shared] for run in (a, b)]
            rows.append(_row(task, length, [differences[task, length]], [sum(s) / len(s) for s in scores]))
    if not rows:
        raise UserError(
            f"{first.directory} and {second.directory} have no finished sample in common: "
            f"tasks {scopes[0]['tasks']} and {scopes[1]['tasks']}, "
            f"lengths {scopes[0]['lengths']} and {scopes[1]['lengths']}"
        )
    means = []
    for length in lengths:
        here = [row for row in rows if row["length"] == length]
        if len(tasks) > 1 and here:
            scores_here = [sum(row[key] for row in here) / len(here) / 100 for key in ("first", "second")]
            means.append(
                _row("mean", length, [differences[row["task"], length] for row in here], scores_here)
                | {"tasks": len(here), "of": len(ALL_TASKS)}
            )
    summaries = [summarise(run, train_length=train_length) for run in (first, second)]
    remarks = [
        f"{key}: {identities[0].get(key)!r} against {identities[1].get(key)!r}"
        for key in _NOTED
        if identities[0].get(key) != identities[1].get(key)
    ]
    if other_prompts:
        remarks.append(f"{other_prompts} of {pairs} pairs ask the same question in a different haystack")
    if any(not summary["complete"] for summary in summaries):
        remarks.append("at least one run is not complete; only finished pairs count")
    return {
        "benchmark": "RULER",
        "first": {"name": names[0], "directory": str(first.directory)},
        "second": {"name": names[1], "directory": str(second.directory)},
        "note": note,
        "train_length": train_length,
        "tasks": tasks,
        "lengths": lengths,
        "rows": rows,
        "means": means,
        "differing_settings": remarks,
        "method": METHOD,
        "summaries": [summary | {"name": name} for summary, name in zip(summaries, names, strict=True)],
    }


def _row(task: str, length: int, differences: list[list[float]], scores: list[float]) -> dict[str, Any]:
    mean, low, high = paired_bootstrap(differences)
    flat = [value for task_differences in differences for value in task_differences]
    return {
        "task": task,
        "length": length,
        "pairs": len(flat),
        "first": round(100 * scores[0], 2),
        "second": round(100 * scores[1], 2),
        "difference": round(100 * mean, 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "better": sum(value > 0 for value in flat),
        "worse": sum(value < 0 for value in flat),
    }


def write_comparison(result: Mapping[str, Any], output: Path) -> None:
    """Write ``compare.json``, ``compare.md`` and ``compare.png`` into ``output``."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --output {output}: {error.strerror}") from error
    runs = [curves(_only(summary, result["tasks"])) for summary in result["summaries"]]
    plot.score_vs_length(output / "compare.png", runs, train_length=result["train_length"], title="RULER")
    write_json(output / "compare.json", dict(result))
    first, second = result["first"]["name"], result["second"]["name"]
    parts = [f"# RULER: {first} and {second}"]
    if result["note"]:
        parts.append(result["note"])
    parts.append(markdown_table(_header(result), _rows(result)))
    parts.append(METHOD)
    if result["differing_settings"]:
        parts.append("The runs differ in:\n\n" + "\n".join(f"- {remark}" for remark in result["differing_settings"]))
    parts.append("![score against length](compare.png)")
    write_text(output / "compare.md", "\n\n".join(parts) + "\n")


def _only(summary: Mapping[str, Any], tasks: list[str]) -> dict[str, Any]:
    """A summary's curves for these tasks; its mean only where it is over exactly these."""
    if summary["tasks"] == tasks:
        return dict(summary)
    return {**summary, "tasks": tasks, "means": []}


def _header(result: Mapping[str, Any]) -> list[str]:
    return [
        "task",
        "length",
        "pairs",
        result["first"]["name"],
        result["second"]["name"],
        "difference",
        "better / worse",
    ]


def _rows(result: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            row["task"] if row["task"] != "mean" else mean_label({"tasks": range(row["tasks"])}),
            length_name(row["length"]),
            str(row["pairs"]),
            f"{row['first']:.1f}",
            f"{row['second']:.1f}",
            f"{row['difference']:+.1f} [{row['low']:+.1f}, {row['high']:+.1f}]",
            f"{row['better']} / {row['worse']}",
        ]
        for row in [*result["rows"], *result["means"]]
    ]


def print_comparison(result: Mapping[str, Any]) -> None:
    """Print the table."""
    show("RULER, per cent", _header(result), _rows(result))
    for remark in result["differing_settings"]:
        print(f"differs in {remark}" if ":" in remark else remark)
