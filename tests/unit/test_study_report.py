"""The report of a study on cells whose answers are known."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.study import statistics
from megatron_lengthgen.study.report import write_report
from megatron_lengthgen.study.statistics import clustered_interval, paired_differences
from megatron_lengthgen.study.summary import summarise

Accuracy = float | Sequence[float]
SITES = ["attention", "mlp", "output"]
DEFAULTS = {
    "p": None,
    "fill": "zero",
    "statistics": "batch",
    "sites": ["attention", "mlp", "mamba"],
    "start_step": 0,
    "ramp_steps": 0,
    "weight_decay": 1.0,
}
FOUR: dict[str, dict[str, Any]] = {
    "none": {"placement": "none"},
    "pre_norm": {"placement": "pre_norm", "p": 0.1},
    "pre_linear": {"placement": "pre_linear", "p": 0.1, "sites": SITES},
    "vpad": {"placement": "vpad", "p": 0.1, "sites": SITES},
}


def spread(mean: float, count: int = 20) -> list[float]:
    """``count`` scores of 0 and 1 with the given mean."""
    ones = round(mean * count)
    assert abs(ones - mean * count) < 1e-9
    return [1.0] * ones + [0.0] * (count - ones)


def evaluation(
    multiple: float,
    accuracy: Accuracy,
    *,
    step: int = 100,
    scale: float | str = 1.0,
    loss: float = 0.1,
    error: float = 0.0,
) -> dict[str, Any]:
    scores = spread(accuracy) if isinstance(accuracy, float) else list(accuracy)
    entry = {"step": step, "attention_scale": scale, "length": round(64 * multiple), "accuracy": scores}
    return entry | {"error": [error] * len(scores), "loss": [loss] * len(scores)}


def cell(
    variant: str,
    seed: int,
    evaluations: list[dict[str, Any]],
    settings: Mapping[str, Any] | None = None,
    task: str = "recall",
) -> dict[str, Any]:
    return {
        "variant": variant,
        "seed": seed,
        "settings": {**DEFAULTS, **(FOUR[variant] if settings is None else settings)},
        "task": {"name": task},
        "training_length": 64,
        "phase1": {"steps": 50},
        "steps": 100,
        "seconds": 1.0,
        "training_loss": [[50, 0.4], [100, 0.2]],
        "evaluations": evaluations,
    }


def ladder(accuracy: Mapping[str, Sequence[float]], multiple: float = 32) -> list[dict[str, Any]]:
    """Cells of the four placements from accuracies by seed."""
    return [
        cell(name, seed, [evaluation(1, 1.0), evaluation(multiple, value)])
        for name, values in accuracy.items()
        for seed, value in enumerate(values)
        if not math.isnan(value)
    ]


def only(entries: list[dict[str, Any]], **wanted: Any) -> dict[str, Any]:
    (found,) = [entry for entry in entries if all(entry[key] == value for key, value in wanted.items())]
    return found


IN_ORDER = {"none": [0.1, 0.2], "pre_norm": [0.3, 0.4], "pre_linear": [0.5, 0.6], "vpad": [0.8, 0.7]}


# Intervals


@pytest.mark.parametrize("seeds", [3, 5])
def test_intervals_cover_the_mean_of_all_seeds(seeds: int) -> None:
    """Percentiles alone would cover in about 82 and 86 of 100 of these studies."""
    random = np.random.default_rng(seeds)
    trials, covered = 300, 0
    for _ in range(trials):
        clusters = [random.normal(random.normal(0, 0.1), 0.3, size=25) for _ in range(seeds)]
        _, low, high = clustered_interval(clusters, (-9, 9))
        covered += low <= 0 <= high
    assert covered / trials >= 0.93


def test_the_interval_of_one_seed_covers_that_seed() -> None:
    random = np.random.default_rng(0)
    trials, covered = 300, 0
    for _ in range(trials):
        _, low, high = clustered_interval([random.binomial(6, 0.7, size=60) / 6], (0, 1))
        covered += low <= 0.7 <= high
    assert 0.91 <= covered / trials <= 0.98


def test_the_interval_of_one_seed_is_scipys_bootstrap() -> None:
    values = np.random.default_rng(3).binomial(6, 0.8, size=80) / 6
    truth = stats.bootstrap((values,), np.mean, method="percentile", n_resamples=10_000, rng=7).confidence_interval
    mean, low, high = clustered_interval([values], (0, 1))
    assert mean == pytest.approx(values.mean())
    assert (low, high) == pytest.approx((truth.low, truth.high), abs=0.006)


def test_resamples_vary_as_two_levels_of_drawing_do() -> None:
    random = np.random.default_rng(1)
    clusters = [random.normal(place, 1 + place, size=count) for place, count in enumerate((10, 20, 40))]
    weights = statistics._resampling_weights((10, 20, 40))
    assert weights.sum(1) == pytest.approx(1)
    assert weights.mean(0) == pytest.approx(np.repeat([1 / 30, 1 / 60, 1 / 120], [10, 20, 40]), abs=3e-3)
    means = weights @ np.concatenate(clusters)
    between = np.var([values.mean() for values in clusters]) / 3
    within = sum(np.var(values) / len(values) for values in clusters) / 9
    assert means.var() == pytest.approx(between + within, rel=0.08)


def test_seeds_that_differ_widen_an_interval() -> None:
    pooled = np.asarray(spread(0.5, 40))
    mean, low, high = clustered_interval([pooled[:20], pooled[20:]], (0, 1))
    _, alone_low, alone_high = clustered_interval([pooled], (0, 1))
    assert (mean, low, high) == (0.5, 0, 1)  # two seeds that disagree in all tell nothing
    assert alone_high - alone_low < 0.4


@pytest.mark.parametrize("value", [1.0, 0.0])
def test_equal_values_leave_open_what_so_many_leave_open(value: float) -> None:
    mean, low, high = clustered_interval([np.full(10, value)] * 3, (0, 1))
    truth = stats.binomtest(round(30 * value), 30).proportion_ci(0.95, method="exact")
    assert mean == value
    assert (low, high) == pytest.approx((truth.low, truth.high))


def test_an_interval_of_equal_differences_has_zero_inside() -> None:
    mean, low, high = clustered_interval([np.zeros(50)], (-1, 1))
    assert mean == 0 and low == -high and 0.05 < high < 0.1


@pytest.mark.parametrize("clusters", [[], [np.array([])], [np.ones(3), np.array([])]])
def test_clusters_without_values_are_refused(clusters: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="at least one value"):
        clustered_interval(clusters, (0, 1))


def test_differences_pair_the_first_sequences_of_shared_seeds() -> None:
    upper = {0: np.array([1.0, 0.5, 0.0]), 1: np.array([1.0]), 3: np.array([0.0])}
    lower = {0: np.array([0.5, 0.5]), 2: np.array([0.0]), 3: np.array([1.0, 1.0])}
    found = paired_differences(upper, lower)
    assert {seed: values.tolist() for seed, values in found.items()} == {0: [0.5, 0.0], 3: [-1.0]}


# The order of placements


def test_the_order_is_found() -> None:
    (order,) = summarise(ladder(IN_ORDER))["order"]
    assert order["holds"] is True
    assert order["variants"] == list(FOUR)
    assert order["means"] == pytest.approx({"none": 0.15, "pre_norm": 0.35, "pre_linear": 0.55, "vpad": 0.75})
    assert order["seeds_in_order"] == 2 and order["absent_placements"] == []
    assert order["statement"].startswith("Found: accuracy is ordered none < Pre-Norm < Pre-Linear < VPAD at 32x")
    assert "none 0.150, Pre-Norm 0.350, Pre-Linear 0.550, VPAD 0.750" in order["statement"]


def test_an_order_that_is_not_there_is_not_found() -> None:
    (order,) = summarise(ladder(IN_ORDER | {"pre_norm": [0.3, 0.0], "none": [0.1, 0.3]}))["order"]
    assert order["holds"] is False and order["seeds_in_order"] == 1
    assert order["statement"].startswith("Not found: accuracy is not ordered none < Pre-Norm < Pre-Linear < VPAD")
    assert order["statement"].endswith("No gain of Pre-Norm over none.")


def test_a_tie_is_no_order() -> None:
    (order,) = summarise(ladder(IN_ORDER | {"vpad": [0.6, 0.5]}))["order"]
    assert order["holds"] is False
    step = order["steps"][-1]
    assert (step["mean"], step["above"], step["below"], step["ties"]) == (0, 1, 1, 0)
    (order,) = summarise(ladder(IN_ORDER | {"vpad": IN_ORDER["pre_linear"]}))["order"]
    step = order["steps"][-1]
    assert step["ties"] == 2 and not step["excludes_zero"] and step["low"] < 0 < step["high"]


def test_means_of_the_order_are_over_seeds_that_all_placements_have() -> None:
    """Seed 2 would upset the order of those that have it."""
    third = {"none": 1.0, "pre_norm": 0.0, "pre_linear": 1.0, "vpad": math.nan}
    accuracy = {name: [*values, third[name]] for name, values in IN_ORDER.items()}
    summary = summarise(ladder(accuracy))
    (order,) = summary["order"]
    assert order["seeds"] == [0, 1] and order["holds"] is True
    assert summary["missing"] == [["vpad", 2]]
    assert only(summary["accuracy"], variant="pre_linear", multiple=32)["mean"] == pytest.approx(0.7)


def test_an_incomplete_order_says_so() -> None:
    (order,) = summarise(ladder({name: IN_ORDER[name] for name in ("none", "vpad")}))["order"]
    assert order["holds"] is True and order["absent_placements"] == ["Pre-Norm", "Pre-Linear"]
    assert order["statement"].endswith("The order is incomplete: no Pre-Norm and no Pre-Linear at these settings.")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [["none", "pre_norm", "pre_linear", "vpad"]]),
        ({"p": 0.2}, [["none", "pre_norm", "pre_linear"], ["none", "vpad"]]),
        ({"sites": ["attention"]}, [["none", "pre_norm", "vpad"], ["none", "pre_norm", "pre_linear"]]),
        ({"weight_decay": 0.0}, [["none", "pre_norm", "pre_linear"]]),
        ({"fill": "mean"}, [["none", "pre_norm", "pre_linear", "vpad"]]),
        ({"sites": SITES[::-1]}, [["none", "pre_norm", "pre_linear", "vpad"]]),
    ],
)
def test_placements_are_ordered_at_equal_settings_only(change: dict[str, Any], expected: list[list[str]]) -> None:
    cells = ladder(IN_ORDER)
    for one in cells:
        if one["variant"] == "vpad":
            one["settings"] = {**one["settings"], **change}
    assert [order["variants"] for order in summarise(cells)["order"]] == expected


def test_the_target_is_the_largest_common_length_up_to_32() -> None:
    def target(**multiples: list[float]) -> float | None:
        cells = [cell(name, 0, [evaluation(m, 0.5) for m in found]) for name, found in multiples.items()]
        return summarise(cells)["target_multiple"]

    assert target(none=[1, 8, 32, 64], vpad=[1, 8, 32, 64]) == 32
    assert target(none=[1, 8, 32, 64], vpad=[1, 8, 64]) == 8
    assert target(none=[1], vpad=[1]) == 1
    assert target(none=[64], vpad=[64, 128]) == 64
    assert target(none=[1, 1.5], vpad=[1, 1.5]) == 1.5
    assert target(none=[1], vpad=[8]) is None


# Other comparisons


def test_differences_are_paired_by_seed_and_sequence() -> None:
    random = np.random.default_rng(0)
    cells = []
    for seed in range(4):
        hard = random.random(60)
        for name, gain in (("none", 0.0), ("pre_norm", 0.1), ("vpad", 0.1 + 0.01 * seed)):
            cells.append(cell(name, seed, [evaluation(32, (0.5 * hard + gain).tolist())]))
    summary = summarise(cells)
    assert summary["baseline"] == "none"
    found = only(summary["differences"]["baseline"], variant="vpad", multiple=32)
    assert found["mean"] == pytest.approx(0.115)
    assert found["seeds"] == pytest.approx({"0": 0.1, "1": 0.11, "2": 0.12, "3": 0.13})
    assert (found["above"], found["below"], found["ties"]) == (4, 0, 0)
    # Sequences differ by far more than that: unpaired, the interval would hold 0.
    assert found["excludes_zero"] and found["high"] - found["low"] < 0.08
    pair = only(summary["differences"]["neighbours"], variant="vpad", against="pre_norm")
    assert pair["mean"] == pytest.approx(0.015) and (pair["above"], pair["ties"]) == (3, 1)
    named = summarise(cells, baseline="pre_norm")["differences"]["baseline"]
    assert {entry["variant"] for entry in named} == {"none", "vpad"}


def test_the_last_digit_of_a_mean_breaks_no_tie() -> None:
    values = np.array([0.1, 0.2, 0.3, 0.4, 0.7])
    assert (values[::-1] - values).mean() != 0
    cells = [cell("none", 0, [evaluation(8, values.tolist())]), cell("vpad", 0, [evaluation(8, values[::-1].tolist())])]
    (order,) = summarise(cells)["order"]
    assert order["steps"][0]["ties"] == 1 and order["steps"][0]["mean"] == 0 and order["holds"] is False


def test_variants_that_differ_in_weight_decay_stand_side_by_side() -> None:
    without = {"weight_decay": 0.0}
    cells = ladder(IN_ORDER)
    cells += [
        cell("none-0", seed, [evaluation(1, 1.0), evaluation(32, 0.9)], {**FOUR["none"], **without}) for seed in (0, 1)
    ]
    cells.append(cell("vpad-0-p", 0, [evaluation(32, 0.9)], {**FOUR["vpad"], **without, "p": 0.2}))
    (group,) = summarise(cells)["weight_decay"]
    assert group["variants"] == [{"name": "none", "weight_decay": 1.0}, {"name": "none-0", "weight_decay": 0.0}]
    assert only(group["differences"], multiple=32)["mean"] == pytest.approx(0.75)


def test_a_gain_that_sharpening_gives_too_is_shown_as_such() -> None:
    def scaled(values: Mapping[float, float]) -> list[dict[str, Any]]:
        return [evaluation(32, value, scale=scale) for scale, value in values.items()]

    cells = []
    for seed in (0, 1, 2):
        cells.append(cell("none", seed, scaled({0.5: 0.0, 1.0: 0.2, 2.0: 0.8})))
        cells.append(cell("pre_norm", seed, scaled({0.5: 0.1, 1.0: 0.5, 2.0: 0.5})))
        cells.append(cell("vpad", seed, scaled({0.5: 0.2, 1.0: 0.8, 2.0: 0.9})))
    found = summarise(cells)["attention_scale"]
    none, norm, vpad = (only(found, variant=name) for name in ("none", "pre_norm", "vpad"))
    assert none["best_scale"] == 2 and none["sharpening"]["mean"] == pytest.approx(0.6) and "gain" not in none
    assert norm["best_scale"] == 1  # of equal ones the nearest to 1
    gains = [vpad[key]["mean"] for key in ("gain", "gain_over_sharpened", "gain_both_at_best")]
    assert gains == pytest.approx([0.6, 0.0, 0.1])
    assert norm["gain_both_at_best"]["mean"] == pytest.approx(-0.3)


def test_a_scale_that_grows_with_the_position_stands_beside_the_numbers(tmp_path: Path) -> None:
    scores = {"log": (0.9, 0.8), 2.0: (0.4, 0.8), 1.0: (0.2, 0.8)}
    cells = [
        cell(name, seed, [evaluation(32, pair[place], scale=scale) for scale, pair in scores.items()])
        for place, name in enumerate(("none", "vpad"))
        for seed in (0, 1)
    ]
    none, vpad = summarise(cells)["attention_scale"]
    assert [entry["scale"] for entry in none["scales"]] == [1.0, 2.0, "log"]
    assert none["best_scale"] == "log" and vpad["best_scale"] == 1.0  # of equal ones the number nearest to 1
    assert vpad["gain_over_sharpened"]["mean"] == pytest.approx(-0.1)
    write_report(cells, tmp_path)
    assert "| at 32x | x 1.0 | x 2.0 | x log |" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "attention_scale.png").stat().st_size > 0


def test_variants_of_equal_cost_are_matched() -> None:
    def swept(name: str, p: float, loss: float, far: float) -> list[dict[str, Any]]:
        settings = {**FOUR[name], "p": p}
        found = [evaluation(1, 0.9, loss=loss), evaluation(32, far, loss=9.0)]
        return [cell(f"{name}-{p}", seed, found, settings) for seed in (0, 1)]

    cells = [
        *swept("pre_linear", 0.1, 0.10, 0.3),
        *swept("pre_linear", 0.2, 0.22, 0.6),
        *swept("pre_linear", 0.3, 0.38, 0.8),
        *swept("vpad", 0.1, 0.20, 0.7),
        *swept("vpad", 0.2, 0.40, 0.9),
    ]
    found = summarise(cells)["equal_strength"]
    assert {point["variant"] for point in found["points"]} == {one["variant"] for one in cells}
    match = only(found["matches"], against="pre_linear-0.2")
    assert match["variant"] == "vpad-0.1"
    assert match["loss"] == pytest.approx(-0.02) and match["far"]["mean"] == pytest.approx(0.1)
    assert only(found["matches"], against="pre_linear-0.1")["variant"] == "vpad-0.1"
    assert only(found["matches"], against="pre_linear-0.3")["variant"] == "vpad-0.2"
    assert summarise(ladder(IN_ORDER))["equal_strength"] == {"points": [], "matches": []}


def test_a_decline_while_the_loss_improves_is_seen() -> None:
    def along(name: str, far: Sequence[float], loss: Sequence[float]) -> list[dict[str, Any]]:
        found = [
            entry
            for step, (accuracy, value) in enumerate(zip(far, loss, strict=True))
            for entry in (evaluation(1, 0.9, step=50 * step, loss=value), evaluation(32, accuracy, step=50 * step))
        ]
        return [cell(name, seed, found) for seed in range(4)]

    cells = [
        *along("none", [0.5, 0.9, 0.1], [0.4, 0.3, 0.2]),
        *along("pre_norm", [0.5, 0.3, 0.1], [0.2, 0.3, 0.4]),
        *along("vpad", [0.1, 0.5, 0.9], [0.4, 0.3, 0.2]),
    ]
    summary = summarise(cells)
    none, norm, vpad = (only(summary["decline"], variant=name) for name in ("none", "pre_norm", "vpad"))
    assert none["best"] == 50 and none["since_best"]["accuracy"]["mean"] == pytest.approx(-0.8)
    assert none["since_best"]["loss"] == pytest.approx(-0.1)
    assert none["since_first"]["declines_while_loss_improves"] and none["since_best"]["declines_while_loss_improves"]
    assert not norm["since_first"]["declines_while_loss_improves"]  # its loss rises as well
    assert not vpad["since_first"]["declines_while_loss_improves"]
    assert vpad["best"] == 100 and vpad["since_best"]["accuracy"] is None
    rows = [entry for entry in summary["training"] if entry["variant"] == "none"]
    assert [entry["step"] for entry in rows] == [0, 50, 100]
    assert [entry["loss"] for entry in rows] == pytest.approx([0.4, 0.3, 0.2])
    assert [entry["training_loss"] for entry in rows] == [None, 0.4, 0.2]


def test_counting_has_an_error_beside_its_accuracy(tmp_path: Path) -> None:
    def cells(task: str) -> list[dict[str, Any]]:
        return [
            cell("none", seed, [evaluation(m, 0.5, error=0.5 * m) for m in (1, 4)], task=task) for seed in (0, 1, 2)
        ]

    summary = write_report(cells("counting"), tmp_path)
    found = only(summary["error"], variant="none", multiple=4)
    assert found["mean"] == 2 and 0 <= found["low"] < 2 < found["high"] <= 15
    text = (tmp_path / "report.md").read_text()
    assert "## Error against length" in text and "error.png" in text
    summary = write_report(cells("recall"), tmp_path)
    assert summary["error"] == []
    assert not (tmp_path / "error.png").exists()  # no picture of an earlier report is left
    assert "Error" not in (tmp_path / "report.md").read_text()


# The report as files


def full_study() -> list[dict[str, Any]]:
    """Everything that a report can show: three seeds, two values of p and of weight decay, steps and scales."""
    cells = []
    settings = {
        f"{name}{'-wd0' * (decay == 0)}{f'-{p}' * (p == 0.2)}": {
            **chosen,
            "weight_decay": decay,
            **({} if name == "none" else {"p": p}),
        }
        for name, chosen in FOUR.items()
        for decay in (1.0, 0.0)
        for p in (0.1, 0.2)
        if not (name == "none" and p == 0.2)
    }
    for number, (name, chosen) in enumerate(settings.items()):
        for seed in range(3):
            found = []
            for step, scale in ((0, 1.0), (50, 1.0), (100, 0.5), (100, 1.0), (100, 2.0)):
                for place, multiple in enumerate((1, 8, 32, 64)):
                    random = np.random.default_rng([number * (step > 0), seed, step, place])
                    scores = (
                        random.binomial(6, 0.95 - 0.2 * place + 0.01 * min(number * scale, 12) * place, size=12) / 6
                    )
                    found.append(evaluation(multiple, scores.tolist(), step=step, scale=scale, loss=0.5 - step / 400))
            cells.append(cell(name, seed, found, chosen))
    return cells


@pytest.fixture(scope="module")
def full_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("study") / "report"
    write_report(full_study(), out, command="tools/length_study.py conf/study_full.yaml")
    return out


def strict_json(path: Path) -> Any:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is no JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def check_tables(text: str) -> int:
    """Every row of every Markdown table has its header's columns; returns the number of tables."""
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    for table in tables:
        assert len({line.count("|") for line in table}) == 1, table
        assert set(table[1]) <= set("| -:") and len(table) > 2
    return len(tables)


