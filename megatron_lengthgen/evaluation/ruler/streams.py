"""Random streams that depend on a key alone, never on what was drawn before."""

import hashlib
import random

__all__ = ["stream"]


def stream(*key: str | int) -> random.Random:
    """A generator seeded by ``key``: equal keys give equal draws, whatever else was drawn in between.

    RULER seeds one global generator per file, so its sample ``i`` depends on every sample before it; keyed streams let
    one ask for more samples, another order or a part of them without changing any.
    """
    text = "\x1f".join(str(part) for part in key)
    return random.Random(int.from_bytes(hashlib.sha256(text.encode()).digest(), "big"))
