"""Runs from prompts to records: with engines that know the answer or none, killed, continued, and on a real model."""

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ruler_fixtures import Killed, Mortal, Oracle, make_ruler, tiny_llama

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Answer, Request
from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator
from megatron_lengthgen.evaluation.report import summarise
from megatron_lengthgen.evaluation.ruler.tasks import parse_tasks
from megatron_lengthgen.evaluation.run_store import RunStore
from megatron_lengthgen.evaluation.runner import Share, evaluate, plan, score_record, verify_prompts
from megatron_lengthgen.evaluation.shard import Shard

NAMES = ["niah_single_1", "niah_single_2", "niah_multikey_1"]
LENGTHS = [768, 1024]


def open_run(directory: Path, names: list[str] = NAMES, samples: int = 3, shard: Shard | None = None) -> RunStore:
    scope = {"tasks": names, "lengths": LENGTHS, "samples": samples}
    identity = {"benchmark": "ruler", "seed": 42}
    return RunStore.open(directory, identity=identity, scope=scope, info={"name": "run"}, shard=shard)


def go(store: RunStore, engine: Any, names: list[str] = NAMES, samples: int = 3, share: Share | None = None) -> None:
    ruler, tasks = make_ruler(), parse_tasks(names)
    evaluate(ruler, tasks, plan(store, tasks, LENGTHS, samples), store, engine, share, patience=0.01)


def contents(store: RunStore, names: list[str] = NAMES) -> dict[tuple[str, int], dict[int, dict[str, Any]]]:
    """All records without what may differ between runs."""
    return {
        (name, length): {
            index: {key: value for key, value in record.items() if key != "seconds"}
            for index, record in sorted(store.records(name, length).items())
        }
        for name in names
        for length in LENGTHS
    }


@pytest.mark.parametrize("names", [NAMES, ["niah_multivalue", "niah_multiquery", "niah_multikey_2", "niah_multikey_3"]])
def test_an_engine_that_reads_the_needle_scores_a_hundred(tmp_path: Path, names: list[str]) -> None:
    store = open_run(tmp_path / "run", names)
    go(store, Oracle(make_ruler().encoder, reverse=True), names)
    summary = summarise(store)
    assert summary["complete"] and {cell["score"] for cell in summary["cells"]} == {100.0}


