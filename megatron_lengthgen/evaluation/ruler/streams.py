"""Random streams that depend on a key alone, never on what was drawn before."""

import hashlib
import random
from collections.abc import Callable, Hashable, Iterable, Sequence

import numpy as np

__all__ = ["Distinct", "shuffled", "stream"]


def stream(*key: str | int) -> random.Random:
    """A generator seeded by ``key``: equal keys give equal draws, whatever else was drawn in between.

    RULER seeds one global generator per file, so its sample ``i`` depends on every sample before it; keyed streams let
    one ask for more samples, another order or a part of them without changing any.
    """
    return random.Random(int.from_bytes(_digest(key), "big"))


def shuffled[V](values: Sequence[V], *key: str | int) -> list[V]:
    """The values in an order decided by ``key`` and their number."""
    # Of numpy's generators the one whose draws are frozen; Python's own shuffle takes a second for a million tokens.
    order = np.random.RandomState(np.frombuffer(_digest(key), dtype=np.uint32)).permutation(len(values))
    return [values[at] for at in order.tolist()]


def _digest(key: tuple[str | int, ...]) -> bytes:
    return hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()


class Distinct[T: Hashable]:
    """Draws without repeats, as many as are asked for: the first ``n`` are the same however many follow.

    Each is drawn evenly from all that are left, so the first ``n`` are a sample without replacement.

    Args:
        draw: one draw with repeats; must be able to give as many different values as are asked for.
        taken: values that must not come.
    """

    def __init__(self, draw: Callable[[], T], taken: Iterable[T] = ()) -> None:
        self._draw = draw
        self._seen: set[T] = set(taken)
        self._list: list[T] = []

    def first(self, count: int) -> list[T]:
        """The first ``count`` values."""
        while len(self._list) < count:
            value = self._draw()
            if value not in self._seen:
                self._seen.add(value)
                self._list.append(value)
        return self._list[:count]
