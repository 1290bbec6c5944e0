"""The mismatch between training and evaluation as Markdown, JSON and a picture."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from megatron_lengthgen.files import atomic_file, write_json, write_text
from megatron_lengthgen.study.mismatch import Gap, Part, Row

__all__ = ["markdown", "summary", "write"]

# Okabe and Ito's palette: told apart by colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_WORST_LINEARS = 5

Mode = Literal["alone", "together"]
_TITLES: dict[Mode, str] = {"alone": "one site at a time", "together": "all sites at once"}
_PARTS: tuple[Part, Part] = ("inputs", "outputs")


def write(directory: Path, tables: Mapping[str, Sequence[Row]], settings: Mapping[str, Any]) -> list[Path]:
    """Write ``mismatch.md``, ``mismatch.json`` and ``mismatch.png`` and return their paths.

    Args:
        directory: Where; made if needed.
        tables: Rows by variant, as :func:`megatron_lengthgen.study.mismatch.measure` gives them.
        settings: What was measured on what, for a reader.
    """
    files = [directory / f"mismatch.{suffix}" for suffix in ("md", "json", "png")]
    write_json(
        files[1],
        {
            "settings": dict(settings),
            "summary": summary(tables),
            "variants": {name: [_plain(row) for row in rows] for name, rows in tables.items()},
        },
    )
    _plot(files[2], tables)
    write_text(files[0], markdown(tables, settings))
    return files


def _plain(row: Row) -> dict[str, Any]:
    plain: dict[str, Any] = {"linear": row.linear}
    for mode in _TITLES:
        gaps = getattr(row, mode)
        plain[mode] = None if gaps is None else {part: _plain_gap(gap) for part, gap in gaps.items()}
    return plain


def _plain_gap(gap: Gap) -> dict[str, Any]:
    worst = {name: [one._asdict() for one in getattr(gap, name)] for name in ("worst_shift", "worst_ratio")}
    return dataclasses.asdict(gap) | worst


def summary(tables: Mapping[str, Sequence[Row]]) -> dict[str, dict[str, dict[str, dict[str, float] | None]]]:
    """Averages over linears: ``[variant][alone or together][inputs or outputs]`` -> shift, noise, ratio.

    None where no linear has a site, and so nothing to average.
    """
    return {
        name: {mode: {part: _average(_gaps(rows, mode, part)) for part in _PARTS} for mode in _TITLES}
        for name, rows in tables.items()
    }


def _gaps(rows: Sequence[Row], mode: Mode, part: Part) -> list[Gap]:
    return [getattr(row, mode)[part] for row in rows if getattr(row, mode) is not None]


def _average(gaps: Sequence[Gap]) -> dict[str, float] | None:
    return {name: fmean(getattr(gap, name) for gap in gaps) for name in ("shift", "noise", "ratio")} if gaps else None


def markdown(tables: Mapping[str, Sequence[Row]], settings: Mapping[str, Any]) -> str:
    """The report as text."""
    lines = ["# Mismatch between training and evaluation at the linears that follow a norm", ""]
    lines += [f"- {name}: {value}" for name, value in settings.items()]
    lines += [
        "",
        "Per coordinate, over all tokens and mask draws: mean shift = |mean in training - mean in evaluation| / "
        "standard deviation in evaluation; variance ratio = variance in training / variance in evaluation. Averaged "
        "over coordinates; largest and extremes in brackets. A shift no larger than its noise is what masks do by "
        "chance. Inputs are what enters the linear, outputs its pre-activations.",
        "",
        "## Mean over linears",
        "",
    ]
    for part in _PARTS:
        lines += _summary_table(part, summary(tables))
    lines += ["![mean shift and variance ratio of each linear](mismatch.png)", ""]
    for name, rows in tables.items():
        lines += [f"## {name}", ""]
        for mode in _TITLES:
            lines += _table(rows, mode)
        lines += _worst(rows)
    return "\n".join(lines).rstrip() + "\n"


def _summary_table(part: Part, means: Mapping[str, Any]) -> list[str]:
    columns = [f"{title}: {what}" for title in _TITLES.values() for what in ("mean shift", "noise", "variance ratio")]
    lines = [_line([part, *columns]), _line(["---"] * (len(columns) + 1))]
    for name, modes in means.items():
        cells = [name]
        for mode in _TITLES:
            mean = modes[mode][part]
            cells += (
                ["-"] * 3 if mean is None else [f"{mean['shift']:.4f}", f"{mean['noise']:.4f}", f"{mean['ratio']:.3f}"]
            )
        lines.append(_line(cells))
    return [*lines, ""]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _table(rows: Sequence[Row], mode: Mode) -> list[str]:
    columns = [f"{part}: {what}" for part in _PARTS for what in ("mean shift", "noise", "variance ratio")]
    lines = [f"{_TITLES[mode].capitalize()}:", "", _line(["linear", *columns]), _line(["---"] * (len(columns) + 1))]
    for row in rows:
        gaps = getattr(row, mode)
        cells = ["-"] * len(columns) if gaps is None else [cell for part in _PARTS for cell in _cells(gaps[part])]
        lines.append(_line([row.linear, *cells]))
    return [*lines, ""]


def _cells(gap: Gap) -> list[str]:
    return [
        f"{gap.shift:.4f} ({gap.max_shift:.3f})",
        f"{gap.noise:.4f}",
        f"{gap.ratio:.3f} ({gap.min_ratio:.3f} to {gap.max_ratio:.3f})",
    ]


def _worst(rows: Sequence[Row]) -> list[str]:
    """The linears whose coordinates are farthest off, one site at a time."""
    lines = []
    having = [row for row in rows if row.alone is not None]
    rankings: tuple[tuple[str, str, Callable[[Any], float]], ...] = (
        ("mean shift", "worst_shift", lambda one: one.shift),
        ("variance ratio", "worst_ratio", lambda one: max(one.ratio, 1 / max(one.ratio, 1e-30))),
    )
    for part in _PARTS:
        for title, name, badness in rankings:
            found = [(row.linear, getattr(row.alone[part], name)[0]) for row in having if row.alone is not None]
            found.sort(key=lambda item: -badness(item[1]))
            named = [
                f"{linear} coordinate {one.number} (shift {one.shift:.3f}, ratio {one.ratio:.3f}, mean {one.mean:.3g}, "
                f"std {one.std:.3g})"
                for linear, one in found[:_WORST_LINEARS]
            ]
            if named:
                lines.append(f"- worst {title} of {part}: {'; '.join(named)}")
    return [*lines, ""]


def _plot(path: Path, tables: Mapping[str, Sequence[Row]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, sharey="row", layout="constrained")
    for column, (mode, title) in enumerate(_TITLES.items()):
        top, bottom = axes[:, column]
        for number, (name, rows) in enumerate(tables.items()):
            places = [place for place, row in enumerate(rows) if getattr(row, mode) is not None]
            gaps = _gaps(rows, mode, "outputs")
            style = {"color": _COLOURS[number % len(_COLOURS)], "marker": "o", "markersize": 3, "linewidth": 1.4}
            # A linear that no dropout precedes has a shift of 0, which a logarithmic axis has no place for.
            top.plot(places, [gap.shift or math.nan for gap in gaps], label=name if column == 0 else None, **style)
            top.plot(places, [gap.noise or math.nan for gap in gaps], color=style["color"], linestyle=":", linewidth=1)
            bottom.plot(places, [gap.ratio for gap in gaps], **style)
        top.set_yscale("log")
        top.set_title(title, fontsize=10)
        bottom.axhline(1, color="grey", linestyle="--", linewidth=1)
        for axis in (top, bottom):
            axis.grid(alpha=0.3)
        _name_linears(bottom, [row.linear for row in next(iter(tables.values()))])
    axes[0, 0].set_ylabel("mean shift, evaluation std (dotted: chance)")
    axes[1, 0].set_ylabel("variance ratio, training / evaluation")
    figure.legend(loc="outside lower center", ncols=len(tables), fontsize=8)
    figure.suptitle("Pre-activations of linears that follow a norm: training against evaluation", fontsize=11)
    try:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=144)
    finally:
        pyplot.close(figure)


def _name_linears(axis: Any, names: Sequence[str]) -> None:
    """As many names as can be read."""
    step = -(-len(names) // 24)
    short = [name.removeprefix("decoder.layers.").replace("self_attention.", "").replace("mlp.", "") for name in names]
    axis.set_xticks(range(0, len(names), step), short[::step], rotation=60, ha="right", fontsize=7)
