"""A run on disk: continued where it stopped, refused where it disagrees."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.run_store import RunStore

IDENTITY = {"seed": 42, "model": "abc", "essays": None}
SCOPE = {"tasks": ["niah_single_1"], "lengths": [1024], "samples": 4}


def start(directory: Path, identity: dict[str, Any] = IDENTITY, scope: dict[str, Any] = SCOPE) -> RunStore:
    return RunStore.open(directory, identity=identity, scope=scope, info={"name": "x"})


def record(index: int, score: float = 1.0, pred: str = "7") -> dict[str, Any]:
    return {"index": index, "outputs": ["7"], "pred": pred, "length": 1000, "score": score}


def fill(store: RunStore, *indices: int, part: int = 0) -> None:
    with store.appending("niah_single_1", 1024, part) as file:
        for index in indices:
            file.write(record(index))


def part_file(store: RunStore, part: int = 0) -> Path:
    return store.directory / "predictions" / "niah_single_1" / f"1024.{part}.jsonl"


def test_records_come_back_from_all_parts(tmp_path: Path) -> None:
    store = start(tmp_path / "run")
    fill(store, 0, 2)
    fill(store, 1, part=3)
    assert sorted(RunStore(tmp_path / "run").records("niah_single_1", 1024)) == [0, 1, 2]
    assert store.records("niah_single_1", 2048) == {} == store.records("niah_single_2", 1024)


def test_a_line_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    store = start(tmp_path / "run")
    with store.appending("niah_single_1", 1024, 0) as file:
        file.write(record(0))
        assert list(RunStore(tmp_path / "run").records("niah_single_1", 1024)) == [0]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_a_half_written_last_line_is_dropped_and_redone(tmp_path: Path, cut: int) -> None:
    store = start(tmp_path / "run")
    fill(store, 0, 1)
    data = part_file(store).read_bytes()
    part_file(store).write_bytes(data[:-cut])
    whole = cut == 1  # only the newline is missing: the record itself is complete
    assert sorted(store.records("niah_single_1", 1024)) == ([0, 1] if whole else [0])
    assert store.repair() == (0 if whole else 1)
    fill(store, 1)
    assert sorted(store.records("niah_single_1", 1024)) == [0, 1]
    assert all(json.loads(line) for line in part_file(store).read_text().splitlines())
    assert store.repair() == 0


def test_a_cut_inside_a_character(tmp_path: Path) -> None:
    store = start(tmp_path / "run")
    with store.appending("niah_single_1", 1024, 0) as file:
        file.write(record(0))
        file.write({**record(1), "task": "ü"})
    data = part_file(store).read_bytes()
    part_file(store).write_bytes(data[: data.index("ü".encode()) + 1])
    assert list(store.records("niah_single_1", 1024)) == [0] and store.repair() == 1


@pytest.mark.parametrize("line", ["[1, 2]", "7", '{"index": "0", "score": 1}', '{"index": 0}', "null"])
def test_a_line_that_is_no_record_is_dropped(tmp_path: Path, line: str) -> None:
    store = start(tmp_path / "run")
    fill(store, 0)
    with open(part_file(store), "a", encoding="utf-8") as file:
        file.write(line + "\n")
    assert list(store.records("niah_single_1", 1024)) == [0]
    assert store.repair() == 1 and len(part_file(store).read_text().splitlines()) == 1


def test_line_counts_follow_what_is_appended(tmp_path: Path) -> None:
    store = start(tmp_path / "run")
    assert store.lines("niah_single_1", 1024) == 0
    fill(store, 0, 1)
    assert store.lines("niah_single_1", 1024) == 2
    fill(store, 2, part=1)
    assert store.lines("niah_single_1", 1024) == 3


def test_the_same_settings_continue_a_run(tmp_path: Path) -> None:
    first = start(tmp_path / "run")
    fill(first, 0)
    first.close()
    assert list(start(tmp_path / "run").records("niah_single_1", 1024)) == [0]


@pytest.mark.parametrize(
    ("identity", "scope", "message"),
    [
        ({**IDENTITY, "seed": 43}, SCOPE, "seed = 42, this start has 43"),
        ({**IDENTITY, "model": "xyz"}, SCOPE, "model = 'abc', this start has 'xyz'"),
        ({"seed": 42, "essays": None}, SCOPE, "model = 'abc', this start has None"),
        (IDENTITY, {**SCOPE, "samples": 3}, "samples = 4, this start has 3"),
        (IDENTITY, {**SCOPE, "lengths": [2048]}, r"lengths \[1024\], this start has \[2048\]"),
        (IDENTITY, {**SCOPE, "tasks": ["vt"]}, r"tasks \['niah_single_1'\], this start has \['vt'\]"),
    ],
)
def test_other_settings_are_refused_with_both_values(
    tmp_path: Path, identity: dict[str, Any], scope: dict[str, Any], message: str
) -> None:
    start(tmp_path / "run").close()
    before = (tmp_path / "run" / "config.json").read_bytes()
    with pytest.raises(UserError, match=message):
        start(tmp_path / "run", identity, scope)
    assert (tmp_path / "run" / "config.json").read_bytes() == before
    start(tmp_path / "run").close()  # a refusal leaves no lock


def test_a_run_may_grow(tmp_path: Path) -> None:
    start(tmp_path / "run").close()
    more = {"tasks": ["niah_single_2", "niah_single_1"], "lengths": [1024, 2048], "samples": 8}
    grown = start(tmp_path / "run", {**IDENTITY, "essays": "digest"}, more)
    assert grown.config()["scope"] == more
    grown.close()
    with pytest.raises(UserError, match="essays = 'digest', this start has 'other'"):
        start(tmp_path / "run", {**IDENTITY, "essays": "other"}, more)


def test_two_processes_cannot_write_one_run(tmp_path: Path) -> None:
    store = start(tmp_path / "run")
    program = (
        "import sys; from megatron_lengthgen.evaluation.run_store import RunStore\n"
        "from megatron_lengthgen.errors import run\n"
        f"settings = dict(identity={IDENTITY!r}, scope={SCOPE!r}, info={{}})\n"
        f"sys.exit(run(lambda: RunStore.open({str(tmp_path / 'run')!r}, **settings)))"
    )
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert other.returncode == 2 and "another process is writing" in other.stderr
    store.close()
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_directory_with_other_things_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"holds thesis.tex but no config.json"):
        start(tmp_path)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write to --output"):
        start(tmp_path / "file")


def test_reading_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        RunStore(tmp_path).config()
    (tmp_path / "config.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="not of run format"):
        RunStore(tmp_path).config()


def test_files_for_rulers_evaluator(tmp_path: Path) -> None:
    store = start(tmp_path / "run")
    fill(store, 3, 0)
    fill(store, 1, part=1)
    store.write_ruler_files([("niah_single_1", 1024), ("niah_single_1", 2048)])
    lines = (tmp_path / "run" / "ruler" / "1024" / "niah_single_1.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    # What scripts/eval/evaluate.py reads: input, pred, outputs, others, and the index to resume by.
    assert [row["index"] for row in rows] == [0, 1, 3] == [row["others"].get("id", row["index"]) for row in rows]
    assert all({"input", "pred", "outputs", "length", "truncation"} <= row.keys() for row in rows)
    assert not (tmp_path / "run" / "ruler" / "2048").exists()