def test_empty_answers_score_zero_and_are_counted(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    go(store, Oracle(make_ruler().encoder, fail=1))
    for cell in summarise(store)["cells"]:
        assert (cell["score"], cell["empty"], cell["stopped_by_limit"]) == (0.0, 3, 0)


def test_an_answer_cut_by_the_limit_is_marked() -> None:
    sample = make_ruler().sample(parse_tasks(["niah_single_2"])[0], 768, 0)
    cut = score_record(sample, "all", Answer("It is " + sample.outputs[0], 4, cut=True), 0.1)
    assert (cut["finish"], cut["score"], cut["generated_tokens"]) == ("length", 1.0, 4)
    ended = score_record(sample, "all", Answer.from_ids([5] * 3, 4, lambda ids: "It is"), 0.1)
    assert (ended["finish"], ended["score"]) == ("stop", 0.0)


def test_a_prompt_that_holds_the_answer_does_not_count_as_one(tmp_path: Path) -> None:
    # Only new tokens are scored: an engine that says nothing must not profit from the needle in its prompt.
    store = open_run(tmp_path / "run", ["niah_single_1"])
    go(store, Oracle(make_ruler().encoder, fail=1), ["niah_single_1"])
    assert all(record["pred"] == "" for record in store.records("niah_single_1", 768).values())


def test_killed_anywhere_a_run_continues_to_the_same_records(tmp_path: Path) -> None:
    encoder = make_ruler().encoder
    whole = open_run(tmp_path / "whole")
    go(whole, Oracle(encoder))
    killed = open_run(tmp_path / "killed")
    starts, answered = 0, 0
    while not plan(killed, parse_tasks(NAMES), LENGTHS, 3).finished:
        engine = Mortal(Oracle(encoder), lives=4)
        starts += 1
        try:
            go(killed, engine)
        except Killed:
            # The death also cuts the last line.
            part = max((tmp_path / "killed" / "predictions").rglob("*.jsonl"), key=lambda path: path.stat().st_mtime_ns)
            part.write_bytes(part.read_bytes()[:-9])
            assert killed.repair() == 1
        answered += 4 - engine.lives
        killed.close()
        killed = open_run(tmp_path / "killed")
    assert starts > 3 and contents(killed) == contents(whole)
    assert answered == 18 + (starts - 1)  # each death cost the one line that it cut, and nothing else


def written(directory: Path) -> list[tuple[str, str, int]]:
    """Task, length and index of every whole line of a run."""
    found = []
    for part in (directory / "predictions").glob("*/*.jsonl"):
        for line in part.read_bytes().split(b"\n")[:-1]:
            found.append((part.parent.name, part.name.split(".")[0], json.loads(line)["index"]))
    return found


class Slow(Oracle):
    """Takes its time, so that a signal finds it anywhere."""

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        for answer in super().generate(requests):
            time.sleep(0.004)
            yield answer


def fork(action: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            action()
            status = 0
        finally:
            os._exit(status)
    return child


@pytest.mark.parametrize("count", [1, 3])
def test_processes_killed_at_random_moments_do_each_sample_once(
    tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    samples, directory, chance = 12, tmp_path / "run", random.Random(count)
    whole = open_run(tmp_path / "whole", samples=samples)
    ruler, tasks = make_ruler(), parse_tasks(NAMES)
    evaluate(ruler, tasks, plan(whole, tasks, LENGTHS, samples), whole, Oracle(ruler.encoder))

    def launch(number: int) -> None:
        store = open_run(directory, samples=samples, shard=Shard(number, count))
        store.repair()
        evaluate(ruler, tasks, plan(store, tasks, LENGTHS, samples), store, Slow(ruler.encoder))

    left, kills = set(range(1, count + 1)), 0
    while left:
        children = {fork(lambda number=number: launch(number)): number for number in left}  # type: ignore[misc]
        # Let some lines be written, whatever the machine's speed, then strike at any moment.
        goal = len(written(directory)) + chance.randint(1, 4)
        deadline = time.monotonic() + 120
        while len(written(directory)) < min(goal, len(NAMES) * len(LENGTHS) * samples):
            assert time.monotonic() < deadline
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.012))
        for child, number in children.items():
            os.kill(child, signal.SIGKILL)
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
                left.remove(number)
            else:
                kills += 1
    assert kills > 4
    assert contents(RunStore(directory)) == contents(whole)
    assert set(Counter(written(directory)).values()) == {1}


@pytest.mark.parametrize("end", [b"", "ö".encode()[:1]], ids=["in a line", "in a character"])
def test_what_a_death_cut_anywhere_runs_again(tmp_path: Path, end: bytes) -> None:
    encoder = make_ruler().encoder
    whole, store = (open_run(tmp_path / name, NAMES[:1]) for name in ("whole", "run"))
    for run in (whole, store):
        go(run, Oracle(encoder), NAMES[:1])
    part = tmp_path / "run" / "predictions" / "niah_single_1" / "1024.0.jsonl"
    lines = part.read_bytes().splitlines(keepends=True)
    part.write_bytes(b"".join(lines[:2]) + lines[2][:60] + end)
    store.close()
    again, engine = open_run(tmp_path / "run", NAMES[:1]), Oracle(encoder)
    assert again.repair() == 1
    go(again, engine, NAMES[:1])
    assert len(engine.prompts) == 1 and contents(again, NAMES[:1]) == contents(whole, NAMES[:1])


@pytest.mark.parametrize("size", [2, 4])
def test_another_number_of_data_parallel_ranks_continues_a_run(tmp_path: Path, size: int) -> None:
    encoder = make_ruler().encoder
    whole = open_run(tmp_path / "whole", samples=5)
    go(whole, Oracle(encoder), samples=5)
    store = open_run(tmp_path / "run", samples=5)
    with pytest.raises(Killed):
        go(store, Mortal(Oracle(encoder), lives=7), samples=5)
    tasks = parse_tasks(NAMES)
    plans = [plan(store, tasks, LENGTHS, 5) for _ in range(size)]  # all plan before any writes
    engines = [Oracle(encoder) for _ in range(size)]

    def rank(number: int) -> None:
        share = Share(number, size, leads=number == 0)
        evaluate(make_ruler(), tasks, plans[number], RunStore(store.directory), engines[number], share, patience=0.01)

    # The leader goes first and must wait for the others, whose lines it counts.
    leader = threading.Thread(target=rank, args=(0,), daemon=True)
    leader.start()
    time.sleep(0.2)
    others = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(1, size)]
    for thread in others:
        thread.start()
    for thread in [leader, *others]:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert contents(store) == contents(whole)
    assert sum(len(engine.prompts) for engine in engines) == 30 - 7
    assert all(engine.prompts for engine in engines)


