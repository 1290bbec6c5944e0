"""What a run found: scores with intervals as JSON, Markdown, a picture and a table on the terminal."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.files import write_json, write_text

from . import plot
from .ruler.tasks import ALL_TASKS
from .run_store import RunStore
from .statistics import mean_interval, wilson

__all__ = [
    "INTERVAL_NOTE",
    "describe_cell",
    "length_name",
    "markdown_table",
    "print_table",
    "summarise",
    "write_report",
]

INTERVAL_NOTE = (
    "Scores are RULER's, in per cent. In brackets 95 % intervals: Wilson's for one task, "
    "their combination by squared distances (MOVER) for a mean over tasks."
)


def length_name(length: int) -> str:
    """``8192`` as ``8K``; other numbers as they are."""
    return f"{length // 1024}K" if length % 1024 == 0 else str(length)


def describe_cell(task: str, length: int, records: Mapping[int, Mapping[str, Any]], expected: int) -> dict[str, Any]:
    """Score, interval and counts of one task at one length; score and interval are None without samples."""
    wanted = [records[index] for index in range(expected) if index in records]
    count = len(wanted)
    cell: dict[str, Any] = {"task": task, "length": length, "samples": count, "expected": expected}
    if not count:
        return cell | {"score": None, "low": None, "high": None}
    mean = sum(record["score"] for record in wanted) / count
    low, high = wilson(mean, count)

    def average(field: str) -> float:
        return round(sum(record[field] for record in wanted) / count, 2)

    return cell | {
        "score": round(100 * mean, 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "empty": sum(not record["pred"].strip() for record in wanted),
        "stopped_by_limit": sum(record["finish"] == "length" for record in wanted),
        "mean_prompt_tokens": average("prompt_tokens"),
        "mean_generated_tokens": average("generated_tokens"),
        "seconds": round(sum(record["seconds"] for record in wanted), 2),
    }


def summarise(store: RunStore, note: str | None = None, train_length: int | None = None) -> dict[str, Any]:
    """The summary of a run as plain data. Cells without samples have no score, and means say what they are over."""
    config = store.config()
    scope = config["scope"]
    cells = [
        describe_cell(task, length, store.records(task, length), scope["samples"])
        for length in sorted(scope["lengths"])
        for task in scope["tasks"]
    ]
    means = []
    for length in sorted(scope["lengths"]):
        here = [cell for cell in cells if cell["length"] == length]
        scored = [cell for cell in here if cell["score"] is not None]
        entry: dict[str, Any] = {
            "length": length,
            "tasks": len(scored),
            "of": len(ALL_TASKS),
            "complete": all(cell["samples"] == cell["expected"] for cell in here),
            "score": None,
            "low": None,
            "high": None,
        }
        if scored:
            mean, low, high = mean_interval([(cell["score"], cell["low"], cell["high"]) for cell in scored], top=100.0)
            entry |= {"score": round(mean, 2), "low": round(low, 2), "high": round(high, 2)}
        means.append(entry)
    return {
        "benchmark": "RULER",
        "name": config["info"].get("name", store.directory.name),
        "note": note,
        "train_length": train_length,
        "tasks": scope["tasks"],
        "lengths": sorted(scope["lengths"]),
        "samples": scope["samples"],
        "complete": all(cell["samples"] == cell["expected"] for cell in cells),
        "cells": cells,
        "means": means,
        "intervals": INTERVAL_NOTE,
        "identity": config["identity"],
        "info": config["info"],
    }


def write_report(store: RunStore, note: str | None = None, train_length: int | None = None) -> dict[str, Any]:
    """Write ``summary.json``, ``summary.md`` and ``score_vs_length.png`` into the run, and return the summary."""
    summary = summarise(store, note, train_length)
    picture = store.directory / "score_vs_length.png"
    plot.score_vs_length(picture, [curves(summary)], train_length=train_length, title=f"RULER: {summary['name']}")
    write_json(store.directory / "summary.json", summary)
    write_text(store.directory / "summary.md", _markdown(summary, picture))
    return summary


def curves(summary: Mapping[str, Any]) -> plot.Run:
    """What the plot shows of a run: one curve per task, and the mean of several tasks."""
    lines = {
        task: [
            plot.Point(cell["length"], cell["score"], cell["low"], cell["high"])
            for cell in summary["cells"]
            if cell["task"] == task and cell["score"] is not None
        ]
        for task in summary["tasks"]
    }
    if len(summary["tasks"]) > 1:
        lines[mean_label(summary)] = [
            plot.Point(mean["length"], mean["score"], mean["low"], mean["high"])
            for mean in summary["means"]
            if mean["score"] is not None
        ]
    return plot.Run(summary["name"], lines)


def mean_label(summary: Mapping[str, Any]) -> str:
    """``mean (3 of 13 tasks)``, or ``mean`` where it is RULER's own mean over all tasks."""
    count = len(summary["tasks"])
    return "mean" if count == len(ALL_TASKS) else f"mean ({count} of {len(ALL_TASKS)} tasks)"


