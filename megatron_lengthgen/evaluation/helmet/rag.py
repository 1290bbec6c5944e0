"""Retrieval-augmented answers: a question after many passages, of which some hold the answer."""

from collections.abc import Callable
from typing import Any

from megatron_lengthgen.errors import UserError

from .datasets import Dataset
from .draw import chosen, demonstrations, text_seed
from .examples import Example, Examples
from .files import Archive, JsonLines, Row

__all__ = ["load_rag"]

_FIELDS = ("question", "answers", "ctxs")


def load_rag(archive: Archive, dataset: Dataset, length: int, samples: int) -> Examples:
    """Questions of a ``kilt/*.jsonl``, each with its answer at several depths.

    Of PopQA only subjects with fewer than 1,000 page views a month are asked for. It has one split, so a question is
    not its own demonstration.
    """
    popqa = dataset.name == "kilt_popqa"
    fields = (*_FIELDS, "s_pop") if popqa else _FIELDS

    def look(row: Row) -> tuple[bool, Any, Any]:
        return not popqa or row["s_pop"] < 1000, row.get("id"), row["question"]

    def usable(lines: JsonLines) -> list[tuple[int, Any, Any]]:
        return [(at, id_, text) for at, (fits, id_, text) in enumerate(lines.scan(fields, look)) if fits]

    tests, demos = JsonLines(archive.file(dataset.file_at(length))), JsonLines(archive.file(dataset.demo_file))
    asked, shown = usable(tests), usable(demos)
    # Some sets have ids; in the others a question's text stands for it.
    key: Callable[[tuple[int, Any, Any]], Any] = (
        (lambda row: row[1]) if any(row[1] is not None for row in asked) else (lambda row: row[2])
    )
    keys = chosen([key(row) for row in asked], samples)
    asked = [row for row in asked if key(row) in keys]

    def make(at: int) -> Example:
        place, own = asked[at][0], key(asked[at])
        row = tests[place]
        pool = [other for other in shown if not popqa or key(other) != own]
        picked = demonstrations([key(other) for other in pool], dataset.shots, text_seed(str(own)))
        if len(picked) < dataset.shots:
            raise UserError(
                f"{demos.path} holds {len(picked)} questions besides the one asked, {dataset.shots} are needed"
            )
        text = "".join(_demonstration(demos[pool[pick][0]]) + "\n\n" for pick in picked)
        kept = {name: value for name, value in row.items() if name != "ctxs"} | {"k": len(row["ctxs"])}
        values = {"question": row["question"], "demos": text}
        return Example(row["question"], _passages(row), row["answers"], values, kept, group=str(own))

    return Examples(len(asked), make)


def _passages(row: Row) -> str:
    return "\n\n".join(f"Document (Title: {passage['title']}): {passage['text']}" for passage in row["ctxs"])


def _demonstration(row: Row) -> str:
    return f"{_passages(row)}\n\nQuestion: {row['question']}\nAnswer: {row['answers'][0]}"