def test_the_report_is_whole(full_report: Path) -> None:
    assert sorted(path.name for path in full_report.iterdir()) == [
        "accuracy.png",
        "attention_scale.png",
        "equal_strength.png",
        "report.json",
        "report.md",
        "training.png",
    ]
    text = (full_report / "report.md").read_text()
    assert check_tables(text) >= 12
    assert "tools/length_study.py conf/study_full.yaml" in text
    for name in ("accuracy", "attention_scale", "equal_strength", "training"):
        assert f"]({name}.png)" in text
    summary = strict_json(full_report / "report.json")
    for order in summary["order"]:
        assert order["statement"] in text
    assert len(summary["order"]) == 4 and len(summary["weight_decay"]) == 7
    found = only(summary["accuracy"], variant="vpad", multiple=32)
    assert f"{found['mean']:.3f} [{found['low']:.2f}, {found['high']:.2f}]" in text
    assert summary["missing"] == []


@pytest.mark.parametrize("name", ["accuracy", "attention_scale", "equal_strength", "training"])
def test_pictures_show_something(full_report: Path, name: str) -> None:
    from matplotlib import image

    path = full_report / f"{name}.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(path)[..., :3]
    assert pixels.shape[0] > 400 and pixels.shape[1] > 800
    # Lines in the colours of at least three placements, black text apart.
    for colour in ("#E69F00", "#0072B2", "#D55E00"):
        wanted = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        assert (np.abs(pixels - wanted).max(-1) < 0.02).sum() > 30, colour


