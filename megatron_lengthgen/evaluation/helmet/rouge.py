"""ROUGE-L.

Source: C.-Y. Lin, "ROUGE: a package for automatic evaluation of summaries" (2004), in the form of Google's
``rouge_score`` with stemming: lower case, runs of letters a to z and digits, words over three letters as their stems.
"""

import re
from collections.abc import Sequence

from .porter import stem

__all__ = ["common_subsequence", "rouge_l"]

_WORD = re.compile(r"[a-z0-9]+")


def _tokens(text: str) -> list[str]:
    return [stem(word) if len(word) > 3 else word for word in _WORD.findall(text.lower())]


def common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence.

    A row of the usual table is held as bits of one integer, of which 0 marks a step (Hyyrö, 2004): time goes with the
    length of ``b`` times that of ``a`` over the width of a machine word.
    """
    positions: dict[str, int] = {}
    for at, token in enumerate(a):
        positions[token] = positions.get(token, 0) | 1 << at
    full = (1 << len(a)) - 1
    row = full
    for token in b:
        matched = row & positions.get(token, 0)
        row = ((row + matched) | (row - matched)) & full
    return len(a) - row.bit_count()


def rouge_l(prediction: str, reference: str) -> tuple[float, float]:
    """F1 and recall, both in [0, 1]; 0 where either text has no word."""
    target, predicted = _tokens(reference), _tokens(prediction)
    common = common_subsequence(target, predicted)
    if not common:
        return 0.0, 0.0
    precision, recall = common / len(predicted), common / len(target)
    return 2 * precision * recall / (precision + recall), recall
