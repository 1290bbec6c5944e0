"""RULER's two metrics and its clean-up of predictions.

Source: NVIDIA/RULER ``scripts/eval/synthetic/constants.py`` and ``scripts/eval/evaluate.py``.
"""

import re
from collections.abc import Callable, Sequence

__all__ = ["METRICS", "postprocess", "string_match_all", "string_match_part"]

_CONTROL = re.compile(r"[\x00-\x1f]")


def postprocess(prediction: str) -> str:
    """Strip, turn every control character into a newline, strip again."""
    return _CONTROL.sub("\n", prediction.strip()).strip()


def _found(prediction: str, references: Sequence[str]) -> list[bool]:
    if not references:
        raise ValueError("a sample without references cannot be scored")
    text = prediction.lower()
    return [reference.lower() in text for reference in references]


def string_match_all(prediction: str, references: Sequence[str]) -> float:
    """Share of the references that occur in the prediction, ignoring case: a number in [0, 1]."""
    found = _found(prediction, references)
    return sum(found) / len(found)


def string_match_part(prediction: str, references: Sequence[str]) -> float:
    """1.0 if any reference occurs in the prediction, ignoring case, else 0.0."""
    return float(any(_found(prediction, references)))


METRICS: dict[str, Callable[[str, Sequence[str]], float]] = {"all": string_match_all, "part": string_match_part}
