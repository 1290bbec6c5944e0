"""The report of a study: numbers as JSON and Markdown, pictures as PNG."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.evaluation.report import markdown_table
from megatron_lengthgen.files import write_json, write_text
from megatron_lengthgen.study.plot import Axis, Curve, Panel, Point, draw
from megatron_lengthgen.study.results import PLACEMENTS, scale_order
from megatron_lengthgen.study.summary import summarise

__all__ = ["write_report"]

_INTERVALS = (
    "In brackets 95 % intervals from a bootstrap on two levels, seeds and then sequences within seeds, widened as "
    "Student's t asks for few seeds. Where all values agree, the interval reaches as far as so many sequences leave "
    "open. Differences are between the same sequences of the same seeds. No interval is corrected for the number of "
    "comparisons."
)
_LENGTH = Axis("length, multiples of the training length", log=True, suffix="x")
_ACCURACY = Axis("accuracy", ends=(0.0, 1.0))

Summary = Mapping[str, Any]


def write_report(
    cells: Sequence[Mapping[str, Any]],
    out: Path,
    *,
    title: str | None = None,
    command: str | None = None,
    baseline: str | None = None,
    expected: Iterable[tuple[str, int]] = (),
) -> dict[str, Any]:
    """Write ``report.json``, ``report.md`` and figures into ``out``, and return what is in ``report.json``.

    Args:
        cells: Results of finished cells; those that are missing are named, and the rest is reported.
        out: A directory, made if need be.
        title: Of the report; None names the task.
        command: What made the study, printed in the report.
        baseline: See :func:`megatron_lengthgen.study.summary.summarise`.
        expected: ``(variant, seed)`` of all cells of the study.

    Raises:
        UserError: no cells, cells of different studies, an unknown baseline.
    """
    numbers = summarise(cells, baseline=baseline, expected=expected)
    title = title or f"Length generalisation on {numbers['task'].get('name', 'a task')}"
    summary = {"title": title, "command": command, **numbers}
    write_json(out / "report.json", summary)
    pictures = [name for name, rows, head in _figures(summary) if _drawn(out / name, rows, head)]
    write_text(out / "report.md", _markdown(summary, pictures))
    return summary


def _drawn(path: Path, rows: Sequence[Sequence[Panel]], title: str) -> bool:
    """Draw what has points; a figure of an earlier report that no longer has any is not left to be mistaken for new."""
    filled = [row for row in rows if any(curve.points for panel in row for curve in panel.curves)]
    if filled:
        draw(path, filled, title)
    else:
        path.unlink(missing_ok=True)
    return bool(filled)


def _figures(summary: Summary) -> list[tuple[str, list[list[Panel]], str]]:
    """Name, panels and title of each figure."""
    target = _multiple(summary["target_multiple"])
    loss = Axis(f"loss at {_multiple(1)}")

    def by(x: str, entries: Iterable[Mapping[str, Any]]) -> list[Point]:
        return [_point(entry[x], entry) for entry in entries]

    def of(name: str, key: str) -> list[Mapping[str, Any]]:
        return [entry for entry in summary[key] if entry["variant"] == name]

    def scaled(name: str) -> list[Mapping[str, Any]]:
        return [
            entry
            for found in of(name, "attention_scale")
            for entry in found["scales"]
            if entry["multiple"] == summary["target_multiple"] and not isinstance(entry["scale"], str)
        ]

    length = _panels(summary, _LENGTH, _ACCURACY, lambda name: by("multiple", of(name, "accuracy")))
    error = _panels(summary, _LENGTH, Axis("mean absolute error"), lambda name: by("multiple", of(name, "error")))
    scale_axis = Axis("factor on the full layers' attention logits", log=True)
    scale = _panels(summary, scale_axis, _ACCURACY, lambda name: by("scale", scaled(name)))
    return [
        ("accuracy.png", _wrapped(length), f"{summary['title']}: accuracy against length"),
        ("error.png", _wrapped(error), f"{summary['title']}: error of the expected number against length"),
        ("training.png", _along_training(summary), f"{summary['title']}: along the second phase"),
        ("attention_scale.png", _wrapped(scale), f"{summary['title']}: accuracy at {target}, attention sharpened"),
        ("equal_strength.png", [_strength_panels(summary, loss)], f"{summary['title']}: what dropout costs and gains"),
    ]


def _wrapped(panels: Sequence[Panel], columns: int = 3) -> list[list[Panel]]:
    return [list(row) for row in itertools.batched(panels, columns)]


def _point(x: float, entry: Mapping[str, Any]) -> Point:
    y, low, high = (math.nan if entry[key] is None else entry[key] for key in ("mean", "low", "high"))
    seeds = [value for value in entry["seeds"].values() if value is not None]
    return Point(x, y, low, high, values=tuple(seeds) if len(seeds) > 1 else ())


def _style(summary: Summary, name: str) -> int:
    """One look per family (a placement with its options), the same in all figures."""
    ranks = {variant["family"]: list(PLACEMENTS).index(variant["placement"]) for variant in summary["variants"]}
    return sorted(ranks, key=lambda family: ranks[family]).index(_variant(summary, name)["family"])


def _variant(summary: Summary, name: str) -> Mapping[str, Any]:
    return next(variant for variant in summary["variants"] if variant["name"] == name)


def _curves(summary: Summary, panel: Mapping[str, Any], points: Callable[[str], list[Point]]) -> list[Curve]:
    """Of a panel's variants, named by their placement; those of settings other than the panel's are dashed."""
    variants = [_variant(summary, name) for name in panel["variants"]]
    contexts = [variant["context"] for variant in variants]
    main = max(contexts, key=contexts.count)
    curves = []
    for variant in variants:
        other = variant["context"] != main
        name = f"{variant['family']} ({variant['context']})" if other else variant["family"]
        curves.append(Curve(name, points(variant["name"]), _style(summary, variant["name"]), dashed=other))
    return curves


def _panels(summary: Summary, x: Axis, y: Axis, points: Callable[[str], list[Point]]) -> list[Panel]:
    panels = [Panel(panel["title"], _curves(summary, panel, points), x, y) for panel in summary["panels"]]
    return [panel for panel in panels if any(curve.points for curve in panel.curves)]


def _along_training(summary: Summary) -> list[list[Panel]]:
    """A row per panel: accuracy beyond the training length, and the losses at it, against the step."""
    steps = {entry["step"] for entry in summary["training"]}
    if len(steps) < 2:
        return []
    multiples = summary["multiples"]
    shown = sorted({summary["target_multiple"], multiples[-1]} & set(multiples)) if multiples else []
    axis = Axis("step of the second phase")

    def at(multiple: float, name: str) -> list[Point]:
        return [
            _point(entry["step"], found)
            for entry in summary["training"]
            for found in entry["accuracy"]
            if entry["variant"] == name and found["multiple"] == multiple
        ]

    def losses(key: str, name: str) -> list[Point]:
        mine = [entry for entry in summary[key] if entry["variant"] == name and entry["loss"] is not None]
        return [Point(entry["step"], entry["loss"]) for entry in mine]

    rows = []
    for group in summary["panels"]:
        row = []
        for multiple in shown:
            curves = _curves(summary, group, functools.partial(at, multiple))
            head = ": ".join(filter(None, (group["title"], f"accuracy at {_multiple(multiple)}")))
            row.append(Panel(head, curves, axis, _ACCURACY))
        for key, head in (("training", f"loss at {_multiple(1)}, evaluation"), ("training_loss", "training loss")):
            curves = _curves(summary, group, functools.partial(losses, key))
            row.append(Panel(head, curves, axis, Axis("nats per answer", log=True)))
        rows.append(row)
    return rows


def _strength_panels(summary: Summary, loss: Axis) -> list[Panel]:
    """Per context: accuracy at the target length against the loss at the training length, a curve per family."""
    points: dict[str, dict[str, list[Point]]] = {}
    for entry in summary["equal_strength"]["points"]:
        variant = _variant(summary, entry["variant"])
        note = "" if variant["p"] is None else f"{variant['p']:g}"
        place = points.setdefault(variant["context"], {}).setdefault(variant["family"], [])
        if entry["loss"] is not None:
            place.append(_point(entry["loss"], entry["far"])._replace(note=note, values=()))
    look = {variant["family"]: _style(summary, variant["name"]) for variant in summary["variants"]}
    y = Axis(f"accuracy at {_multiple(summary['target_multiple'])}", ends=(0.0, 1.0))
    return [
        Panel(context, [Curve(family, found, look[family]) for family, found in families.items()], loss, y)
        for context, families in points.items()
    ]


def _multiple(value: float | None) -> str:
    return "no common length" if value is None else f"{value:g}x"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(entry: Mapping[str, Any] | None, sign: str = "") -> str:
    if entry is None:
        return "-"
    if entry["mean"] is None:
        return "no number"
    text = f"{entry['mean']:{sign}.3f} [{entry['low']:{sign}.2f}, {entry['high']:{sign}.2f}]"
    return f"{text} *" if entry["within_seed_only"] else text


def _change(entry: Mapping[str, Any] | None) -> str:
    """A difference, and in how many seeds it has the sign of the mean."""
    if entry is None or entry["mean"] is None:
        return "-"
    agree = f"{entry['above'] if entry['mean'] > 0 else entry['below']}/{len(entry['seeds'])}"
    return f"{_interval(entry, '+')} {agree if entry['mean'] else 'tie'}"


def _markdown(summary: Summary, pictures: Sequence[str]) -> str:
    parts = [f"# {summary['title']}"]
    if summary["command"]:
        parts.append(f"```\n{summary['command']}\n```")
    orders = [f"- `{o['variants'][-1]}` at {o['settings']}. {o['statement']}" for o in summary["order"]]
    parts.append("\n".join(orders) or "No two placements were run at the same settings: there is no order to test.")
    if summary["missing"]:
        names = ", ".join(f"{variant}-seed{seed}" for variant, seed in summary["missing"])
        parts.append(f"**Missing cells: {names}.** Means are over the seeds that each variant has.")
    parts += summary["notes"]
    parts.append(
        f"Training length {summary['training_length']}; {_steps(summary['phase1_steps'])} steps of the first phase, "
        f"{summary['last_step']} of the second; seeds {', '.join(map(str, summary['seeds']))}. {_INTERVALS} A star "
        "marks an interval of a single seed, which is for that seed alone. n/N: in n of N seeds the difference has the "
        "sign of the mean."
    )
    sections: list[tuple[str, str | None, Callable[[Summary], list[str]]]] = [
        ("Accuracy against length", "accuracy.png", _accuracy_section),
        ("Error against length", "error.png", _error_section),
        ("Differences between placements", None, _difference_section),
        ("Along training", "training.png", _training_section),
        ("Weight decay", None, _weight_decay_section),
        ("Attention scale", "attention_scale.png", _attention_section),
        ("Equal strength", "equal_strength.png", _strength_section),
        ("Settings", None, _settings_section),
    ]
    for head, picture, section in sections:
        found = section(summary)
        if found:
            parts += [f"## {head}", *([f"![{head}]({picture})"] if picture in pictures else []), *found]
    return "\n\n".join(parts) + "\n"


def _steps(values: Sequence[int]) -> str:
    return " and ".join(map(str, values))


def _grid(
    entries: Sequence[Mapping[str, Any]],
    label: Callable[[Mapping[str, Any]], str],
    head: str,
    show: Callable[[Mapping[str, Any] | None], str] = _interval,
) -> str:
    """A table with a row per label and a column per length."""
    multiples = sorted({entry["multiple"] for entry in entries})
    found: dict[str, dict[float, Mapping[str, Any]]] = {}
    for entry in entries:
        found.setdefault(label(entry), {})[entry["multiple"]] = entry
    rows = [[name, *(show(by_length.get(m)) for m in multiples)] for name, by_length in found.items()]
    return markdown_table([head, *map(_multiple, multiples)], rows)


def _accuracy_section(summary: Summary) -> list[str]:
    entries = summary["accuracy"]
    if not entries:
        return ["Nothing was evaluated at the last step."]
    parts = [_grid(entries, lambda entry: entry["variant"], "variant")]
    for multiple in sorted({summary["target_multiple"], summary["multiples"][-1]} - {None}):
        rows = [
            [e["variant"], *(_number(e["seeds"].get(str(seed)), 2) for seed in summary["seeds"])]
            for e in entries
            if e["multiple"] == multiple
        ]
        header = [f"at {_multiple(multiple)}, by seed", *map(str, summary["seeds"])]
        parts.append(markdown_table(header, rows))
    return parts


def _error_section(summary: Summary) -> list[str]:
    entries = summary["error"]
    if not entries:
        return []
    text = (
        "Mean absolute distance between the right number and the number that the model expects: the mean of its "
        "distribution over the numbers, the regression read-out of the counting task."
    )
    return [text, _grid(entries, lambda entry: entry["variant"], "variant")]


def _difference_section(summary: Summary) -> list[str]:
    parts = []
    found = summary["differences"]
    if found["neighbours"]:
        text = "Each placement against the one below it in the order none, Pre-Norm, Pre-Linear, VPAD, all else equal."
        table = _grid(found["neighbours"], lambda e: f"{e['variant']} - {e['against']}", "accuracy", _change)
        parts += [text, table]
    if found["baseline"]:
        text = f"Each variant against `{summary['baseline']}`."
        parts += [text, _grid(found["baseline"], lambda entry: entry["variant"], "accuracy", _change)]
    return parts


def _training_section(summary: Summary) -> list[str]:
    if len({entry["step"] for entry in summary["training"]}) < 2:
        return []
    multiples = summary["multiples"]
    rows = []
    for entry in summary["training"]:
        by_length = {found["multiple"]: found["mean"] for found in entry["accuracy"]}
        values = [_number(by_length.get(multiple)) for multiple in multiples]
        losses = [_number(entry["loss"], 4), _number(entry["training_loss"], 4)]
        rows.append([entry["variant"], str(entry["step"]), *values, *losses])
    header = ["variant", "step", *map(_multiple, multiples), f"loss at {_multiple(1)}", "training loss"]
    text = (
        "Mean accuracy over seeds. The loss at 1x is that of evaluation, without dropout; the training loss is the "
        "mean since the row above, with the variant's dropout. Step 0 is the first phase's checkpoint."
    )
    return [text, markdown_table(header, rows), *_decline_part(summary)]


def _decline_part(summary: Summary) -> list[str]:
    if not summary["decline"]:
        return []
    rows = []
    for entry in summary["decline"]:
        row = [entry["variant"]]
        for name in ("since_first", "since_best"):
            found = entry[name]
            if found["accuracy"] is None:
                row += ["-"] * 3
                continue
            loss = "-" if found["loss"] is None else f"{found['loss']:+.4f}"
            row += [_change(found["accuracy"]), loss, "yes" if found["declines_while_loss_improves"] else "no"]
        rows.append([*row, str(entry["best"])])
    where = _multiple(summary["target_multiple"])
    text = (
        "Does length generalisation decline while the loss improves? Change from the start of the second phase, and "
        f"from its best point, to its end: accuracy at {where} and loss at 1x. Yes where the whole interval of the "
        "accuracy's change lies below 0 and the loss falls. The best point is chosen from the same data, so that the "
        "change from there leans towards a decline."
    )
    header = ["variant", "from start: accuracy", "loss", "declines", "from best: accuracy", "loss", "declines", "best"]
    return [text, markdown_table(header, rows)]


def _weight_decay_section(summary: Summary) -> list[str]:
    parts = []
    for group in summary["weight_decay"]:
        decay = {variant["name"]: variant["weight_decay"] for variant in group["variants"]}
        entries = [entry for entry in summary["accuracy"] if entry["variant"] in decay]
        entries.sort(key=lambda entry: -(decay[entry["variant"]] or 0))
        labels = {name: f"{name} (weight decay {value})" for name, value in decay.items()}
        parts.append(_grid(entries, lambda entry, labels=labels: labels[entry["variant"]], "accuracy"))  # type: ignore[misc]
        if group["differences"]:
            parts.append(_grid(group["differences"], lambda e: f"{e['variant']} - {e['against']}", "accuracy", _change))
    return parts


def _attention_section(summary: Summary) -> list[str]:
    found = summary["attention_scale"]
    if not found:
        return []
    target = summary["target_multiple"]
    scales = sorted({entry["scale"] for variant in found for entry in variant["scales"]}, key=scale_order)
    parts = [
        "Accuracy when the attention logits of the layers without a window are multiplied at evaluation, without "
        "training; log grows with the position n, ln n / ln (training length). A gain that a factor gives to the "
        "baseline too is sharper attention, no better model."
    ]
    for multiple in sorted({target, summary["multiples"][-1]}):
        rows = []
        for variant in found:
            here = {entry["scale"]: entry for entry in variant["scales"] if entry["multiple"] == multiple}
            rows.append([variant["variant"], *(_interval(here.get(scale)) for scale in scales)])
        parts.append(markdown_table([f"at {_multiple(multiple)}", *(f"x {scale}" for scale in scales)], rows))
    rows = [
        [
            variant["variant"],
            str(variant["best_scale"]),
            *(_change(variant.get(key)) for key in ("sharpening", "gain", "gain_over_sharpened", "gain_both_at_best")),
        ]
        for variant in found
    ]
    base = summary["baseline"]
    header = ["variant", "best factor", "its gain from that"]
    header += [f"gain over {base}", f"over {base} at its best", "both at their best"]
    parts.append(f"The factor that is best at {_multiple(target)}, and what is left of each variant's gain.")
    parts.append(markdown_table(header, rows))
    return parts


def _strength_section(summary: Summary) -> list[str]:
    points, matches = summary["equal_strength"]["points"], summary["equal_strength"]["matches"]
    if not points:
        return []
    target = _multiple(summary["target_multiple"])
    rows = []
    for entry in points:
        p = _variant(summary, entry["variant"])["p"]
        near, far = _interval(entry["near"]), _interval(entry["far"])
        rows.append([entry["variant"], "-" if p is None else f"{p:g}", _number(entry["loss"], 4), near, far])
    parts = [
        "The same p is not the same strength. Variants by what they cost at the training length and gain beyond it.",
        markdown_table(["variant", "p", "loss at 1x", "accuracy at 1x", f"accuracy at {target}"], rows),
    ]
    if matches:
        rows = [
            [e["variant"], e["against"], f"{e['loss']:+.4f}", _change(e["near"]), _change(e["far"])] for e in matches
        ]
        parts.append("Each variant beside the one of a later placement whose loss at 1x is nearest to its own.")
        header = ["variant", "against", "loss at 1x", "accuracy at 1x", f"accuracy at {target}"]
        parts.append(markdown_table(header, rows))
    return parts


def _setting(value: Any) -> str:
    return f"({', '.join(map(str, value))})" if isinstance(value, list) else str(value)


def _settings_section(summary: Summary) -> list[str]:
    rows = []
    for variant in summary["variants"]:
        settings = ", ".join(f"{key} {_setting(value)}" for key, value in variant["settings"].items())
        p = "-" if variant["p"] is None else f"{variant['p']:g}"
        rows.append([variant["name"], variant["placement"], p, settings, ", ".join(map(str, variant["seeds"]))])
    task = ", ".join(f"{key} {value}" for key, value in summary["task"].items())
    return [f"Task: {task}.", markdown_table(["variant", "placement", "p", "settings", "seeds"], rows)]
