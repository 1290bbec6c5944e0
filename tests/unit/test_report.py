"""Intervals against scipy, summaries and comparisons."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.compare import compare, write_comparison
from megatron_lengthgen.evaluation.report import summarise, write_report
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
    **identity: Any,
) -> RunStore:
    lengths = sorted({length for _, length in scores})
    store = RunStore.open(
        directory,
        identity={"seed": 42, "data_version": 1} | identity,
        scope={"tasks": tasks, "lengths": lengths, "samples": samples},
        info={"name": name},
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


def test_a_comparison_pairs_samples(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before", FULL, name="before")
    after = make_run(tmp_path / "after", FULL | {(TASKS[0], 2048): [1.0, 1.0, 0.0, 0.0]}, name="after")
    result = compare(before, after, note="Machinery.", train_length=1024)
    rows = {(row["task"], row["length"]): row for row in result["rows"]}
    changed = rows[TASKS[0], 2048]
    assert (changed["first"], changed["second"], changed["difference"]) == (0.0, 50.0, 50.0)
    assert (changed["pairs"], changed["better"], changed["worse"]) == (4, 2, 0)
    truth = paired_bootstrap([[1.0, 1.0, 0.0, 0.0]])
    assert (changed["low"], changed["high"]) == tuple(round(100 * end, 2) for end in truth[1:])
    same = rows[TASKS[1], 1024]
    assert (same["difference"], same["low"], same["high"]) == (0.0, 0.0, 0.0)
    assert [mean["difference"] for mean in result["means"]] == [0.0, 25.0]
    assert result["differing_settings"] == []
    write_comparison(result, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "compare.json").read_text())["rows"] == result["rows"]
    text = (tmp_path / "out" / "compare.md").read_text()
    assert "Machinery." in text and "| niah_single_1 | 2K | 4 | 0.0 | 50.0 | +50.0 [" in text
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_only_pairs_that_both_runs_finished_count(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a", {(TASKS[0], 1024): [0.0, 1.0, 1.0, 1.0]}, tasks=TASKS[:1])
    second = make_run(tmp_path / "b", {(TASKS[0], 1024): [1.0, 1.0]}, tasks=TASKS[:1])
    result = compare(first, second)
    assert (result["rows"][0]["pairs"], result["rows"][0]["first"], result["rows"][0]["second"]) == (2, 50.0, 100.0)
    assert any("not complete" in remark for remark in result["differing_settings"])
    assert result["first"]["name"] == "model (a)" and result["second"]["name"] == "model (b)"


def test_runs_that_cannot_be_paired_are_refused(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", {(TASKS[0], 1024): [1.0]}, tasks=TASKS[:1])
    other_seed = make_run(tmp_path / "seed", {(TASKS[0], 1024): [1.0]}, tasks=TASKS[:1], seed=7)
    with pytest.raises(UserError, match=r"seed = 42, .* has 7"):
        compare(one, other_seed)
    other_length = make_run(tmp_path / "length", {(TASKS[0], 4096): [1.0]}, tasks=TASKS[:1])
    with pytest.raises(UserError, match="no finished sample in common"):
        compare(one, other_length)


def test_a_comparison_says_where_the_runs_differ(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", FULL, chat_template="off")
    two = make_run(tmp_path / "two", FULL, chat_template="on")
    assert "chat_template: 'off' against 'on'" in compare(one, two)["differing_settings"]
