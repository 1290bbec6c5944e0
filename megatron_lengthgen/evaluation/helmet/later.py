"""Measures that are computed when all answers are there: citations and verdicts of a judge.

They are kept as records of their own, each durable before the next is asked for, under the measure's name; so they are
continued, reported and compared as tasks are, and nothing is asked twice.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.lengths import length_name
from megatron_lengthgen.evaluation.run_store import RunStore

from .alce_metrics import clean
from .citations import citation_scores, statements
from .data import Helmet
from .datasets import Dataset, measure_key
from .entailment import Entailment
from .judged import Judge, NoVerdict

__all__ = ["judge_answers", "score_citations"]

#: A judge that gives no readable verdict is asked this often.
_ASKED = 3

Say = Callable[[str], None]


def judge_answers(
    store: RunStore, data: Helmet, dataset: Dataset, lengths: Sequence[int], judge: Judge, name: str, say: Say = print
) -> None:
    """Judge what is not judged yet; an empty answer scores zero and is not shown to the judge.

    An answer on which there is no readable verdict stays open; the next start asks again.

    Raises:
        UserError: when the judge fails; verdicts so far are kept.
    """
    key = measure_key(dataset.name, "judge")
    for length in lengths:
        open_, unread = _open(store, dataset, (key,), length), 0
        if not open_:
            continue
        say(f"judging {len(open_)} answers of {dataset.name} at {length_name(length)} by {name}")
        with store.appending(key, length, 0) as file:
            for index, record in open_.items():
                details: dict[str, Any] = {"judge": name}
                score = 0.0
                if record["pred"].strip():
                    example = data.example(dataset, length, index)
                    for _ in range(_ASKED):
                        with contextlib.suppress(NoVerdict):
                            score, verdict = judge.score(example, record["output"])
                            details["verdict"] = verdict
                            break
                    else:
                        unread += 1
                        continue
                file.write(_derived(record, key, score, details))
        if unread:
            say(f"{unread} answer(s) got no readable verdict from {name}; start the same command to ask again")


def score_citations(
    store: RunStore, data: Helmet, dataset: Dataset, lengths: Sequence[int], model: Entailment, say: Say = print
) -> None:
    """Citation recall and precision of the answers that have none yet."""
    keys = tuple(measure_key(dataset.name, measure) for measure in dataset.later)
    for length in lengths:
        open_ = _open(store, dataset, keys, length)
        if not open_:
            continue
        say(f"citations of {len(open_)} answers of {dataset.name} at {length_name(length)} by {model.name}")
        with _appending(store, keys, length) as files:
            for index, record in open_.items():
                scores = (0.0, 0.0)
                if record["pred"].strip():
                    example = data.example(dataset, length, index)
                    said = statements(clean(record["output"]), example.question, dataset.name == "alce_qampari")
                    scores = citation_scores(said, example.kept["docs"], model.entails)
                for key, score, file in zip(keys, scores, files, strict=True):
                    file.write(_derived(record, key, score, {"entailment": model.name}))


@contextlib.contextmanager
def _appending(store: RunStore, keys: Sequence[str], length: int) -> Iterator[list[Any]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(store.appending(key, length, 0)) for key in keys]


def _open(store: RunStore, dataset: Dataset, keys: Sequence[str], length: int) -> dict[int, Mapping[str, Any]]:
    """Answers of this shard that lack one of the measures; a crash may have left one without the others."""
    answers = store.records(dataset.name, length)
    done = [store.records(key, length) for key in keys]
    for key, records in zip(keys, done, strict=True):
        if strange := [
            index
            for index, record in records.items()
            if index not in answers or record["pred"] != answers[index]["pred"]
        ]:
            raise UserError(f"{key} at {length} scores another answer to question {strange[0]} than the run holds")
    return {
        index: answers[index]
        for index in sorted(answers)
        if store.shard.holds(index) and not all(index in records for records in done)
    }


def _derived(record: Mapping[str, Any], key: str, score: float, details: Mapping[str, Any]) -> dict[str, Any]:
    """A record as reports want it; what the answer cost is counted where the answer is."""
    kept = {name: record[name] for name in ("index", "max_length", "pred", "finish", "prompt_sha256")}
    costless = {"prompt_tokens": 0, "generated_tokens": 0, "seconds": 0.0}
    return {**kept, **costless, "task": key, "score": score, **details}
