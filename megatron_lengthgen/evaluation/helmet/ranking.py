"""Rankings of documents, and how good they are."""

import math
import re
from collections.abc import Mapping, Sequence

__all__ = ["ndcg", "parse_ranking"]

_NOISE = re.compile(r"[\[\]:]")
_CHAIN = re.compile(r"\d+(?:\s*>\s*\d+)*")


def parse_ranking(output: str) -> list[str]:
    """Document ids, best first, each once: the longest chain of numbers joined by ``>``.

    Brackets, colons and ``id`` are dropped first. Of chains of equal length the first counts; without a number
    the whole text stands as the one id, which matches none.

    Source: princeton-nlp/HELMET ``utils.py``, ``parse_rankings``.
    """
    text = _NOISE.sub("", output).lower().replace("id", "")
    chain = max((match[0] for match in _CHAIN.finditer(text)), key=len, default=None)
    if chain is None:
        return [text]
    return list(dict.fromkeys(number.strip() for number in chain.split(">")))


def ndcg(ranking: Sequence[str], relevance: Mapping[str, int], k: int) -> float:
    """NDCG@k in [0, 1], with the relevance itself as gain; 0 where nothing is relevant.

    Source: NIST ``trec_eval``, measure ``ndcg_cut``, as ``pytrec_eval`` gives it.

    Args:
        ranking: ids, best first, each once. Those without a relevance hold their place and gain nothing.
    """

    def discounted(gains: Sequence[int]) -> float:
        return sum(max(gain, 0) / math.log2(place + 2) for place, gain in enumerate(gains[:k]))

    ideal = discounted(sorted(relevance.values(), reverse=True))
    return discounted([relevance.get(document, 0) for document in ranking]) / ideal if ideal else 0.0
