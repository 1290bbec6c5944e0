"""A run on disk: continued where it stopped, refused where it disagrees."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.run_store import RunStore
from megatron_lengthgen.evaluation.shard import Shard

IDENTITY = {"seed": 42, "model": "abc", "essays": None}
SCOPE = {"tasks": ["niah_single_1"], "lengths": [1024], "samples": 4}


def start(directory: Path, identity: dict[str, Any] = IDENTITY, scope: dict[str, Any] = SCOPE) -> RunStore:
    return RunStore.open(directory, identity=identity, scope=scope, info={"name": "x"})


def record(index: int, score: float = 1.0, pred: str = "7") -> dict[str, Any]:
    told = {"finish": "stop", "seconds": 0.1, "prompt_tokens": 900, "generated_tokens": 2}
    return {"index": index, "outputs": ["7"], "pred": pred, "length": 1000, "score": score, **told}


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


@pytest.mark.parametrize(
    "line",
    [
        "[1, 2]",
        "7",
        '{"index": "0", "score": 1}',
        '{"index": 0}',
        "null",
        json.dumps(record(0) | {"seconds": None}),
        json.dumps(record(0, score=7.0)),
        json.dumps(record(0, score=float("nan"))),
    ],
)
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
    with pytest.raises(UserError, match="essays = None, this start has 'digest'"):
        start(tmp_path / "run", {**IDENTITY, "essays": "digest"}, more)
    identity = {**IDENTITY, "essays": "digest"}
    grown = RunStore.open(tmp_path / "run", identity=identity, scope=more, info={}, grows=("essays",))
    assert grown.config()["scope"] == more
    grown.close()
    with pytest.raises(UserError, match="essays = 'digest', this start has 'other'"):
        RunStore.open(
            tmp_path / "run", identity={**IDENTITY, "essays": "other"}, scope=more, info={}, grows=("essays",)
        )


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


@contextlib.contextmanager
def elsewhere(action: Callable[[], Any]) -> Iterator[str]:
    """What ``action`` says in another process, an empty text or its error; that process lives on with the block."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            kept = action()  # noqa: F841 - a store that nobody keeps lets go of its lock
            os.write(writer, b"\n")
        except UserError as error:
            os.write(writer, f"{error}\n".encode())
        finally:
            time.sleep(60)
            os._exit(0)
    os.close(writer)
    try:
        with open(reader, encoding="utf-8") as answer:
            yield answer.readline().strip()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def open_shard(directory: Path, number: int, count: int) -> RunStore:
    return RunStore.open(directory, identity=IDENTITY, scope=SCOPE, info={}, shard=Shard(number, count))


@pytest.mark.parametrize(
    ("first", "second", "refusal"),
    [
        ((1, 1), (1, 1), "another process is writing to"),
        ((1, 1), (1, 2), "another process is writing to"),
        ((2, 2), (1, 1), "another process is writing shard 2/2 of"),
        ((2, 3), (1, 2), "another process is writing shard 2/3 of"),
        ((1, 2), (1, 2), "another process is writing shard 1/2 of"),
        ((1, 2), (2, 2), ""),
        ((3, 16), (16, 16), ""),
    ],
)
def test_what_may_run_at_once(tmp_path: Path, first: tuple[int, int], second: tuple[int, int], refusal: str) -> None:
    with elsewhere(lambda: open_shard(tmp_path / "run", *first)) as fine:
        assert fine == ""
        with elsewhere(lambda: open_shard(tmp_path / "run", *second)) as said:
            assert said.startswith(refusal) and bool(said) == bool(refusal)
    # SIGKILL has freed all.
    open_shard(tmp_path / "run", 1, 1).close()


