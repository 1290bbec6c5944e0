"""Runs from prompts to records: with engines that know the answer or none, killed, continued, and on a real model."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from ruler_fixtures import Killed, Mortal, Oracle, make_ruler, tiny_llama

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.generation.huggingface import HuggingFaceGenerator
from megatron_lengthgen.evaluation.report import summarise
from megatron_lengthgen.evaluation.ruler.tasks import parse_tasks
from megatron_lengthgen.evaluation.run_store import RunStore
from megatron_lengthgen.evaluation.runner import Share, evaluate, plan, score_record, verify_prompts

NAMES = ["niah_single_1", "niah_single_2", "niah_multikey_1"]
LENGTHS = [768, 1024]


def open_run(directory: Path, names: list[str] = NAMES, samples: int = 3) -> RunStore:
    scope = {"tasks": names, "lengths": LENGTHS, "samples": samples}
    return RunStore.open(directory, identity={"seed": 42}, scope=scope, info={"name": "run"})


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
    cut = score_record(sample, "all", [5] * 4, 4, "It is " + sample.outputs[0], 0.1)
    assert (cut["finish"], cut["score"], cut["generated_tokens"]) == ("length", 1.0, 4)
    ended = score_record(sample, "all", [5] * 3, 4, "It is", 0.1)
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


def test_plain_progress_names_the_last_state(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    go(open_run(tmp_path / "run"), Oracle(make_ruler().encoder))
    assert "niah_multikey_1 @ 1024: 18/18 samples" in capsys.readouterr().out


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


def test_a_model_runs_from_prompt_to_summary(tmp_path: Path) -> None:
    store = open_run(tmp_path / "run", NAMES[:1], samples=1)
    ruler, tasks = make_ruler(max_new_tokens=4), parse_tasks(NAMES[:1])
    evaluate(ruler, tasks, plan(store, tasks, LENGTHS, 1), store, HuggingFaceGenerator(tiny_llama()), save_prompts=True)
    record = store.records("niah_single_1", 768)[0]
    assert record["generated_tokens"] <= 4 and record["input"].startswith("A special magic number")
    assert record["answer_prefix"].endswith(" is") and summarise(store)["complete"]
    assert json.loads((tmp_path / "run" / "config.json").read_text())["scope"]["lengths"] == LENGTHS