def _rows(summary: Mapping[str, Any]) -> list[list[str]]:
    by_cell = {(cell["task"], cell["length"]): cell for cell in summary["cells"]}
    rows = [[task, *(_cell(by_cell[task, length]) for length in summary["lengths"])] for task in summary["tasks"]]
    if len(summary["tasks"]) > 1:
        rows.append([mean_label(summary), *(_mean(mean, len(summary["tasks"])) for mean in summary["means"])])
    return rows


def _cell(cell: Mapping[str, Any]) -> str:
    if cell["score"] is None:
        return "no samples"
    text = f"{cell['score']:.1f} [{cell['low']:.0f}, {cell['high']:.0f}]"
    return text if cell["samples"] == cell["expected"] else f"{text} partial: {cell['samples']} of {cell['expected']}"


def _mean(mean: Mapping[str, Any], tasks: int) -> str:
    if mean["score"] is None:
        return "no samples"
    text = f"{mean['score']:.1f} [{mean['low']:.0f}, {mean['high']:.0f}]"
    if mean["tasks"] < tasks:
        return f"{text} partial: {mean['tasks']} of {tasks} tasks"
    return text if mean["complete"] else f"{text} partial"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _markdown(summary: Mapping[str, Any], picture: Path) -> str:
    parts = [f"# RULER: {summary['name']}"]
    if summary["note"]:
        parts.append(summary["note"])
    if not summary["complete"]:
        parts.append("**This run is not complete**; partial entries are marked.")
    parts.append(markdown_table(["task", *map(length_name, summary["lengths"])], _rows(summary)))
    parts.append(f"{INTERVAL_NOTE} {summary['samples']} samples per task and length, greedy.")
    parts.append(f"![score against length]({picture.name})")
    counted = [cell for cell in summary["cells"] if cell["score"] is not None]
    rows = [
        [
            cell["task"],
            length_name(cell["length"]),
            f"{cell['samples']}",
            f"{cell['mean_prompt_tokens']:.0f}",
            f"{cell['mean_generated_tokens']:.1f}",
            f"{cell['empty']}",
            f"{cell['stopped_by_limit']}",
            f"{cell['seconds']:.1f}",
        ]
        for cell in counted
    ]
    header = ["task", "length", "samples", "prompt tokens", "new tokens", "empty", "ended by the limit", "seconds"]
    parts += ["## Details", markdown_table(header, rows)]
    settings = {**summary["identity"], **summary["info"]}
    parts.append(markdown_table(["setting", "value"], [[key, f"`{value}`"] for key, value in settings.items()]))
    return "\n\n".join(parts) + "\n"


def print_table(summary: Mapping[str, Any]) -> None:
    """Print scores by task and length."""
    show(f"RULER: {summary['name']}", ["task", *map(length_name, summary["lengths"])], _rows(summary))


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table; on something that is not a terminal it is as wide as it needs to be."""
    import sys

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title)
    for position, name in enumerate(header):
        table.add_column(name, justify="left" if position == 0 else "right")
    for row in rows:
        # Text: a score's brackets are not markup.
        table.add_row(*(Text(cell) for cell in row))
    Console(width=None if sys.stdout.isatty() else 200).print(table)