def test_a_worker_that_outlives_a_killed_run_does_not_hold_it(tmp_path: Path) -> None:
    def open_and_fork() -> RunStore:
        store = open_shard(tmp_path / "run", 1, 1)
        worker = os.fork()
        if worker == 0:
            # It inherits the descriptor of the lock.
            time.sleep(60)
            os._exit(0)
        (tmp_path / "worker").write_text(str(worker))
        return store

    with elsewhere(open_and_fork) as fine:
        assert fine == ""
    try:
        with elsewhere(lambda: open_shard(tmp_path / "run", 1, 1)) as said:
            assert said == ""
    finally:
        os.kill(int((tmp_path / "worker").read_text()), signal.SIGKILL)


def test_shards_write_apart_and_read_together(tmp_path: Path) -> None:
    one, two = (open_shard(tmp_path / "run", number, 12) for number in (1, 11))
    fill(one, 0, 12)
    fill(two, 10, part=1)
    assert sorted(one.records("niah_single_1", 1024)) == [0, 10, 12]
    assert (one.lines("niah_single_1", 1024), two.lines("niah_single_1", 1024)) == (2, 1)
    assert {path.name for path in part_file(one).parent.iterdir()} == {"1024.1-of-12.0.jsonl", "1024.11-of-12.1.jsonl"}
    part = part_file(one).with_name("1024.1-of-12.0.jsonl")
    part.write_bytes(part.read_bytes()[:-5])
    # Shard 11 may not touch what shard 1 could be writing at this moment.
    assert two.repair() == 0 and one.repair() == 1
    part.write_bytes(part.read_bytes()[:-5])
    assert RunStore(tmp_path / "run").repair() == 1


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("megatron_lengthgen.evaluation.run_store.fcntl.lockf", none)
    with pytest.warns(UserWarning, match="has no locks: start nothing twice on this run"):
        store = start(tmp_path / "run")
    fill(store, 0)
    assert list(store.records("niah_single_1", 1024)) == [0]


def test_half_a_surrogate_pair_in_an_answer_is_kept(tmp_path: Path) -> None:
    store = start(tmp_path / "run")
    with store.appending("niah_single_1", 1024, 0) as file:
        file.write(record(0, pred="a\ud83d"))
        file.write(record(1))
    assert [r["pred"] for r in store.records("niah_single_1", 1024).values()] == ["a\ud83d", "7"]
    part_file(store).write_bytes(part_file(store).read_bytes()[:-1])
    assert store.repair() == 0
    store.write_ruler_files([("niah_single_1", 1024)])
    lines = (tmp_path / "run" / "ruler" / "1024" / "niah_single_1.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[0])["pred"] == "a\ud83d" and len(lines) == 2


def test_a_directory_with_other_things_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"holds thesis.tex but no config.json"):
        start(tmp_path)


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot write to"):
        start(tmp_path / "file")


def test_reading_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        RunStore(tmp_path).config()
    (tmp_path / "config.json").write_text('{"format": 99}')
    with pytest.raises(UserError, match="not of run format"):
        RunStore(tmp_path).config()
    for text, lacks in (
        ('{"format": 1}', "identity"),
        ('{"format": 1, "identity": {}, "scope": {"tasks": []}, "info": {}}', r"scope \(tasks, lengths, samples\)"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UserError, match=f"config.json lacks {lacks}"):
            RunStore(tmp_path).config()
        with pytest.raises(UserError, match=f"config.json lacks {lacks}"):
            start(tmp_path)


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    sentence = "cannot write to .*: No space left on device; finished samples are kept"
    store = start(tmp_path / "run")
    fill(store, 0)
    with monkeypatch.context() as patch:
        patch.setattr("megatron_lengthgen.evaluation.run_store.os.fsync", full)
        with pytest.raises(UserError, match=sentence):
            fill(store, 1)
        part_file(store).write_bytes(part_file(store).read_bytes() + b'{"index"')
        patch.setattr("megatron_lengthgen.files.os.fsync", full)
        with pytest.raises(UserError, match=sentence):
            store.repair()
        store.close()
        with pytest.raises(UserError, match=sentence):
            start(tmp_path / "run")
    assert list(store.records("niah_single_1", 1024)) == [0] and not list((tmp_path / "run").glob("*.tmp"))
    start(tmp_path / "run").close()


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