def test_a_tensor_parallel_rank_that_does_not_record_writes_nothing(tmp_path: Path) -> None:
    store, engine = open_run(tmp_path / "run"), Oracle(make_ruler().encoder)
    go(store, engine, share=Share(writes=False, leads=False))
    assert len(engine.prompts) == 18 and not (tmp_path / "run" / "predictions").exists()


def test_more_samples_keep_those_that_are_there(tmp_path: Path) -> None:
    store, engine = open_run(tmp_path / "run"), Oracle(make_ruler().encoder)
    go(store, engine)
    before = contents(store)
    store.close()
    go(open_run(tmp_path / "run", samples=4), engine, samples=4)
    after = contents(store)
    assert len(engine.prompts) == 24
    assert all(after[cell][index] == record for cell, records in before.items() for index, record in records.items())


def test_a_changed_prompt_is_noticed(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run")
    go(store, Oracle(make_ruler().encoder))
    tasks = parse_tasks(NAMES)
    verify_prompts(store, make_ruler(), tasks, LENGTHS)
    with pytest.raises(UserError, match="answered another prompt for niah_single_1 at 768, sample 0"):
        verify_prompts(store, make_ruler(bos=True), tasks, LENGTHS)


def test_a_full_disk_is_an_error_that_says_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_run(tmp_path / "run")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megatron_lengthgen.evaluation.run_store.os.fsync", full)
    with pytest.raises(UserError, match="No space left on device; finished samples are kept"):
        go(store, Oracle(make_ruler().encoder))


def test_a_quick_look_is_continued(tmp_path: Path) -> None:
    store, engine = open_run(tmp_path / "run", samples=4), Oracle(make_ruler().encoder)
    go(store, engine, samples=1)
    summary = summarise(store)
    assert not summary["complete"] and {(c["samples"], c["expected"]) for c in summary["cells"]} == {(1, 4)}
    go(store, engine, samples=4)
    assert summarise(store)["complete"] and len(engine.prompts) == 24


def test_long_prompts_are_prepared_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Watching(Oracle):
        def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
            sizes.append(len(requests))
            return super().generate(requests)

    sizes: list[int] = []
    whole, store = (open_run(tmp_path / name, samples=3) for name in ("whole", "run"))
    go(whole, Oracle(make_ruler().encoder))
    monkeypatch.setattr("megatron_lengthgen.evaluation.runner._TOGETHER", 1600)
    go(store, Watching(make_ruler().encoder))
    assert sizes == [2, 1] * 3 + [1] * 9  # two of 768 tokens, one of 1,024
    assert contents(store) == contents(whole)


def test_a_shard_takes_and_counts_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    second = open_run(tmp_path / "run", samples=5, shard=Shard(2, 2))
    go(second, Oracle(make_ruler().encoder), samples=5)
    assert {tuple(found) for found in contents(second).values()} == {(1, 3)}
    assert "all: 12/12 samples" in capsys.readouterr().out
    first = open_run(tmp_path / "run", samples=5, shard=Shard(1, 2))
    go(first, Oracle(make_ruler().encoder), samples=5)
    assert "all: 18/18 samples" in capsys.readouterr().out
    assert summarise(first)["complete"]


def test_a_record_says_what_it_cost_and_where_the_needle_was(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run", ["niah_single_1"])
    go(store, Oracle(make_ruler().encoder), ["niah_single_1"], share=Share(processes=4, device="NVIDIA H200"))
    record = store.records("niah_single_1", 768)[0]
    assert (record["processes"], record["device"]) == (4, "NVIDIA H200") and record["seconds"] > 0
    cell = summarise(store)["cells"][0]
    assert sum(band["samples"] for band in cell["depths"]) == 3 and cell["devices"] == ["NVIDIA H200"]


def test_plain_progress_names_the_last_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go(open_run(tmp_path / "run"), Oracle(make_ruler().encoder))
    assert "all: 18/18 samples" in capsys.readouterr().out


# -- transformers -----------------------------------------------------------------------------------------------------


def greedy(model: Any, request: Request) -> list[int]:
    """Greedy decoding by a full forward pass for every token."""
    import torch

    ids = list(request.prompt_ids)
    new: list[int] = []
    while len(new) < request.max_new_tokens:
        with torch.inference_mode():
            token = int(model(torch.tensor([ids])).logits[0, -1].argmax())
        if token in request.stop_ids:
            break
        new.append(token)
        ids.append(token)
    return new


def test_the_transformers_engine_is_greedy_and_stops() -> None:
    model = tiny_llama()
    # What a published model may bring along must not change greedy decoding.
    model.generation_config.do_sample = True
    model.generation_config.repetition_penalty = 5.0
    engine = HuggingFaceGenerator(model)
    plain = [Request(tuple(range(10 + i, 40 + 3 * i)), 12, frozenset()) for i in range(4)]
    answers = dict(engine.generate(plain))
    assert answers == {i: greedy(model, request) for i, request in enumerate(plain)}
    assert all(len(answer) == 12 for answer in answers.values())
    # Stop where a token first appears: at the first token, and later.
    first = Request(plain[0].prompt_ids, 12, frozenset({answers[0][0]}))
    later = Request(plain[1].prompt_ids, 12, frozenset({answers[1][-1]}))
    stopped = dict(engine.generate([first, later]))
    assert stopped[0] == [] and stopped[1] == answers[1][: answers[1].index(answers[1][-1])]


def test_the_transformers_engine_refuses_ids_that_the_model_does_not_know() -> None:
    engine = HuggingFaceGenerator(tiny_llama())
    requests = [Request((5, 599), 2, frozenset()), Request((5, 600, 7), 2, frozenset())]
    answers = engine.generate(requests)
    assert next(answers)[0] == 0
    with pytest.raises(
        UserError, match=r"^request 1 holds token 600, outside the vocabulary of 600: tokenizer and model do"
    ):
        next(answers)


def test_a_model_runs_from_prompt_to_summary(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run", NAMES[:1], samples=1)
    ruler, tasks = make_ruler(max_new_tokens=4), parse_tasks(NAMES[:1])
    evaluate(ruler, tasks, plan(store, tasks, LENGTHS, 1), store, HuggingFaceGenerator(tiny_llama()), save_prompts=True)
    record = store.records("niah_single_1", 768)[0]
    assert record["generated_tokens"] <= 4 and record["input"].startswith("A special magic number")
    assert record["answer_prefix"].endswith(" is") and summarise(store)["complete"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["scope"]["lengths"] == LENGTHS
