"""Intervals against scipy, summaries and comparisons."""

import json
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation import plot
from megatron_lengthgen.evaluation.benchmark import BENCHMARKS
from megatron_lengthgen.evaluation.compare import compare, write_comparison
from megatron_lengthgen.evaluation.report import averages, effective_length, summarise, write_report
from megatron_lengthgen.evaluation.run_store import RunStore
from megatron_lengthgen.evaluation.statistics import mean_interval, paired_bootstrap, wilson

TASKS = ["niah_single_1", "niah_multikey_1"]


@settings(deadline=None)
@given(st.integers(1, 600).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_is_scipys(counts: tuple[int, int]) -> None:
    hits, count = counts
    truth = stats.binomtest(hits, count).proportion_ci(0.95, method="wilson")
    assert wilson(hits / count, count) == pytest.approx((truth.low, truth.high), abs=1e-12)


def test_wilson_does_not_shrink_to_a_point() -> None:
    assert wilson(1.0, 16) == pytest.approx((0.806, 1.0), abs=1e-3)
    assert wilson(0.0, 16) == pytest.approx((0.0, 0.194), abs=1e-3)


@pytest.mark.parametrize(("mean", "count"), [(0.5, 0), (-0.1, 5), (1.1, 5), (float("nan"), 5)])
def test_wilson_refuses_what_is_no_mean(mean: float, count: int) -> None:
    with pytest.raises(ValueError):
        wilson(mean, count)


def test_the_interval_of_a_mean_covers_as_often_as_it_says() -> None:
    rng = np.random.default_rng(1)
    chances, count, trials = np.array([0.95, 0.6, 0.3]), 30, 2000
    covered = 0
    for scores in rng.binomial(count, chances, size=(trials, 3)) / count:
        _, low, high = mean_interval([(float(s), *wilson(float(s), count)) for s in scores])
        covered += int(low <= chances.mean() <= high)
    assert 0.935 <= covered / trials <= 0.975


def test_the_mean_of_one_estimate_is_itself() -> None:
    assert mean_interval([(0.5, 0.2, 0.7)]) == pytest.approx((0.5, 0.2, 0.7))


def test_weights_of_a_mean() -> None:
    parts = [(0.5, 0.2, 0.7), (1.0, 0.8, 1.0)]
    assert mean_interval(parts, weights=[3, 3]) == pytest.approx(mean_interval(parts))
    # The same estimate twice is not the same as one of twice the weight: only the latter keeps its interval.
    assert mean_interval(parts, weights=[1, 0]) == pytest.approx(parts[0])
    mean, low, high = mean_interval(parts, weights=[1, 3])
    assert mean == pytest.approx(0.875)
    assert (mean - low, high - mean) == pytest.approx((np.hypot(0.25 * 0.3, 0.75 * 0.2), 0.25 * 0.2))


def test_paired_bootstrap_is_near_scipys() -> None:
    differences = np.random.default_rng(3).choice([-1.0, 0.0, 0.0, 1.0, 1.0], size=60)
    truth = stats.bootstrap((differences,), np.mean, method="percentile", n_resamples=10_000, rng=7).confidence_interval
    mean, low, high = paired_bootstrap([list(differences)])
    assert mean == pytest.approx(differences.mean())
    assert (low, high) == pytest.approx((truth.low, truth.high), abs=0.02)
    assert paired_bootstrap([list(differences)]) == (mean, low, high)


def test_paired_bootstrap_weighs_tasks_alike() -> None:
    mean, low, high = paired_bootstrap([[1.0] * 2, [0.0] * 200])
    assert (mean, low, high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError):
        paired_bootstrap([[1.0], []])


# -- runs -------------------------------------------------------------------------------------------------------------


def make_run(
    directory: Path,
    scores: dict[tuple[str, int], list[float]],
    samples: int = 4,
    name: str = "model",
    tasks: list[str] = TASKS,
    info: dict[str, Any] | None = None,
    extra: Callable[[int], dict[str, Any]] = lambda index: {},
    **identity: Any,
) -> RunStore:
    lengths = sorted({length for _, length in scores})
    store = RunStore.open(
        directory,
        identity={"benchmark": "ruler", "seed": 42, "data_version": 1} | identity,
        scope={"tasks": tasks, "lengths": lengths, "samples": samples},
        info={"name": name} | (info or {}),
    )
    for (task, length), values in scores.items():
        if not values:
            continue
        with store.appending(task, length, 0) as file:
            for index, score in enumerate(values):
                file.write(
                    {
                        "index": index,
                        "score": score,
                        "pred": "7" if score else "",
                        "outputs": ["7"],
                        "finish": "stop" if score else "length",
                        "length": length,
                        "prompt_tokens": length - 128,
                        "generated_tokens": 8,
                        "seconds": 0.5,
                        "prompt_sha256": f"{task}{length}{index}",
                    }
                    | extra(index)
                )
    store.close()
    return store


FULL = {
    (TASKS[0], 1024): [1.0, 1.0, 1.0, 1.0],
    (TASKS[1], 1024): [1.0, 0.5, 0.0, 0.0],
    (TASKS[0], 2048): [0.0, 0.0, 0.0, 0.0],
    (TASKS[1], 2048): [1.0, 0.0, 0.0, 0.0],
}


def test_a_summary(tmp_path: Path) -> None:
    summary = write_report(make_run(tmp_path / "run", FULL), note="A note.", train_length=1024)
    assert summary["complete"]
    cells = {(cell["task"], cell["length"]): cell for cell in summary["cells"]}
    cell = cells[TASKS[1], 1024]
    assert cell["score"] == 37.5 and cell["empty"] == 2 and cell["stopped_by_limit"] == 2
    assert (cell["low"], cell["high"]) == tuple(round(100 * end, 2) for end in wilson(0.375, 4))
    assert [mean["score"] for mean in summary["means"]] == [68.75, 12.5]
    assert summary["means"][0]["tasks"] == 2 and summary["means"][0]["of"] == 13
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    text = (tmp_path / "run" / "summary.md").read_text()
    assert "A note." in text and "| mean (2 of 13 tasks) | 68.8 [" in text and "not complete" not in text
    assert (tmp_path / "run" / "score_vs_length.png").read_bytes().startswith(b"\x89PNG")
    assert not [path for path in (tmp_path / "run").iterdir() if path.suffix == ".tmp"]


def test_missing_samples_are_named_and_not_averaged_as_zero(tmp_path: Path) -> None:
    partial = FULL | {(TASKS[0], 2048): [1.0], (TASKS[1], 2048): []}
    summary = write_report(make_run(tmp_path / "run", partial))
    assert not summary["complete"]
    empty = next(cell for cell in summary["cells"] if cell["samples"] == 0)
    assert (empty["task"], empty["length"], empty["score"]) == (TASKS[1], 2048, None)
    assert summary["means"][1] == summary["means"][1] | {"score": 100.0, "tasks": 1, "complete": False}
    text = (tmp_path / "run" / "summary.md").read_text()
    assert "partial: 1 of 4" in text and "no samples" in text and "partial: 1 of 2 tasks" in text
    assert "not complete" in text


def test_a_run_without_any_sample_has_a_summary(tmp_path: Path) -> None:
    nothing: dict[tuple[str, int], list[float]] = {(TASKS[0], 1024): []}
    summary = write_report(make_run(tmp_path / "run", nothing, tasks=TASKS[:1]))
    assert summary["cells"][0]["score"] is None and summary["means"][0]["score"] is None


def test_samples_beyond_those_asked_for_do_not_count(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run", {(TASKS[0], 1024): [1.0, 1.0, 0.0, 0.0]}, samples=2, tasks=TASKS[:1])
    assert summarise(store)["cells"][0]["score"] == 100.0


RULER = BENCHMARKS["ruler"]


def means(scores: list[float], tasks: int = 13, lengths: tuple[int, ...] = RULER.lengths) -> list[dict[str, Any]]:
    return [
        {"length": length, "tasks": tasks, "score": score, "low": score - 1, "high": score + 1}
        for length, score in zip(lengths, scores, strict=False)
    ]


@pytest.mark.parametrize(
    ("scores", "average", "increasing", "decreasing"),
    [
        # As published in the README of NVIDIA/RULER.
        ([96.7, 96.6, 96.4, 96.0, 95.4, 95.1], 96.0, 95.7, 96.3),  # Jamba-1.5-large
        ([96.7, 95.8, 96.0, 95.9, 95.9, 94.4], 95.8, 95.5, 96.1),  # Gemini-1.5-pro
        ([95.6, 95.6, 94.8, 94.6, 92.8, 90.0], 93.9, 93.1, 94.8),  # Jamba-1.5-mini
    ],
)
def test_averages_over_lengths_are_the_published_ones(
    scores: list[float], average: float, increasing: float, decreasing: float
) -> None:
    result = averages(means(scores), 13, RULER)
    assert result is not None and result["benchmark_lengths"]
    # Published with one decimal, as are the scores that they are taken over.
    assert result["average"]["score"] == pytest.approx(average, abs=0.1)
    assert result["increasing"]["score"] == pytest.approx(increasing, abs=0.1)
    assert result["decreasing"]["score"] == pytest.approx(decreasing, abs=0.1)


def test_there_is_no_average_over_what_is_not_there() -> None:
    assert averages(means([90.0]), 13, RULER) is None
    assert averages([*means([90.0]), *means([80.0], tasks=12)], 13, RULER) is None
    other = averages(means([90.0, 80.0], lengths=(4096, 8192)), 13, RULER)
    assert other is not None and not other["benchmark_lengths"]


@pytest.mark.parametrize(
    ("scores", "length", "text"),
    [
        ([96.0, 90.0, 85.7, 80.0], 16384, "16K"),
        ([96.0, 90.0, 85.6, 80.0], 8192, "8K"),  # it must exceed the threshold
        ([96.0, 90.0], 8192, "at least 8K, the longest length here"),
        ([85.6, 80.0], None, "below 4K, the shortest length here"),
        ([96.0, 80.0, 90.0, 70.0], 16384, "16K, though not at 8K"),
    ],
)
def test_the_effective_length(scores: list[float], length: int | None, text: str) -> None:
    assert effective_length(means(scores), RULER) == {"threshold": 85.6, "length": length, "text": text}


def test_an_effective_length_needs_all_tasks(tmp_path: Path) -> None:
    tasks = list(RULER.tasks)
    scores = {(task, 4096): [1.0] * 4 for task in tasks}
    whole = write_report(make_run(tmp_path / "whole", scores, tasks=tasks))
    assert whole["effective_length"]["length"] == 4096
    del scores["qa_2", 4096]
    part = write_report(make_run(tmp_path / "part", scores, tasks=tasks[:-1]))
    assert part["effective_length"]["length"] is None
    assert "not given: it needs all 13 tasks, and this run has 12" in (tmp_path / "part" / "summary.md").read_text()
    text = (tmp_path / "whole" / "summary.md").read_text()
    assert "Effective length (mean above 85.6): at least 4K" in text and "| mean | 100.0 [" in text


def test_depths_fall_into_their_bands(tmp_path: Path) -> None:
    depths = [[0.0], [0.1], [1.0], [0.1, 0.95]]
    store = make_run(
        tmp_path / "run",
        {(TASKS[0], 1024): [1.0, 0.0, 1.0, 0.5]},
        tasks=TASKS[:1],
        extra=lambda i: {"depths": depths[i]},
    )
    [cell] = write_report(store)["cells"]
    assert [band["samples"] for band in cell["depths"]] == [1, 2, 0, 0, 0, 0, 0, 0, 0, 2]
    assert [band["score"] for band in cell["depths"]] == [100.0, 25.0, *[None] * 7, 75.0]
    assert (tmp_path / "run" / "score_vs_depth.png").read_bytes().startswith(b"\x89PNG")
    assert "score_vs_depth.png" in (tmp_path / "run" / "summary.md").read_text()


def test_a_run_without_depths_has_no_picture_of_them(tmp_path: Path) -> None:
    write_report(make_run(tmp_path / "run", FULL))
    assert not (tmp_path / "run" / "score_vs_depth.png").exists()
    assert "score_vs_depth.png" not in (tmp_path / "run" / "summary.md").read_text()


def test_how_answers_ended_is_told_by_task(tmp_path: Path) -> None:
    summary = write_report(make_run(tmp_path / "run", FULL))
    first, second = summary["answers"]
    assert (first["samples"], first["empty"], first["empty_rate"], first["stopped_by_limit_rate"]) == (8, 4, 50.0, 50.0)
    assert (second["empty"], second["empty_rate"]) == (5, 62.5)
    assert "| niah_multikey_1 | 8 | 5 (62.5 %) | 5 (62.5 %) |" in (tmp_path / "run" / "summary.md").read_text()


@pytest.mark.parametrize(("device", "unit"), [("NVIDIA H200", "GPU-seconds"), ("CPU", "process-seconds")])
def test_cost_counts_all_processes_of_a_model(tmp_path: Path, device: str, unit: str) -> None:
    summary = write_report(make_run(tmp_path / "run", FULL, extra=lambda i: {"processes": 4, "device": device}))
    cost = summary["cost"]
    # 16 samples of half a second; prompts of 896 and 1,920 tokens with 8 more each.
    assert (cost["unit"], cost["amount"], cost["devices"]) == (unit, 32.0, [device])
    assert cost["tokens"] == 8 * (904 + 1928) and cost["tokens_per_second"] == cost["tokens"] / 8
    assert summary["cells"][0]["tokens_per_second"] == 1808.0
    assert f"32 {unit} (0.01 hours) on {device}" in (tmp_path / "run" / "summary.md").read_text()


def test_the_axis_above_counts_in_multiples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(plot, "_save", lambda figure, path: figures.append(figure))
    line = [plot.Point(length, 50.0, 40.0, 60.0) for length in (2048, 4096, 32768)]
    plot.score_vs_length(tmp_path / "x.png", [plot.Run("a", {"t": line})], train_length=4096)
    plot.score_vs_length(tmp_path / "x.png", [plot.Run("a", {"t": line})])
    labels = [[tick.get_text() for tick in axis.get_xticklabels()] for axis in figures[0].axes[0].child_axes]
    assert labels == [["0.5x", "1x", "8x"]] and not figures[1].axes[0].child_axes
    assert [tick.get_text() for tick in figures[0].axes[0].get_xticklabels()] == ["2K", "4K", "32K"]


def test_what_a_run_was_started_with_stays_in_its_report(tmp_path: Path) -> None:
    store = make_run(tmp_path / "run", FULL, info={"note": "Then.", "train_length": 512})
    assert [summarise(store)[key] for key in ("note", "train_length")] == ["Then.", 512]
    assert [summarise(store, "Now.", 256)[key] for key in ("note", "train_length")] == ["Now.", 256]


def test_three_runs_are_compared_with_the_first(tmp_path: Path) -> None:
    base = make_run(tmp_path / "base", FULL, name="base", info={"train_length": 1024})
    same = make_run(tmp_path / "same", FULL, name="other", info={"train_length": 1024})
    better = {cell: [1.0] * 4 for cell in FULL}
    best = make_run(tmp_path / "best", better, name="other", info={"train_length": 1024})
    result = compare([base, same, best])
    assert result["baseline"] == "base" and result["train_length"] == 1024
    assert [pair["name"] for pair in result["comparisons"]] == ["other (same)", "other (best)"]
    assert [[mean["difference"] for mean in pair["means"]] for pair in result["comparisons"]] == [
        [0.0, 0.0],
        [31.25, 87.5],
    ]
    write_comparison(result, tmp_path / "out")
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "## other (same) against base" in text and "## other (best) against base" in text
    assert "| mean (2 of 13 tasks) | 2K | 8 | 12.5 | 100.0 | +87.5 [" in text
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_runs_with_other_training_lengths_share_none(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(n), FULL, info={"train_length": n}) for n in (512, 1024)]
    assert compare(runs)["train_length"] is None and compare(runs, train_length=256)["train_length"] == 256


def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", FULL)
    with pytest.raises(UserError, match="is given twice"):
        compare([run, RunStore(tmp_path / "." / "run")])
    with pytest.raises(UserError, match="two or more runs"):
        compare([run])


def test_a_comparison_pairs_samples(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before", FULL, name="before")
    after = make_run(tmp_path / "after", FULL | {(TASKS[0], 2048): [1.0, 1.0, 0.0, 0.0]}, name="after")
    result = compare([before, after], note="Machinery.", train_length=1024)
    [pair] = result["comparisons"]
    rows = {(row["task"], row["length"]): row for row in pair["rows"]}
    changed = rows[TASKS[0], 2048]
    assert (changed["baseline"], changed["score"], changed["difference"]) == (0.0, 50.0, 50.0)
    assert (changed["pairs"], changed["better"], changed["worse"]) == (4, 2, 0)
    truth = paired_bootstrap([[1.0, 1.0, 0.0, 0.0]])
    assert (changed["low"], changed["high"]) == tuple(round(100 * end, 2) for end in truth[1:])
    same = rows[TASKS[1], 1024]
    assert (same["difference"], same["low"], same["high"]) == (0.0, 0.0, 0.0)
    assert [mean["difference"] for mean in pair["means"]] == [0.0, 25.0]
    assert pair["differing_settings"] == []
    write_comparison(result, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["comparisons"] == [pair]
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "Machinery." in text and "| niah_single_1 | 2K | 4 | 0.0 | 50.0 | +50.0 [" in text
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_only_pairs_that_both_runs_finished_count(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", {(TASKS[0], 1024): [0.0, 1.0, 1.0, 1.0]}, tasks=TASKS[:1])
    second = make_run(tmp_path / "b", {(TASKS[0], 1024): [1.0, 1.0]}, tasks=TASKS[:1])
    result = compare([first, second])
    [pair] = result["comparisons"]
    [row] = pair["rows"]
    assert (row["pairs"], row["baseline"], row["score"]) == (2, 50.0, 100.0)
    assert any("not complete" in remark for remark in pair["differing_settings"])
    assert [run["name"] for run in result["runs"]] == ["model (a)", "model (b)"]


def test_runs_that_cannot_be_paired_are_refused(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", {(TASKS[0], 1024): [1.0]}, tasks=TASKS[:1])
    other_seed = make_run(tmp_path / "seed", {(TASKS[0], 1024): [1.0]}, tasks=TASKS[:1], seed=7)
    with pytest.raises(UserError, match=r"seed = 42, .* has 7"):
        compare([one, other_seed])
    other_length = make_run(tmp_path / "length", {(TASKS[0], 4096): [1.0]}, tasks=TASKS[:1])
    with pytest.raises(UserError, match="no finished sample in common"):
        compare([one, other_length])


def test_a_comparison_says_where_the_runs_differ(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", FULL, chat_template="off")
    two = make_run(tmp_path / "two", FULL, chat_template="on")
    assert "chat_template: 'off' against 'on'" in compare([one, two])["comparisons"][0]["differing_settings"]


@pytest.mark.parametrize("room", [500, 4000, 20000])
def test_a_comparison_on_a_full_disk_leaves_no_half_file(tmp_path: Path, room: int) -> None:
    """Old files stay whole until new ones are, and nothing else is left behind."""
    one, two = make_run(tmp_path / "one", FULL), make_run(tmp_path / "two", FULL, name="two")
    output = tmp_path / "out"
    write_comparison(compare([one, two], note="Old."), output)
    old = {path.name: path.read_bytes() for path in output.iterdir()}
    write_comparison(compare([one, two], note="New."), tmp_path / "new")
    new = {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that grows beyond that fails in the middle of a write, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        with pytest.raises(UserError, match=rf"^cannot write to --output {output}: File too large$"):
            write_comparison(compare([one, two], note="New."), output)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    left = {path.name: path.read_bytes() for path in output.iterdir()}
    assert left.keys() == old.keys() and all(left[name] in (old[name], new[name]) for name in left)
