"""Keys and values of needles: adjective-noun pairs, seven-digit numbers, UUIDs.

Source: NVIDIA/RULER ``scripts/data/synthetic/niah.py`` with the word lists of the ``wonderwords`` package.
"""

import functools
import hashlib
import importlib.util
import random
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_lengthgen.errors import UserError

from .tasks import Kind

__all__ = ["WordLists", "distinct", "draw", "load_words"]


@dataclass(frozen=True)
class WordLists:
    """Adjectives and nouns, each without repeats.

    RULER draws from the set of all ``adjective-noun`` strings. No two pairs of these lists make the same string
    (6,171,620 = 910 x 6,782 in wonderwords 3.0.1), so drawing the halves independently is the same distribution
    without holding six million strings.
    """

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of both lists."""
        return hashlib.sha256("\n".join((*self.adjectives, "", *self.nouns)).encode()).hexdigest()


@functools.cache
def load_words() -> WordLists:
    """The word lists of the installed ``wonderwords``.

    Raises:
        UserError: when the package is not installed.
    """
    spec = importlib.util.find_spec("wonderwords")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("RULER's word keys need the wonderwords package: pip install wonderwords==3.0.1")
    assets = Path(next(iter(spec.submodule_search_locations))) / "assets"

    def read(name: str) -> tuple[str, ...]:
        lines = (assets / name).read_text(encoding="utf-8").splitlines()
        return tuple(sorted({line.rstrip() for line in lines}))

    return WordLists(adjectives=read("adjectivelist.txt"), nouns=read("nounlist.txt"))


def draw(kind: Kind, rng: random.Random, words: WordLists) -> str:
    """One key or value of this kind."""
    if kind == "words":
        return f"{rng.choice(words.adjectives)}-{rng.choice(words.nouns)}"
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def distinct(kind: Kind, count: int, rng: random.Random, words: WordLists, taken: Iterable[str] = ()) -> list[str]:
    """``count`` keys or values that differ from each other and from ``taken``.

    RULER may draw one twice; two needles with one key would have no right answer.
    """
    seen = set(taken)
    found: list[str] = []
    while len(found) < count:
        value = draw(kind, rng, words)
        if value not in seen:
            seen.add(value)
            found.append(value)
    return found
