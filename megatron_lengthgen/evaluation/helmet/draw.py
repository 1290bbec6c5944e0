"""Which questions are asked and what demonstrations they get: each a function of seeds and of the question alone.

The order of rows is that of ``datasets.Dataset.shuffle`` with the same seed, so that HELMET's own draws come out where
it seeds them. Source: princeton-nlp/HELMET ``data.py``.
"""

import hashlib
import math
import random
from collections.abc import Hashable, Sequence

import numpy as np

__all__ = ["SEED", "balanced", "chosen", "demonstrations", "label_codes", "order", "parts", "text_seed"]

SEED = 42


def text_seed(text: str, add: int = 0) -> int:
    """A seed below 2**31 from a question's text."""
    return (int(hashlib.sha256(text.encode("utf-8")).hexdigest(), 16) + add) % 2**31


def order(count: int, seed: int) -> list[int]:
    """``count`` row numbers in the order that ``datasets`` shuffles them into."""
    return np.random.default_rng(seed).permutation(count).tolist()


def parts(count: int, share: float, seed: int) -> tuple[list[int], list[int]]:
    """Row numbers of a training and of a test part, as ``datasets`` splits them; ``share`` is the test part's."""
    shuffled = order(count, seed)
    size = math.ceil(share * count)
    return shuffled[size:], shuffled[:size]


def chosen[K: (str, int)](keys: Sequence[K], samples: int, seed: int = SEED) -> set[K]:
    """At most ``samples`` of the different keys."""
    different = sorted(set(keys))
    return set(random.Random(seed).sample(different, min(samples, len(different))))


def demonstrations(keys: Sequence[Hashable], shots: int, seed: int) -> list[int]:
    """Positions of ``shots`` rows with different keys; fewer where there are fewer keys."""
    picked: dict[Hashable, int] = {}
    for at in order(len(keys), seed):
        if len(picked) == shots:
            break
        picked.setdefault(keys[at], at)
    return list(picked.values())


def balanced(labels: Sequence[Hashable], count: int, seed: int) -> list[int]:
    """``count`` row numbers in rounds: each round has every label once, in an order of its own.

    Rows come again only once all of their label are used.
    """
    rand = random.Random(seed)
    rows: dict[Hashable, list[int]] = {}
    for row, label in enumerate(labels):
        rows.setdefault(label, []).append(row)
    rounds = math.ceil(count / len(rows))
    drawn: list[list[int]] = [[] for _ in range(rounds)]
    for of_label in rows.values():
        picks = rand.sample(range(len(of_label)), rounds % len(of_label))
        while len(picks) < rounds:
            picks += rand.sample(range(len(of_label)), min(rounds - len(picks), len(of_label)))
        for round_, pick in zip(drawn, picks, strict=True):
            round_.append(of_label[pick])
    for round_ in drawn:
        rand.shuffle(round_)
    return [row for round_ in drawn for row in round_][:count]


def label_codes(count: int, seed: int) -> list[int]:
    """The number that stands for each label."""
    codes = list(range(count))
    random.Random(seed).shuffle(codes)
    return codes
