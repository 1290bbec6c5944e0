"""ALCE's string measures: which short answers a cited text gives.

Source: princeton-nlp/ALCE and princeton-nlp/HELMET ``eval_alce.py``; T. Gao et al., "Enabling large language models to
generate text with citations" (2023).
"""

import re
from collections.abc import Sequence

from .text_metrics import normalise

__all__ = ["clean", "qampari_items", "qampari_recall_top5", "remove_citations", "str_em"]


def clean(output: str) -> str:
    """The answer as one line, without a left-over end of turn."""
    return re.sub(r"\n+", " ", output).replace("<|im_end|>", "")


def remove_citations(text: str) -> str:
    """Without ``[1]``, ``[2`` and the like, nor the space before them."""
    return re.sub(r" ?\[\d+", "", text).replace(" |", "").replace("]", "")


def str_em(output: str, answers: Sequence[Sequence[str]]) -> float:
    """Share of the questions one of whose short answers occurs in the normalised text.

    Args:
        output: cleaned, without citations.
        answers: for each question its short answers.
    """
    text = normalise(output)
    found = [any(normalise(answer) in text for answer in group) for group in answers]
    return sum(found) / len(found)


def qampari_items(output: str) -> list[str]:
    """The parts of a list with commas; the text's last full stop or comma belongs to none."""
    return [part.strip() for part in output.rstrip().rstrip(".").rstrip(",").split(",")]


def qampari_recall_top5(output: str, answers: Sequence[Sequence[str]]) -> float:
    """Share of the answers that are items of the list, where five are as good as all.

    Args:
        output: cleaned, without citations.
        answers: for each answer its aliases.
    """
    items = {normalise(item) for item in qampari_items(output)} - {""}
    found = sum(any(normalise(alias) in items for alias in aliases) for aliases in answers)
    return min(5, found) / min(5, len(answers))
