"""Recall: needles from RULER, and a key's value in a JSON object."""

from .datasets import Dataset
from .draw import SEED, order
from .examples import Example, Examples
from .files import Archive, JsonLines, Row

__all__ = ["load_json_kv", "load_needles"]


def load_needles(archive: Archive, dataset: Dataset, length: int, samples: int) -> Examples:
    """Questions of a ``ruler/*/validation_*.jsonl``."""
    lines = JsonLines(archive.file(dataset.file_at(length)))
    count = len(lines.scan(("context", "query", "type_needle_v", "answer|outputs"), lambda row: None))
    rows = order(count, SEED)[:samples]

    def make(at: int) -> Example:
        row = lines[rows[at]]
        answers = row["answer"] if "answer" in row else row["outputs"]
        values = {"query": row["query"], "type_needle_v": row["type_needle_v"]}
        return Example(row["query"], row["context"], answers, values, _rest(row))

    return Examples(len(rows), make)


def load_json_kv(archive: Archive, dataset: Dataset, length: int, samples: int) -> Examples:
    """Questions of a ``json_kv/test_*.jsonl``; each row brings its own demonstrations."""
    lines = JsonLines(archive.file(dataset.file_at(length)))
    count = len(lines.scan(("context", "question", "answer", "demos", "num_kvs"), lambda row: None))
    rows = order(count, SEED)[:samples]

    def make(at: int) -> Example:
        row = lines[rows[at]]
        demos = "".join(f"Key: {key}\nCorresponding value: {value}\n\n" for key, value in row["demos"][: dataset.shots])
        values = {"question": row["question"], "demos": demos}
        return Example(row["question"], row["context"], row["answer"], values, _rest(row) | {"k": row["num_kvs"]})

    return Examples(len(rows), make)


def _rest(row: Row) -> dict[str, object]:
    return {key: value for key, value in row.items() if key not in ("context", "demos")}
