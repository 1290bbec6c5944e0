"""What a run found: scores with intervals as JSON, Markdown, pictures and a table on the terminal."""

from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lengthgen.files import write_json, write_text

from . import plot
from .benchmark import Benchmark, find_benchmark
from .lengths import length_name
from .run_store import RunStore, expected_samples
from .statistics import mean_interval, wilson

__all__ = [
    "REPORT_FILES",
    "averages",
    "curves",
    "describe_cell",
    "effective_length",
    "markdown_table",
    "print_table",
    "show",
    "summarise",
    "write_report",
]

REPORT_FILES = ("summary.md", "summary.json", "score_vs_length.png", "score_vs_depth.png")

INTERVAL_NOTE = (
    "Scores are the benchmark's own, in per cent. In brackets 95 % intervals: Wilson's for one task, "
    "their combination by squared distances (MOVER) for a mean over tasks or lengths."
)
DEPTH_NOTE = (
    "Depth is the share of the text before the needle. A sample that asks for several needles counts with its score "
    "at each of their depths. Grey: nothing was asked there."
)
CUT_NOTE = (
    "A prompt that did not fit lost part of its context, never of its question; a reference is lost that stood in the "
    "context before. What is left out before, the benchmark leaves out of its long texts for every model."
)
COST_NOTE = "From one answer of a process to its next; loading the model and making prompts are not counted."

_BANDS = 10


def describe_cell(task: str, length: int, records: Mapping[int, Mapping[str, Any]], expected: int) -> dict[str, Any]:
    """Score, interval, counts and speed of one task at one length; score and interval are None without samples."""
    wanted = [records[index] for index in range(expected) if index in records]
    count = len(wanted)
    cell: dict[str, Any] = {"task": task, "length": length, "samples": count, "expected": expected}
    if not count:
        return cell | {"score": None, "low": None, "high": None}
    mean = sum(record["score"] for record in wanted) / count
    low, high = wilson(mean, _independent(wanted))
    seconds = sum(record["seconds"] for record in wanted)
    prompt_tokens, new_tokens = (sum(r[key] for r in wanted) for key in ("prompt_tokens", "generated_tokens"))
    return cell | {
        "score": round(100 * mean, 2),
        "low": round(100 * low, 2),
        "high": round(100 * high, 2),
        "empty": sum(not record["pred"].strip() for record in wanted),
        "stopped_by_limit": sum(record["finish"] == "length" for record in wanted),
        "mean_prompt_tokens": round(prompt_tokens / count, 2),
        "mean_generated_tokens": round(new_tokens / count, 2),
        "seconds": round(seconds, 2),
        "process_seconds": round(sum(r["seconds"] * r.get("processes", 1) for r in wanted), 2),
        "tokens_per_second": round((prompt_tokens + new_tokens) / seconds, 1) if seconds else None,
        "devices": sorted({record["device"] for record in wanted if "device" in record}),
        "depths": _depths(wanted),
        "cut": _cut(wanted),
    }


def _independent(records: Sequence[Mapping[str, Any]]) -> int:
    """Samples that count as independent: one question asked with its answer at several depths is one."""
    return len({record.get("group") or record["index"] for record in records})


