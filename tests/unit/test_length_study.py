"""The study's configuration, and a whole study of a few steps through the command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.study import config

ROOT = Path(__file__).parents[2]
QUICK = ROOT / "conf" / "study_quick.yaml"
SMALL = [
    "phase1.train_iters=4",
    "phase2.train_iters=4",
    "seeds=[3]",
    "evaluation.multiples=[1,2]",
    "evaluation.sequences=5",
    "evaluation.points=2",
    "evaluation.attention_scales=[1.0,2.0]",
]


def tree(**changes: object) -> dict:
    plain = yaml.safe_load(QUICK.read_text())
    plain.update(changes)
    return {name: value for name, value in plain.items() if value is not None}


@pytest.mark.parametrize("name", ["study_quick.yaml", "study_full.yaml", "study_counting.yaml"])
def test_the_shipped_studies_are_valid(name: str) -> None:
    study = config.load(ROOT / "conf" / name)
    assert len(study.cells) == len(study.variants) * len(study.seeds)
    assert {"none", "pre_norm", "pre_linear", "vpad", "none-wd0"} <= set(study.variants)


def test_a_variants_settings_reach_its_run() -> None:
    study = config.load(QUICK)
    run = study.run(2, seed=1, save=Path("out"), settings=study.variants["none-wd0"])
    assert run.megatron["weight_decay"] == 0.0 and run.lengthgen["placement"] == "none"
    run = study.run(2, seed=1, save=Path("out"), settings=study.variants["vpad"], start=Path("phase1"))
    assert run.megatron["weight_decay"] == 1.0 and run.megatron["pretrained_checkpoint"] == "phase1"
    assert run.lengthgen["placement"] == "vpad" and run.lengthgen["sites"] == ["attention", "mlp", "output"]
    assert run.megatron["seed"] != study.run(2, seed=2, save=Path("out")).megatron["seed"]


def test_a_grid_is_crossed_and_none_appears_once() -> None:
    grid = {"placement": ["none", "vpad"], "p": [0.1, 0.2], "weight_decay": [0.0, 1.0]}
    study = config.from_mapping(tree(variants=None, grid=grid))
    assert set(study.variants) == {
        "none-wd0.0",
        "none-wd1.0",
        "vpad-p0.1-wd0.0",
        "vpad-p0.1-wd1.0",
        "vpad-p0.2-wd0.0",
        "vpad-p0.2-wd1.0",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"name": "recal"}}, r"unknown task 'recal' \(did you mean 'recall'"),
        ({"phase3": {}}, r"unknown study key 'phase3'"),
        ({"phase2": {"lr": 1.0}}, "phase2 needs train_iters"),
        ({"seeds": [1, 1]}, "names a seed twice"),
        ({"seeds": None}, "the study has no seeds"),
        ({"variants": None}, "neither variants nor a grid"),
        ({"variants": {"a/b": {}}}, "variant 'a/b'"),
        ({"variants": {"x": {"placement": "vpda"}}}, "did you mean 'vpad'"),
        ({"variants": {"x": {"placement": "vpad", "p": 1.5}}}, r"in \[0, 1\), got 1.5"),
        ({"evaluation": {"points": 3}}, "points 3 does not divide phase 2's 1000 steps"),
        ({"evaluation": {"multiples": [0]}}, "multiples must be positive"),
        ({"evaluation": {"length": 1}}, "unknown evaluation key 'length'"),
    ],
)
def test_bad_studies_are_refused_before_anything_runs(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.from_mapping(tree(**changes))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no study configuration at"):
        config.load(tmp_path / "absent.yaml")


def run_study(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "length_study.py"), str(QUICK), "--output", str(out), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=500)


def test_a_whole_study_runs_reports_and_is_not_mixed_with_another(tmp_path: Path) -> None:
    out = tmp_path / "study"
    result = run_study(out, "--jobs", "1", *SMALL)
    assert result.returncode == 0, result.stdout + result.stderr
    cells = {path.stem: json.loads(path.read_text()) for path in (out / "cells").glob("*.json")}
    assert set(cells) == {f"{name}-seed3" for name in ("none", "none-wd0", "pre_norm", "pre_linear", "vpad")}
    for cell in cells.values():
        found = {(e["step"], e["length"], e["attention_scale"]) for e in cell["evaluations"]}
        assert found == {(s, n, 1.0) for s in (0, 2, 4) for n in (64, 128)} | {(4, 64, 2.0), (4, 128, 2.0)}
        assert all(len(e["accuracy"]) == 5 for e in cell["evaluations"])
    # All variants of a seed start from the same answers, and then go their own ways.
    starts = [[e for e in cell["evaluations"] if e["step"] == 0] for cell in cells.values()]
    assert all(start == starts[0] for start in starts)
    ends = {json.dumps([e["loss"] for e in cell["evaluations"] if e["step"] == 4]) for cell in cells.values()}
    assert len(ends) == len(cells)
    for name in ("report.md", "report.json", "accuracy.png"):
        assert (out / "report" / name).stat().st_size > 0

    before = {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*.json")}
    assert run_study(out, "--report", *SMALL).returncode == 0
    assert before == {path: path.stat().st_mtime_ns for path in (out / "cells").glob("*.json")}
    other = run_study(out, *SMALL, "phase2.lr=1e-4")
    assert other.returncode == 2 and "holds a study with phase2" in other.stderr