def test_numbers_do_not_depend_on_the_order_of_cells() -> None:
    cells = full_study()
    forth, back = summarise(cells), summarise(cells[::-1])

    def by_name(summary: Mapping[str, Any]) -> dict[tuple[str, float], Any]:
        return {(entry["variant"], entry["multiple"]): entry for entry in summary["accuracy"]}

    assert by_name(forth) == by_name(back)
    assert sorted(o["statement"] for o in forth["order"]) == sorted(o["statement"] for o in back["order"])


def no_evaluation(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one | {"evaluations": []} for one in cells]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [cell("vpad", 0, [evaluation(1, 0.5)])],
        lambda: [cell("none", 3, [evaluation(64, [1.0])])],
        lambda: [cell("none", 0, [evaluation(8, 0.5)]), cell("vpad", 1, [evaluation(8, 0.5)])],
        lambda: [cell("none", 0, [evaluation(1, 0.5)]), cell("vpad", 0, [evaluation(8, 0.5)])],
        lambda: [cell("none", 0, [evaluation(8, 0.5)]), *no_evaluation([cell("vpad", 0, [])])],
        lambda: no_evaluation([cell("none", 0, [])]),
        lambda: [one | {"training_loss": []} for one in ladder(IN_ORDER)],
        lambda: [cell("none", 0, [evaluation(8, 0.5, step=50)]), cell("vpad", 0, [evaluation(8, 0.5)])],
        lambda: [cell("none", 0, [evaluation(8, 0.5, scale=2.0)])],
        lambda: [cell("vpad", 0, [evaluation(8, 0.5)], {"placement": "vpad"})],
    ],
    ids=[
        "one length",
        "one sequence beyond the training length",
        "no common seed",
        "no common length",
        "a cell without evaluations",
        "nothing evaluated",
        "no training loss",
        "a cell that stopped early",
        "no evaluation without scale",
        "no p",
    ],
)
def test_what_is_there_is_reported(tmp_path: Path, make: Callable[[], list[dict[str, Any]]]) -> None:
    cells = make()
    write_report(cells, tmp_path)
    summary = strict_json(tmp_path / "report.json")
    assert {variant["name"] for variant in summary["variants"]} == {one["variant"] for one in cells}
    text = (tmp_path / "report.md").read_text()
    check_tables(text)
    assert all(f"| {one['variant']} |" in text for one in cells)
    for path in tmp_path.glob("*.png"):
        assert f"]({path.name})" in text


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    cells = [one for one in ladder(IN_ORDER) if (one["variant"], one["seed"]) != ("pre_norm", 1)]
    cells[-1]["evaluations"] = [evaluation(32, 0.5, step=50)]
    summary = write_report(cells, tmp_path, expected=[("none", 0), ("none", 2), ("vpad-p0.2", 0)])
    assert summary["missing"] == [["none", 2], ["vpad-p0.2", 0], ["pre_norm", 1]]
    text = (tmp_path / "report.md").read_text()
    assert "Missing cells: none-seed2, vpad-p0.2-seed0, pre_norm-seed1." in text
    assert "vpad-seed1 was not evaluated at step 100 and is left out there." in text
    assert only(summary["accuracy"], variant="vpad", multiple=32)["seeds"] == pytest.approx({"0": 0.8})