def _cut(records: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How many contexts were cut to fit, by how much on average, how many lost a reference by that, and what the
    benchmark itself had left out before; None where nothing was."""
    cut = [record["cut_tokens"] for record in records if record.get("cut_tokens")]
    left_out = sum(record.get("shortened_tokens", 0) for record in records)
    if not cut and not left_out:
        return None
    return {
        "prompts": len(cut),
        "mean_tokens": round(sum(cut) / len(cut), 1) if cut else 0.0,
        "lost": sum(record.get("lost_references", 0) > 0 for record in records),
        "mean_left_out": round(left_out / len(records), 1),
    }


def _depths(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Scores by bands of depth; empty where samples have no depths."""
    scores: list[list[float]] = [[] for _ in range(_BANDS)]
    for record in records:
        for depth in record.get("depths", ()):
            scores[min(int(depth * _BANDS), _BANDS - 1)].append(record["score"])
    if not any(scores):
        return []
    return [
        {"from": i / _BANDS, "samples": len(band), "score": round(100 * sum(band) / len(band), 2) if band else None}
        for i, band in enumerate(scores)
    ]


def summarise(store: RunStore, note: str | None = None, train_length: int | None = None) -> dict[str, Any]:
    """The summary of a run as plain data. Cells without samples have no score, and means say what they are over.

    Args:
        note, train_length: instead of those that the run was started with.
    """
    config = store.config()
    scope, info = config["scope"], config["info"]
    benchmark = find_benchmark(config["identity"].get("benchmark"))
    lengths = sorted(scope["lengths"])
    cells = [
        describe_cell(task, length, store.records(task, length), expected_samples(scope, task, length))
        for length in lengths
        for task in scope["tasks"]
    ]
    parts = [_parts(length, [c for c in cells if c["length"] == length], benchmark) for length in lengths]
    means = [_mean(length, here, benchmark) for length, here in zip(lengths, parts, strict=True)]
    over = len(benchmark.groups(scope["tasks"]))
    answered = [task for task in scope["tasks"] if task not in benchmark.derived]
    return {
        "benchmark": benchmark.name,
        "name": info.get("name", store.directory.name),
        "note": note or info.get("note"),
        "train_length": train_length or info.get("train_length"),
        "tasks": scope["tasks"],
        "labels": info.get("labels", {}),
        "of": benchmark.of,
        "over": over,
        "mean_label": benchmark.mean_label(scope["tasks"]),
        "lengths": lengths,
        "samples": scope["samples"],
        "complete": all(cell["samples"] == cell["expected"] for cell in cells),
        "cells": cells,
        "categories": [part for here in parts for part in here] if benchmark.categories else [],
        "means": means,
        "averages": averages(means, over, benchmark),
        "effective_length": effective_length(means, benchmark),
        "answers": [_answers(task, [c for c in cells if c["task"] == task]) for task in answered],
        "cost": _cost(cells),
        "intervals": INTERVAL_NOTE,
        "identity": config["identity"],
        "info": info,
    }


def _parts(length: int, cells: Sequence[Mapping[str, Any]], benchmark: Benchmark) -> list[dict[str, Any]]:
    """What the mean at a length is taken over: each task, or each category as the mean of its tasks."""
    by_task = {cell["task"]: cell for cell in cells}
    parts = []
    for name, tasks in benchmark.groups(by_task).items():
        scored = [by_task[task] for task in tasks if by_task[task]["score"] is not None]
        of = len(benchmark.categories.get(name, tasks))
        whole = all(by_task[task]["samples"] == by_task[task]["expected"] for task in tasks)
        part = {"category": name, "length": length, "tasks": len(scored), "of": of, "complete": whole}
        parts.append(part | (_estimate(scored) if benchmark.categories else _raw(by_task[name])))
    return parts


def _raw(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {name: cell[name] for name in ("score", "low", "high")}


def _mean(length: int, parts: Sequence[Mapping[str, Any]], benchmark: Benchmark) -> dict[str, Any]:
    scored = [part for part in parts if part["score"] is not None]
    complete = all(part["complete"] for part in parts)
    mean = {"length": length, "tasks": len(scored), "of": benchmark.of, "complete": complete}
    return mean | _estimate(scored)


def _estimate(parts: Sequence[Mapping[str, Any]], weights: Sequence[float] | None = None) -> dict[str, Any]:
    """Weighted mean of scores with its interval; None of each without parts."""
    if not parts:
        return {"score": None, "low": None, "high": None}
    intervals = [(part["score"], part["low"], part["high"]) for part in parts]
    names = ("score", "low", "high")
    return dict(zip(names, (round(x, 2) for x in mean_interval(intervals, 100.0, weights)), strict=True))


def averages(means: Sequence[Mapping[str, Any]], tasks: int, benchmark: Benchmark) -> dict[str, Any] | None:
    """Averages over lengths: plain, and with weights that rise or fall by one from each length to the next.

    RULER's ``Avg.``, ``wAvg. (inc)`` and ``wAvg. (dec)``, which it takes over 4K to 128K with weights 1 to 6. None
    where there is one length only, a task has no sample yet at some length, or the benchmark has no such averages.
    """
    if not benchmark.lengths or len(means) < 2 or any(mean["tasks"] < tasks for mean in means):
        return None
    rising = list(range(1, len(means) + 1))
    return {
        "lengths": [mean["length"] for mean in means],
        "tasks": tasks,
        "of": benchmark.of,
        "benchmark_lengths": tuple(mean["length"] for mean in means) == benchmark.lengths,
        "average": _estimate(means),
        "increasing": _estimate(means, rising),
        "decreasing": _estimate(means, rising[::-1]),
    }


def effective_length(means: Sequence[Mapping[str, Any]], benchmark: Benchmark) -> dict[str, Any] | None:
    """The largest length whose mean over all tasks exceeds the threshold; None where the benchmark has no threshold."""
    if benchmark.threshold is None:
        return None
    whole = [mean for mean in means if mean["tasks"] == len(benchmark.tasks)]
    above = [mean["length"] for mean in whole if mean["score"] > benchmark.threshold]
    effective = max(above, default=None)
    if not whole:
        tasks = max(mean["tasks"] for mean in means)
        text = f"not given: it needs all {len(benchmark.tasks)} tasks, and this run has {tasks}"
    elif effective is None:
        text = f"below {length_name(whole[0]['length'])}, the shortest length here"
    elif effective == whole[-1]["length"]:
        text = f"at least {length_name(effective)}, the longest length here"
    else:
        text = length_name(effective)
    if gaps := [
        mean["length"] for mean in whole if effective and mean["length"] < effective and mean["length"] not in above
    ]:
        text += f", though not at {', '.join(map(length_name, gaps))}"
    return {"threshold": benchmark.threshold, "length": effective, "text": text}


def _answers(task: str, cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How answers of one task ended, over all lengths; rates in per cent."""
    samples = sum(cell["samples"] for cell in cells)
    result: dict[str, Any] = {"task": task, "samples": samples}
    for name in ("empty", "stopped_by_limit"):
        count = sum(cell.get(name, 0) for cell in cells)
        result |= {name: count, f"{name}_rate": round(100 * count / samples, 2) if samples else None}
    return result


def _cost(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    counted = [cell for cell in cells if cell["samples"]]
    seconds = sum(cell["seconds"] for cell in counted)
    tokens = sum(c["samples"] * (c["mean_prompt_tokens"] + c["mean_generated_tokens"]) for c in counted)
    devices = sorted({device for cell in counted for device in cell["devices"]})
    return {
        "unit": "GPU-seconds" if devices and not {"CPU", "server"} & set(devices) else "process-seconds",
        "amount": round(sum(cell["process_seconds"] for cell in counted), 1),
        "devices": devices,
        "tokens": round(tokens),
        "tokens_per_second": round(tokens / seconds, 1) if seconds else None,
        "method": COST_NOTE,
    }


def write_report(store: RunStore, note: str | None = None, train_length: int | None = None) -> dict[str, Any]:
    """Write ``REPORT_FILES`` into the run, and return the summary; the depths only where samples have some.

    Args:
        note, train_length: as for :func:`summarise`.
    """
    summary = summarise(store, note, train_length)
    title = f"{summary['benchmark']}: {summary['name']}"
    plot.score_vs_length(
        store.directory / "score_vs_length.png", [curves(summary)], train_length=summary["train_length"], title=title
    )
    if maps := _depth_maps(summary):
        plot.score_vs_depth(store.directory / "score_vs_depth.png", maps, title=title)
    write_json(store.directory / "summary.json", summary)
    write_text(store.directory / "summary.md", _markdown(summary))
    return summary


def curves(summary: Mapping[str, Any]) -> plot.Run:
    """What the plot shows of a run: one curve per task, and the mean of several tasks."""
    labels = summary["labels"]
    lines = {
        labels.get(task, task): [
            plot.Point(cell["length"], cell["score"], cell["low"], cell["high"])
            for cell in summary["cells"]
            if cell["task"] == task and cell["score"] is not None
        ]
        for task in summary["tasks"]
    }
    if summary["over"] > 1:
        lines[summary["mean_label"]] = [
            plot.Point(mean["length"], mean["score"], mean["low"], mean["high"])
            for mean in summary["means"]
            if mean["score"] is not None
        ]
    return plot.Run(summary["name"], lines)


def _depth_maps(summary: Mapping[str, Any]) -> dict[str, dict[int, list[float | None]]]:
    maps: dict[str, dict[int, list[float | None]]] = {}
    for cell in summary["cells"]:
        if cell.get("depths"):
            maps.setdefault(cell["task"], {})[cell["length"]] = [band["score"] for band in cell["depths"]]
    return maps


def _rows(summary: Mapping[str, Any]) -> list[list[str]]:
    by_cell = {(cell["task"], cell["length"]): cell for cell in summary["cells"]}
    labels, lengths = summary["labels"], summary["lengths"]
    rows = [
        [labels.get(task, task), *(_cell(by_cell[task, length]) for length in lengths)] for task in summary["tasks"]
    ]
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for part in summary["categories"]:
        by_category.setdefault(part["category"], []).append(part)
    for name, parts in by_category.items():
        rows.append([f"category {name}", *map(_category, parts)])
    if summary["over"] > 1:
        rows.append([summary["mean_label"], *(_average(mean, summary["over"]) for mean in summary["means"])])
    return rows


def _category(part: Mapping[str, Any]) -> str:
    if part["score"] is None:
        return "no samples"
    text = _score(part)
    if part["tasks"] < part["of"]:
        return f"{text} partial: {part['tasks']} of {part['of']} measures"
    return text if part["complete"] else f"{text} partial"


def _score(estimate: Mapping[str, Any]) -> str:
    return f"{estimate['score']:.1f} [{estimate['low']:.0f}, {estimate['high']:.0f}]"


def _cell(cell: Mapping[str, Any]) -> str:
    if cell["score"] is None:
        return "no samples"
    text = _score(cell)
    return text if cell["samples"] == cell["expected"] else f"{text} partial: {cell['samples']} of {cell['expected']}"


def _average(mean: Mapping[str, Any], tasks: int) -> str:
    if mean["score"] is None:
        return "no samples"
    text = _score(mean)
    if mean["tasks"] < tasks:
        return f"{text} partial: {mean['tasks']} of {tasks} tasks"
    return text if mean["complete"] else f"{text} partial"


def _facts(summary: Mapping[str, Any]) -> list[str]:
    """Sentences on what goes over lengths, and on cost."""
    facts = []
    if over := summary["averages"]:
        span = f"{length_name(over['lengths'][0])} to {length_name(over['lengths'][-1])}"
        text = (
            f"{summary['mean_label']} over {span}: {_score(over['average'])}, "
            f"wAvg (inc) {_score(over['increasing'])}, wAvg (dec) {_score(over['decreasing'])}"
        )
        if not over["benchmark_lengths"]:
            text += f"; these are not the lengths of {summary['benchmark']}'s published averages"
        facts.append(text[0].upper() + text[1:] + ".")
    if effective := summary["effective_length"]:
        facts.append(f"Effective length (mean above {effective['threshold']}): {effective['text']}.")
    if cut := [cell for cell in summary["cells"] if cell.get("cut") and cell["cut"]["prompts"]]:
        prompts, asked = sum(cell["cut"]["prompts"] for cell in cut), sum(cell["samples"] for cell in summary["cells"])
        facts.append(f"Contexts cut to fit: {prompts:,} of {asked:,}; summary.md says where and by how much.")
    cost = summary["cost"]
    if cost["tokens_per_second"]:
        on = f" on {', '.join(cost['devices'])}" if cost["devices"] else ""
        facts.append(
            f"Cost: {cost['amount']:,.0f} {cost['unit']} ({cost['amount'] / 3600:.2f} hours){on} for "
            f"{cost['tokens']:,} tokens; {cost['tokens_per_second']:,.0f} tokens/s for each copy of the model."
        )
    return facts


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _markdown(summary: Mapping[str, Any]) -> str:
    parts = [f"# {summary['benchmark']}: {summary['name']}"]
    if summary["note"]:
        parts.append(summary["note"])
    if not summary["complete"]:
        parts.append("**This run is not complete**; partial entries are marked.")
    parts.append(markdown_table(["task", *map(length_name, summary["lengths"])], _rows(summary)))
    asked = sorted({cell["expected"] for cell in summary["cells"]})
    several = str(asked[0]) if len(asked) == 1 else f"{asked[0]} to {asked[-1]}"
    parts.append(f"{INTERVAL_NOTE} {several} samples per task and length, greedy.")
    parts.append("\n".join(f"* {fact}" for fact in _facts(summary)))
    parts.append("![score against length](score_vs_length.png)")
    if _depth_maps(summary):
        parts += ["![score against depth](score_vs_depth.png)", DEPTH_NOTE]
    if cuts := _cut_rows(summary):
        header = ["task", "length", "cut to fit", "by tokens, mean", "lost a reference", "tokens left out before, mean"]
        parts += ["## Cut contexts", markdown_table(header, cuts), CUT_NOTE]
    parts += ["## Answers", markdown_table(["task", "answers", "empty", "ended by the limit"], _answer_rows(summary))]
    parts.append("An answer that the limit ended may have been cut short; a base model seldom ends one itself.")
    header = [
        "task",
        "length",
        "samples",
        "prompt tokens",
        "new tokens",
        "empty",
        "by the limit",
        "seconds",
        "tokens/s",
    ]
    parts += ["## Details", markdown_table(header, _detail_rows(summary)), COST_NOTE]
    settings = {**summary["identity"], **summary["info"]}
    parts.append(markdown_table(["setting", "value"], [[key, f"`{value}`"] for key, value in settings.items()]))
    return "\n\n".join(parts) + "\n"


def _cut_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            cell["task"],
            length_name(cell["length"]),
            f"{cut['prompts']} of {cell['samples']}",
            f"{cut['mean_tokens']:,.1f}",
            str(cut["lost"]),
            f"{cut['mean_left_out']:,.1f}",
        ]
        for cell in summary["cells"]
        if (cut := cell.get("cut"))
    ]


def _answer_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            row["task"],
            str(row["samples"]),
            *(f"{row[name]} ({row[f'{name}_rate']:.1f} %)" for name in ("empty", "stopped_by_limit")),
        ]
        for row in summary["answers"]
        if row["samples"]
    ]


def _detail_rows(summary: Mapping[str, Any]) -> list[list[str]]:
    derived = find_benchmark(summary["identity"]["benchmark"]).derived
    return [
        [
            cell["task"],
            length_name(cell["length"]),
            f"{cell['samples']}",
            f"{cell['mean_prompt_tokens']:.0f}",
            f"{cell['mean_generated_tokens']:.1f}",
            f"{cell['empty']}",
            f"{cell['stopped_by_limit']}",
            f"{cell['seconds']:.1f}",
            f"{cell['tokens_per_second']:,.0f}" if cell["tokens_per_second"] else "-",
        ]
        for cell in summary["cells"]
        if cell["score"] is not None and cell["task"] not in derived
    ]


def print_table(summary: Mapping[str, Any]) -> None:
    """Print scores by task and length, and what goes over lengths."""
    title = f"{summary['benchmark']}: {summary['name']}"
    show(title, ["task", *map(length_name, summary["lengths"])], _rows(summary))
    print("\n".join(_facts(summary)))


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
