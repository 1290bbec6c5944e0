"""Answers that cite their documents: ALCE's ASQA and QAMPARI."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_lengthgen.errors import UserError

from .datasets import Dataset
from .draw import SEED, order, text_seed
from .examples import Example, Examples
from .files import Archive, Row, check_fields, read_json_rows

__all__ = ["load_cite"]

_KEPT = ("sample_id", "id", "answer", "answers", "qa_pairs", "annotations")


def load_cite(archive: Archive, dataset: Dataset, length: int, samples: int) -> Examples:
    """Questions of an ``alce/*_eval_gtr_top2000.json`` with as many of their documents as fill the length.

    HELMET draws the demonstrations one after the other from a stream; here they follow from the question.
    """
    documents = dataset.size(length)
    gold = "qa_pairs" if dataset.name == "alce_asqa" else "answers"
    path = archive.file(dataset.file_at(length))
    everything = read_json_rows(path, ("question", "docs", gold))
    # Of 2,000 documents a question no more are kept in memory than are shown.
    rows = [
        {name: everything[at][name] for name in ("question", *_KEPT) if name in everything[at]}
        | {"docs": everything[at]["docs"][:documents]}
        for at in order(len(everything), SEED)[:samples]
    ]
    for row in rows:
        if len(row["docs"]) < documents:
            raise UserError(f"{path}: {row['question']!r} has {len(row['docs'])} documents, {documents} are needed")
    prompts = _prompts(archive, dataset)

    def make(at: int) -> Example:
        row = rows[at]
        shown = random.Random(text_seed(row["question"])).sample(prompts["demos"], dataset.shots)
        demos = "".join(_demonstration(prompts, demo) + "\n\n\n" for demo in shown)
        values = {"question": row["question"], "demo_text": demos, "instruction": prompts["instruction"]}
        answers = [pair["short_answers"] for pair in row["qa_pairs"]] if gold == "qa_pairs" else row["answers"]
        return Example(row["question"], _documents(prompts, row["docs"]), answers, values, row)

    return Examples(len(rows), make)


def _prompts(archive: Archive, dataset: Dataset) -> Mapping[str, Any]:
    path = archive.from_repository(dataset.demo_file)
    try:
        prompts = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    check_fields(str(path), prompts, ("instruction", "demo_prompt", "doc_prompt", "demos"))
    return prompts


def _documents(prompts: Mapping[str, Any], documents: Sequence[Row]) -> str:
    return "\n\n".join(prompts["doc_prompt"].format(**d, ID=number) for number, d in enumerate(documents, 1))


def _demonstration(prompts: Mapping[str, Any], demo: Row) -> str:
    context = _documents(prompts, demo["docs"])
    return prompts["demo_prompt"].format(**demo, instruction=prompts["instruction"], context=context)
