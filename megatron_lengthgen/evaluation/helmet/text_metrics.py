"""Answers against references as text.

Source: princeton-nlp/HELMET ``utils.py`` and ``data.py``, whose normalisation is SQuAD's (Rajpurkar et al., 2016).
"""

import re
import string
from collections import Counter
from collections.abc import Iterable, Sequence

from .rouge import rouge_l

__all__ = ["Gold", "flat", "normalise", "parse_answer", "ruler_recall", "text_metrics"]

#: One reference, several of which one is enough, or groups of such.
Gold = str | Sequence[str] | Sequence[Sequence[str]]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_DECIDED = {"yes", "no", "noanswer"}


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, without articles, with single spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def flat(gold: Gold) -> list[str]:
    """All references of any form."""
    if isinstance(gold, str):
        return [gold]
    return [text for part in gold for text in ([part] if isinstance(part, str) else part)]


def _word_f1(prediction: str, reference: str) -> float:
    """F1 of two normalised texts as bags of words; yes and no must agree as a whole."""
    if prediction != reference and (prediction in _DECIDED or reference in _DECIDED):
        return 0.0
    predicted, wanted = prediction.split(), reference.split()
    common = (Counter(predicted) & Counter(wanted)).total()
    return 2 * common / (len(predicted) + len(wanted)) if common else 0.0


def text_metrics(prediction: str, gold: Gold) -> dict[str, float]:
    """HELMET's usual measures, each the best over the references and in [0, 1]."""
    predicted = normalise(prediction)
    wanted = [normalise(reference) for reference in flat(gold)]
    rouge = [rouge_l(prediction, reference) for reference in flat(gold)]
    return {
        "exact_match": float(predicted in wanted),
        "f1": max(_word_f1(predicted, reference) for reference in wanted),
        "substring_exact_match": float(any(reference in predicted for reference in wanted)),
        "rougeL_f1": max(f1 for f1, _ in rouge),
        "rougeL_recall": max(recall for _, recall in rouge),
    }


def ruler_recall(prediction: str, references: Iterable[str]) -> float:
    """Share of the references that occur in the prediction, ignoring case."""
    text = prediction.lower()
    found = [reference.lower() in text for reference in references]
    return sum(found) / len(found)


def parse_answer(output: str, prefix: str = "Answer:") -> str:
    """What follows the first ``prefix`` (in any case) on its line, or else the first line; a second prefix is taken
    off, as chat models repeat it."""
    mark = re.compile(re.escape(prefix), re.IGNORECASE)
    found = mark.search(output)
    line = output[found.end() if found else 0 :].split("\n", 1)[0].strip()
    again = mark.match(line)
    return line[again.end() if again else 0 :].strip()