def test_one_seed_is_said_to_be_one_seed(tmp_path: Path) -> None:
    summary = write_report(ladder({name: values[:1] for name, values in IN_ORDER.items()}), tmp_path)
    assert all(entry["within_seed_only"] for entry in summary["accuracy"])
    text = (tmp_path / "report.md").read_text()
    assert "There is one seed." in text and "(within this one seed)" in text
    row = next(line for line in text.splitlines() if line.startswith("| vpad |"))
    assert row.count("*") == 2


def test_losses_that_are_no_numbers_do_not_break_the_files(tmp_path: Path) -> None:
    entry = evaluation(1, 0.5, loss=math.nan, error=math.nan)
    write_report([cell("none", 0, [entry, evaluation(8, 0.5)], task="counting")], tmp_path)
    summary = strict_json(tmp_path / "report.json")
    assert only(summary["error"], multiple=1)["mean"] is None
    assert "none-seed0 has losses that are no finite numbers." in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda cells: [], "no finished cell"),
        (lambda cells: [*cells, cells[0]], "cell none-seed0 is there twice"),
        (lambda cells: [*cells, cells[0] | {"seed": 9, "training_length": 128}], "training_length is 64 in one, 128"),
        (lambda cells: [*cells, cells[0] | {"seed": 9, "task": {"name": "counting"}}], "different studies: task"),
        (lambda cells: [*cells, cells[0] | {"seed": 9, "settings": FOUR["vpad"]}], "none has different settings"),
        (lambda cells: [cells[0] | {"settings": {"placement": "postnorm"}}], "unknown placement 'postnorm'"),
    ],
)
def test_cells_that_do_not_belong_together_are_refused(
    change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        summarise(change(ladder(IN_ORDER)))


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(UserError, match="unknown baseline 'vpda' \\(did you mean 'vpad'"):
        summarise(ladder(IN_ORDER), baseline="vpda")
