"""Small files in exactly the layout of HELMET's archive, of its repository and of the sets from the hub.

The text is ours: sentences of ``ruler_fixtures.ESSAY`` and made-up names.
"""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruler_fixtures import ESSAY

from megatron_lengthgen.evaluation.helmet.datasets import DATASETS

__all__ = ["Files", "make_files", "read_lines", "write_lines"]

_SENTENCES = [part.strip() for part in ESSAY.split(". ")]
_KINDS = ("number", "uuid")


class Files:
    """Where they are: ``data`` and ``repository`` (whose ``data`` it is), and ``sets`` by name."""

    def __init__(self, root: Path) -> None:
        self.repository, self.data = root, root / "data"
        self.sets = {name: root / "sets" / name for name in _SETS}

    def options(self) -> list[str]:
        """The options of the command line."""
        options = ["--data", str(self.data)]
        for name, path in self.sets.items():
            options += ["--set", f"{name}={path}"]
        return options


def make_files(root: Path, lengths: Sequence[int], questions: int = 3) -> Files:
    """Write everything for these lengths, with ``questions`` questions per data set."""
    files, rand = Files(root), random.Random(7)
    for dataset in DATASETS.values():
        for length in lengths if dataset.file else ():
            path = files.data / dataset.file_at(length)
            rows = list(
                _ROWS[dataset.category if dataset.name != "json_kv" else "json_kv"](rand, dataset, length, questions)
            )
            if dataset.category == "cite":
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(rows), encoding="utf-8")
            else:
                write_lines(path, rows)
    for dataset in DATASETS.values():
        if dataset.category == "rag" and dataset.name != "kilt_popqa":
            write_lines(files.data / dataset.demo_file, _kilt_rows(rand, dataset, 3, 4, depths=1, first=100))
        if dataset.name == "kilt_popqa":
            write_lines(files.data / dataset.demo_file, _kilt_rows(rand, dataset, 3, questions + 3, depths=1))
        if dataset.category == "rerank":
            write_lines(files.data / dataset.demo_file, _rerank_rows(rand, 4, questions + 3))
        if dataset.category == "cite":
            _write(files.repository / dataset.demo_file, json.dumps(_alce_prompts(rand)))
    _write(files.repository / "scripts/eval_gpt4_longqa.py", _LONGQA_SCRIPT)
    _write(files.repository / "scripts/eval_gpt4_summ.py", _SUMM_SCRIPT)
    for name, splits in _SETS.items():
        for split, rows in splits(rand, questions).items():
            write_lines(files.sets[name] / f"{split}.jsonl", rows)
    points = [{"id": i, "keypoints": ["A point.", "Another point."]} for i in range(questions + 3)]
    write_lines(files.data / "infbench/longbook_sum_eng_keypoints.jsonl", points)
    cases = [{"id": f"case{i}", "summary/short_keypoints": ["A fact.", "Its end."]} for i in range(questions + 3)]
    write_lines(files.data / "multi_lexsum/multi_lexsum_val.jsonl", cases)
    return files


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSON lines."""
    _write(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The inverse of :func:`write_lines`."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _text(rand: random.Random, sentences: int) -> str:
    return ". ".join(rand.choices(_SENTENCES, k=sentences)) + "."


def _word(rand: random.Random) -> str:
    return "".join(rand.choices("abcdefghijklmnoprstuvwz", k=7))


# -- the archive ------------------------------------------------------------------------------------------------------


def _needle_rows(rand: random.Random, dataset: Any, length: int, questions: int) -> Iterable[dict[str, Any]]:
    several = dataset.name.endswith("_mv")
    kind = "uuid" if dataset.name.endswith("_3") else "number"
    for index in range(questions):
        key, values = _word(rand), [str(rand.randrange(10**6, 10**7)) for _ in range(4 if several else 1)]
        needles = [f"One of the special magic {kind}s for {key} is: {value}." for value in values]
        parts = rand.choices(_SENTENCES, k=length // 64) + needles
        rand.shuffle(parts)
        yield {
            "index": index,
            "query": key,
            "type_needle_v": f"{kind}s" if several else kind,
            "context": " ".join(parts),
            "outputs": values,
            "length": length,
        }


def _kv_rows(rand: random.Random, dataset: Any, length: int, questions: int) -> Iterable[dict[str, Any]]:
    count = dataset.size(length)
    for index in range(questions):
        pairs = {_word(rand): _word(rand) for _ in range(count)}
        keys = list(pairs)
        yield {
            "id": index,
            "num_kvs": count,
            "depth": index / max(questions - 1, 1),
            "context": "JSON data:\n" + json.dumps(pairs, indent=0),
            "question": keys[0],
            "answer": pairs[keys[0]],
            "demos": [[key, pairs[key]] for key in keys[1:4]],
        }


def _kilt(rand: random.Random, dataset: Any, length: int, questions: int) -> Iterable[dict[str, Any]]:
    return _kilt_rows(rand, dataset, dataset.size(length), questions, depths=2)


def _kilt_rows(
    rand: random.Random, dataset: Any, passages: int, questions: int, depths: int, first: int = 0
) -> Iterable[dict[str, Any]]:
    for number in range(first, first + questions):
        answer = f"{_word(rand).title()} {number}"
        others = [{"title": _word(rand), "text": _text(rand, 1), "has_answer": False} for _ in range(passages - 1)]
        gold = {"title": f"Page {number}", "text": f"It is the {answer}, they say.", "has_answer": True}
        for depth in range(depths):
            at = depth * (passages - 1)
            row = {
                "question": f"What is the answer to question {number}?",
                "answers": [answer, f"The {answer}"],
                "ctxs": [*others[:at], gold, *others[at:]],
                "depth": float(depth),
            }
            # As in HELMET: NQ's rows have no id, and PopQA's say how often a subject is looked up.
            if dataset.name != "kilt_nq":
                row["id"] = f"q{number}" if dataset.name != "kilt_popqa" else number
            if dataset.name == "kilt_popqa":
                row["s_pop"] = 100 + number
            yield row


def _rerank(rand: random.Random, dataset: Any, length: int, questions: int) -> Iterable[dict[str, Any]]:
    return _rerank_rows(rand, dataset.size(length), questions)


def _rerank_rows(rand: random.Random, passages: int, questions: int) -> Iterable[dict[str, Any]]:
    for number in range(questions):
        labels = [3, 2, 1] + [0] * (passages - 3)
        rand.shuffle(labels)
        ids = rand.sample(range(1, 10 * passages), passages)
        yield {
            "qid": f"{1000 + number}",
            "query": f"query {number}",
            "ctxs": [
                {"id": str(i), "label": label, "text": _text(rand, 1)} for i, label in zip(ids, labels, strict=True)
            ],
        }


def _alce(rand: random.Random, dataset: Any, length: int, questions: int) -> Iterable[dict[str, Any]]:
    for number in range(questions):
        answers = [[f"{_word(rand)}", f"{_word(rand)} {number}"] for _ in range(2)]
        row: dict[str, Any] = {
            "question": f"Which things belong to {number}?",
            "answer": f"{answers[0][0]} and {answers[1][0]}",
            "docs": [{"id": str(i), "title": _word(rand), "text": _text(rand, 1)} for i in range(32)],
        }
        if dataset.name == "alce_asqa":
            row["qa_pairs"] = [{"question": "Which?", "short_answers": group} for group in answers]
        else:
            row["answers"] = answers
        yield row


def _alce_prompts(rand: random.Random) -> dict[str, Any]:
    def demo(number: int) -> dict[str, Any]:
        docs = [{"title": _word(rand), "text": _text(rand, 1)} for _ in range(2)]
        return {"question": f"What of {number}?", "answer": f"This {number} [1].", "docs": docs}

    return {
        "instruction": "Instruction: answer with citations.",
        "demo_sep": "\n\n\n",
        "demo_prompt": "{instruction}\n\nQuestion: {question}\n\n{context}\n\nAnswer: {answer}",
        "doc_prompt": "Document [{ID}](Title: {title}): {text}",
        "demos": [demo(number) for number in range(4)],
    }


_ROWS: Mapping[str, Any] = {
    "recall": _needle_rows,
    "json_kv": _kv_rows,
    "rag": _kilt,
    "rerank": _rerank,
    "cite": _alce,
}

# -- HELMET's repository ----------------------------------------------------------------------------------------------

_LONGQA_SCRIPT = '''import sys

sys.exit("nothing here is to be run")

judge_prompt = """Judge. {{"fluency": 1}} Question: {question} Correct: {correct_answers} Answer: {parsed_output}"""
'''

_SUMM_SCRIPT = "".join(
    f'{kind}_prompt{ending} = """Judge the {kind}{ending}. {fields}"""\n'
    for ending in ("", "_book")
    for kind, fields in (
        ("fluency", "{text}"),
        ("recall", "{keypoints} Summary: {summary}"),
        ("precision", "{expert_summary} Summary: {summary}"),
    )
)

# -- the sets from the hub --------------------------------------------------------------------------------------------


def _trec(rand: random.Random, questions: int) -> dict[str, list[dict[str, Any]]]:
    def row(number: int) -> dict[str, Any]:
        return {"text": f"What is {_word(rand)} ?", "coarse_label": number % 6, "fine_label": number % 50}

    return {"train": [row(i) for i in range(120)], "test": [row(i) for i in range(2 * questions)]}


def _classes(labels: int, label: str, test: str) -> Any:
    def splits(rand: random.Random, questions: int) -> dict[str, list[dict[str, Any]]]:
        def row(number: int) -> dict[str, Any]:
            return {"text": f"Please do {_word(rand)}", label: number % labels}

        rows = {"train": [row(i) for i in range(6 * labels)]}
        return rows | ({test: [row(i) for i in range(2 * questions)]} if test else {})

    return splits


def _narrativeqa(rand: random.Random, questions: int) -> dict[str, list[dict[str, Any]]]:
    def row(number: int, sentences: int) -> dict[str, Any]:
        question = {"text": f"Who is number {number}?", "tokens": []}
        answers = [{"text": f"Number {number}", "tokens": []}, {"text": "nobody", "tokens": []}]
        return {
            "document": {"id": str(number), "text": _text(rand, sentences)},
            "question": question,
            "answers": answers,
        }

    # One test text is too short to be asked about.
    return {
        "train": [row(100 + i, 2) for i in range(4)],
        "test": [row(0, 20), *(row(i, 12000) for i in range(1, questions))],
    }


def _infinitebench(rand: random.Random, questions: int) -> dict[str, list[dict[str, Any]]]:
    book = _text(rand, 6000)

    def row(number: int, answer: str, options: list[str]) -> dict[str, Any]:
        return {
            "id": number,
            "context": book,
            "input": f"Who is number {number}?",
            "answer": [answer],
            "options": options,
        }

    options = ["Ann", "Bob", "Cem", "Dora"]
    return {
        "longbook_qa_eng": [row(i, f"Number {i}", []) for i in range(questions + 3)],
        "longbook_choice_eng": [row(i, options[i % 4], options) for i in range(questions + 3)],
        "longbook_sum_eng": [row(i, f" Book {i} ends well. ", []) for i in range(questions + 3)],
    }


def _multi_lexsum(rand: random.Random, questions: int) -> dict[str, list[dict[str, Any]]]:
    sources = [_text(rand, 3200), _text(rand, 3200)]

    def row(number: int, short: str | None) -> dict[str, Any]:
        return {
            "id": f"case{number}",
            "sources": sources if number < 50 else ["short"],
            "summary/short": short,
            "summary/long": f"At length: case {number} was settled.",
        }

    return {
        "train": [row(100 + i, f"Case {100 + i}.") for i in range(4)],
        "validation": [row(0, None), *(row(i, f"Case {i} was settled.") for i in range(1, questions + 1))],
    }


_SETS: Mapping[str, Any] = {
    "trec": _trec,
    "banking77": _classes(77, "label", "test"),
    "clinic150": _classes(151, "intent", "validation"),
    "nlu": _classes(68, "label", ""),
    "narrativeqa": _narrativeqa,
    "infinitebench": _infinitebench,
    "multi_lexsum": _multi_lexsum,
}
