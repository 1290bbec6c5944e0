"""Score against length, and against the depth of what was asked for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_lengthgen.files import atomic_file

from .lengths import length_name

__all__ = ["Point", "Run", "score_vs_depth", "score_vs_length"]

# Okabe and Ito's palette: told apart by colour-blind readers.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


class Point(NamedTuple):
    """Score and its interval, in per cent, at a length in tokens."""

    length: int
    score: float
    low: float
    high: float


@dataclass(frozen=True)
class Run:
    """Curves of one model, by task (or name of a mean)."""

    name: str
    lines: Mapping[str, Sequence[Point]]


def score_vs_length(path: Path, runs: Sequence[Run], train_length: int | None = None, title: str = "") -> None:
    """Draw one panel for a single run with all its curves, or one panel per curve with all runs, as PNG.

    A single run with more curves than there are colours also gets a panel for each.

    Args:
        runs: one run, or several to compare.
        train_length: drawn as a vertical line; the axis above then counts in multiples of it.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    if len(runs) == 1 and len(runs[0].lines) <= len(_COLOURS):
        panels = {"": [(name, points) for name, points in runs[0].lines.items()]}
    else:
        names = dict.fromkeys(name for run in runs for name in run.lines)
        # The mean, where there is one, comes last in a run and first in the picture.
        ordered = sorted(names, key=lambda name: not name.startswith("mean"))
        panels = {name: [(run.name, run.lines.get(name, [])) for run in runs] for name in ordered}
    columns = min(3, len(panels))
    rows = math.ceil(len(panels) / columns)
    size = (7.2, 4.6) if len(panels) == 1 else (4.6 * columns, 3.7 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    lengths = sorted({point.length for run in runs for points in run.lines.values() for point in points})
    for axis, (name, curves) in zip(axes.flat, panels.items(), strict=False):
        _panel(axis, curves, lengths, train_length)
        if name and len(panels) > 1:
            axis.set_title(name, fontsize=10)
        elif name:
            title = f"{title}: {name}"
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("score, %")
    if lengths:
        axes.flat[0].legend(fontsize=8, framealpha=0.9)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def score_vs_depth(path: Path, maps: Mapping[str, Mapping[int, Sequence[float | None]]], title: str = "") -> None:
    """Draw one heat map per task, lengths from left to right and depths from top to bottom, as PNG.

    Args:
        maps: by task and length, the scores in per cent of equally wide bands of depth, from the start of the prompt to
            its end; None, left grey, where no sample asked.
    """
    import matplotlib

    matplotlib.use("Agg")
    import numpy as np
    from matplotlib import pyplot

    columns = min(4, len(maps))
    rows = math.ceil(len(maps) / columns)
    size = (max(4.5, 3.4 * columns), 3.4 * rows)
    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    colours = matplotlib.colormaps["viridis"].with_extremes(bad="lightgrey")
    for axis, (task, by_length) in zip(axes.flat, maps.items(), strict=False):
        lengths = sorted(by_length)
        # [bands, lengths]
        grid = np.array([by_length[length] for length in lengths], dtype=float).T
        image = axis.imshow(np.ma.masked_invalid(grid), cmap=colours, vmin=0, vmax=100, aspect="auto")
        axis.set_xticks(range(len(lengths)), [length_name(length) for length in lengths])
        edges = range(0, len(grid) + 1, 2)
        axis.set_yticks([edge - 0.5 for edge in edges], [f"{100 * edge // len(grid)} %" for edge in edges])
        axis.set_title(task, fontsize=10)
    for axis in axes.flat[len(maps) :]:
        axis.set_visible(False)
    for axis in axes[:, 0]:
        axis.set_ylabel("text before the needle")
    figure.colorbar(image, ax=axes, label="score, %", shrink=0.9)
    figure.suptitle(title, fontsize=11)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    try:
        with atomic_file(path) as temporary:
            figure.savefig(temporary, format="png", dpi=144)
    finally:
        pyplot.close(figure)


def _panel(
    axis: Any, curves: Sequence[tuple[str, Sequence[Point]]], lengths: Sequence[int], train_length: int | None
) -> None:
    for position, (name, points) in enumerate(curves):
        if not points:
            continue
        # Curves are moved apart a little, so that bars of equal scores do not hide one another.
        shift = 2 ** (0.05 * (position - (len(curves) - 1) / 2))
        x = [point.length * shift for point in points]
        y = [point.score for point in points]
        bars = [
            [max(0.0, p.score - p.low) for p in points],
            [max(0.0, p.high - p.score) for p in points],
        ]
        mean = name.startswith("mean") and len(curves) > 1
        axis.errorbar(
            x,
            y,
            yerr=bars,
            label=name,
            color="black" if mean else _COLOURS[position % len(_COLOURS)],
            marker=_MARKERS[position % len(_MARKERS)],
            linewidth=2.4 if mean else 1.6,
            markersize=5,
            capsize=3,
            elinewidth=1,
        )
    axis.set_xscale("log", base=2)
    axis.set_xticks(lengths, [length_name(n) for n in lengths])
    axis.minorticks_off()
    if lengths:
        axis.set_xlim(min(lengths) / 1.3, max(lengths) * 1.3)
    axis.set_ylim(-4, 104)
    axis.set_xlabel("length of prompt and answer, tokens")
    axis.grid(alpha=0.3)
    if train_length:
        axis.axvline(train_length, color="grey", linestyle="--", linewidth=1.2, label=f"training length {train_length}")
        low, high = axis.get_xlim()
        axis.set_xlim(min(low, train_length / 1.3), max(high, train_length * 1.3))
        above = axis.secondary_xaxis("top")
        above.set_xticks(lengths, [f"{n / train_length:.3g}x" for n in lengths])
        above.minorticks_off()
        above.tick_params(labelsize=8)
        above.set_xlabel("multiple of the training length", fontsize=8)
