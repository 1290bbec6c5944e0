"""Panels of curves with intervals, as PNG."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lengthgen.files import atomic_file

__all__ = ["Axis", "Curve", "Panel", "Point", "draw"]

# Okabe and Ito's palette, wine and grey: told apart by colour-blind readers.
_COLOURS = ("#000000", "#E69F00", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#882255", "#999999")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "h")


class Point(NamedTuple):
    """A mean with its interval, the clusters' own values, and a word beside it."""

    x: float
    y: float
    low: float = math.nan
    high: float = math.nan
    values: tuple[float, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Curve:
    """A curve; those with the same ``style`` look the same in all panels."""

    name: str
    points: Sequence[Point]
    style: int
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """How an axis looks.

    Attributes:
        label: Its label.
        log: Logarithmic, base 2 along x and 10 along y.
        ends: What it spans; None for what the curves need.
        suffix: Of the tick labels on a logarithmic x axis.
    """

    label: str
    log: bool = False
    ends: tuple[float, float] | None = None
    suffix: str = ""


@dataclass(frozen=True)
class Panel:
    """Curves on axes of their own."""

    title: str
    curves: Sequence[Curve]
    x: Axis
    y: Axis


def draw(path: Path, rows: Sequence[Sequence[Panel]], title: str) -> None:
    """Draw rows of panels with one legend below them.

    Args:
        path: The PNG.
        rows: Panels, row by row; rows may differ in length.
        title: Above all panels.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = max(map(len, rows))
    size = (max(4.1 * columns, 6.4), 3.5 * len(rows) + 0.9)
    figure, axes = pyplot.subplots(len(rows), columns, figsize=size, squeeze=False, layout="constrained")
    legend: dict[str, Any] = {}
    for row, places in zip(rows, axes, strict=True):
        for panel, axis in zip(row, places, strict=False):
            for curve in panel.curves:
                legend.setdefault(curve.name, _curve(axis, curve))
            _dress(axis, panel)
        for axis in places[len(row) :]:
            axis.set_visible(False)
    wide = max(1, int(size[0] / 0.085 / (max(map(len, legend), default=1) + 8)))
    if legend:
        figure.legend(
            legend.values(),
            legend.keys(),
            loc="outside lower center",
            ncols=wide,
            fontsize=8,
            frameon=False,
            handlelength=3,
        )
    figure.suptitle(title, fontsize=11)
    try:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=144)
    finally:
        pyplot.close(figure)


def _curve(axis: Any, curve: Curve) -> Any:
    """Mean as a line, interval as a band, clusters as small points; returns the line."""
    points = sorted(curve.points)
    colour = _COLOURS[curve.style % len(_COLOURS)]
    x = [point.x for point in points]
    (line,) = axis.plot(
        x,
        [point.y for point in points],
        color=colour,
        marker=_MARKERS[curve.style % len(_MARKERS)],
        markersize=4.5,
        linewidth=1.7,
        linestyle="--" if curve.dashed else "-",
        markerfacecolor="white" if curve.dashed else colour,
        zorder=3,
    )
    axis.fill_between(x, [p.low for p in points], [p.high for p in points], color=colour, alpha=0.12, linewidth=0)
    for point in points:
        axis.plot([point.x] * len(point.values), point.values, ".", color=colour, alpha=0.45, markersize=3.5, zorder=2)
        if point.note:
            axis.annotate(point.note, point[:2], xytext=(4, 4), textcoords="offset points", fontsize=7, color=colour)
    return line


def _dress(axis: Any, panel: Panel) -> None:
    ticks = sorted({point.x for curve in panel.curves for point in curve.points})
    if panel.x.log:
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks, [f"{tick:g}{panel.x.suffix}" for tick in ticks])
        axis.minorticks_off()
    if panel.y.log and any(point.y > 0 for curve in panel.curves for point in curve.points):
        from matplotlib.ticker import LogLocator, NullFormatter

        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:.3g}")
        axis.yaxis.set_minor_formatter(NullFormatter())
    if panel.y.ends:
        margin = 0.03 * (panel.y.ends[1] - panel.y.ends[0])
        axis.set_ylim(panel.y.ends[0] - margin, panel.y.ends[1] + margin)
    axis.set_xlabel(panel.x.label)
    axis.set_ylabel(panel.y.label)
    axis.set_title(panel.title, fontsize=9.5)
    axis.grid(alpha=0.3)
