"""Summaries of civil rights lawsuits from their documents: Multi-LexSum."""

from megatron_lengthgen.errors import UserError

from .datasets import Dataset
from .draw import SEED, order, text_seed
from .examples import Example, Examples
from .hub import HubSets
from .shorten import Shortener
from .stories import text_limit

__all__ = ["load_multi_lexsum"]

_MINIMUM = 65536


def load_multi_lexsum(hub: HubSets, dataset: Dataset, length: int, samples: int, shortener: Shortener) -> Examples:
    """Cases whose documents have at least 65,536 tokens together, and that have a short summary.

    HELMET draws the demonstrations without a seed; here they follow from the case.
    """
    fields = ("id", "sources", "summary/short", "summary/long")
    splits = (hub.rows("multi_lexsum", split, fields) for split in ("validation", "train"))
    test, train = ([row for row in rows if row["summary/short"] is not None] for rows in splits)
    long = [row for row in test if shortener.count("\n\n".join(row["sources"])) >= _MINIMUM]
    if not long:
        raise UserError(f"multi_lexsum: no case of the split validation has {_MINIMUM} tokens or more")
    # HELMET shuffles only where there are more than it asks for.
    rows = [long[at] for at in order(len(long), SEED)[:samples]] if len(long) > samples else long

    def make(at: int) -> Example:
        row = rows[at]
        shown = (train[pick] for pick in order(len(train), text_seed(str(row["id"])))[: dataset.shots])
        demo = "\n\n".join(f"Summary: {case['summary/short']}" for case in shown)
        demo = f"Example summaries:\n\n{demo}\n\nNow, write a summary of the following legal documents.\n"
        context, left_out = shortener.shorten("\n\n".join(row["sources"]), text_limit(dataset, length))
        kept = {name: row[name] for name in ("id", "summary/short", "summary/long")}
        return Example("", context, row["summary/short"], {"demo": demo}, kept, left_out)

    return Examples(len(rows), make)
