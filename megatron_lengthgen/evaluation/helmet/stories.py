"""Questions about a book, and summaries of one: NarrativeQA, and InfiniteBench's English books."""

from typing import Any

from megatron_lengthgen.errors import UserError

from .datasets import Dataset
from .draw import SEED, order, text_seed
from .examples import Example, Examples
from .files import Row
from .hub import HubSets
from .shorten import Shortener

__all__ = ["load_infbench", "load_narrativeqa", "text_limit"]

#: Shortest texts that are asked about, in tokens.
_NARRATIVE_MINIMUM, _INFBENCH_MINIMUM = 131073, 65536
_SPLITS = {
    "infbench_qa_eng": "longbook_qa_eng",
    "infbench_choice_eng": "longbook_choice_eng",
    "infbench_sum_eng": "longbook_sum_eng",
}
_LETTERS = "ABCD"


def text_limit(dataset: Dataset, length: int) -> int:
    """Tokens of text at a length: what is left after the answer and 200 tokens for the rest of the prompt (300 for the
    legal documents)."""
    return length - (300 if dataset.name == "multi_lexsum" else 200) - dataset.new_tokens


def load_narrativeqa(hub: HubSets, dataset: Dataset, length: int, samples: int, shortener: Shortener) -> Examples:
    """Questions about books and scripts of more than 131,072 tokens.

    HELMET draws the demonstrations without a seed; here they follow from the question.
    """
    fields = ("document", "question", "answers")
    test, train = (hub.rows("narrativeqa", split, fields) for split in ("test", "train"))
    rows: list[Row] = []
    for at in order(len(test), SEED):
        if len(rows) == samples:
            break
        if shortener.count(test[at]["document"]["text"]) >= _NARRATIVE_MINIMUM:
            rows.append(test[at])
    if not rows:
        raise UserError(f"narrativeqa: no text of the split test has {_NARRATIVE_MINIMUM} tokens or more")

    def make(at: int) -> Example:
        question = rows[at]["question"]["text"]
        shown = (train[row] for row in order(len(train), text_seed(question))[: dataset.shots])
        demo = "\n\n".join(f"Question: {d['question']['text']}\nAnswer: {d['answers'][0]['text']}" for d in shown)
        demo = f"For example:\n\n{demo}\n\nNow, use the following story to answer the question:\n\n"
        context, left_out = shortener.shorten(rows[at]["document"]["text"], text_limit(dataset, length))
        answers = [answer["text"] for answer in rows[at]["answers"]]
        return Example(question, context, answers, {"question": question, "demo": demo}, shortened=left_out)

    return Examples(len(rows), make)


def load_infbench(hub: HubSets, dataset: Dataset, length: int, samples: int, shortener: Shortener) -> Examples:
    """Questions, choices or summaries of InfiniteBench's books of at least 65,536 tokens."""
    split = _SPLITS[dataset.name]
    options = ("options",) if dataset.name == "infbench_choice_eng" else ()
    rows = hub.rows("infinitebench", split, ("id", "context", "input", "answer", *options))
    ids = [rows[at]["id"] for at in range(len(rows))]
    long = [at for at in range(len(rows)) if shortener.count(rows[at]["context"]) >= _INFBENCH_MINIMUM]
    if not long:
        raise UserError(f"infinitebench: no text of {split} has {_INFBENCH_MINIMUM} tokens or more")
    asked = [long[at] for at in order(len(long), SEED)[:samples]]

    def make(at: int) -> Example:
        row = rows[asked[at]]
        pool = [other for other in range(len(rows)) if ids[other] != row["id"]]
        shown = (_values(dataset, rows[pool[pick]]) for pick in order(len(pool), SEED)[: dataset.shots])
        demo = "\n\n".join(_DEMONSTRATIONS[dataset.name].format(**values) for values in shown)
        demo = f"For example:\n\n{demo}\n\nNow, read the following story:\n\n"
        values = _values(dataset, row)
        context, left_out = shortener.shorten(row["context"], text_limit(dataset, length))
        gold = [values["answer"], f"{values['answer']}. {row['answer'][0]}"] if options else list(row["answer"])
        return Example(row["input"], context, gold, values | {"demo": demo}, {"id": row["id"]}, left_out)

    return Examples(len(asked), make)


_DEMONSTRATIONS = {
    "infbench_qa_eng": "[story text]\nQuestion: {question}\nAnswer: {answer}",
    "infbench_choice_eng": "[story text]\nQuestion: {question}\nOptions:\n{options}\nAnswer: {answer}",
    "infbench_sum_eng": "[story text]\nSummary: {answer}",
}


def _values(dataset: Dataset, row: Row) -> dict[str, Any]:
    answer = row["answer"][0]
    if dataset.name == "infbench_sum_eng":
        return {"question": row["input"], "answer": answer.strip()}
    if dataset.name == "infbench_qa_eng":
        return {"question": row["input"], "answer": answer}
    if len(row["options"]) != len(_LETTERS) or answer not in row["options"]:
        raise UserError(
            f"infinitebench: question {row['id']} of longbook_choice_eng has the answer {answer!r} among the options "
            f"{row['options']}; it must be one of four"
        )
    lines = [f"{letter}. {option}" for letter, option in zip(_LETTERS, row["options"], strict=True)]
    letter = _LETTERS[row["options"].index(answer)]
    return {"question": row["input"], "options": "\n".join(lines), "answer": letter}
