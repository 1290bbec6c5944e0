"""Passages of MS MARCO to be ranked for a query."""

from megatron_lengthgen.errors import UserError

from .datasets import Dataset
from .draw import chosen, demonstrations, text_seed
from .examples import Example, Examples
from .files import Archive, JsonLines, Row

__all__ = ["load_rerank"]

_FIELDS = ("qid", "query", "ctxs")


def load_rerank(archive: Archive, dataset: Dataset, length: int, samples: int) -> Examples:
    """Queries of an ``msmarco/*.jsonl``; demonstrations are other queries with few passages."""
    tests, demos = JsonLines(archive.file(dataset.file_at(length))), JsonLines(archive.file(dataset.demo_file))
    qids = tests.scan(_FIELDS, lambda row: row["qid"])
    shown = list(enumerate(demos.scan(_FIELDS, lambda row: row["qid"])))
    keys = chosen(qids, samples)
    rows = [at for at, qid in enumerate(qids) if qid in keys]
    if len(shown) > 2 * len(rows):
        # HELMET's rule, which decides what the shuffle is over: no test query at all where there are plenty of others.
        shown = [(at, qid) for at, qid in shown if qid not in keys]

    def make(at: int) -> Example:
        row = tests[rows[at]]
        pool = [(place, qid) for place, qid in shown if qid != row["qid"]]
        picked = demonstrations([qid for _, qid in pool], dataset.shots, text_seed(row["qid"]))
        if len(picked) < dataset.shots:
            raise UserError(
                f"{demos.path} holds {len(picked)} queries besides the one asked, {dataset.shots} are needed"
            )
        # The titles of the question's own passages decide the form of all.
        titled = "title" in row["ctxs"][0]
        text = "".join(_demonstration(demos[pool[pick][0]], titled) for pick in picked)
        relevance = [[passage["id"], str(int(passage["label"]))] for passage in row["ctxs"]]
        kept = {name: value for name, value in row.items() if name not in ("query", "ctxs")} | {"qrel": relevance}
        values = {"question": row["query"], "demos": text}
        return Example(row["query"], _passages(row, titled), _ranking(row), values, kept, group=row["qid"])

    return Examples(len(rows), make)


def _passages(row: Row, titled: bool) -> str:
    def passage(p: Row) -> str:
        title = f" (Title: {p['title']})" if titled else ""
        return f"[ID: {p['id']}] Document{title}: {p['text']}"

    return "\n\n".join(map(passage, row["ctxs"]))


def _ranking(row: Row) -> str:
    return " > ".join(p["id"] for p in sorted(row["ctxs"], key=lambda p: p["label"], reverse=True))


def _demonstration(row: Row, titled: bool) -> str:
    return f"{_passages(row, titled)}\n\nQuery: {row['query']}\nRanking: {_ranking(row)}\n\n"
