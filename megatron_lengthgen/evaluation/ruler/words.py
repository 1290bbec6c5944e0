"""Keys and values of needles (adjective-noun pairs, seven-digit numbers, UUIDs), and the words of word lists.

Source: NVIDIA/RULER ``scripts/data/synthetic/niah.py`` and ``common_words_extraction.py`` with the word lists of the
``wonderwords`` package.
"""

import functools
import hashlib
import importlib.util
import json
import random
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_lengthgen.errors import UserError

from .streams import Distinct
from .tasks import Kind

__all__ = ["WordLists", "distinct", "draw", "load_words"]


@dataclass(frozen=True)
class WordLists:
    """Adjectives, nouns, verbs and further English words, each without repeats.

    For keys RULER draws from the set of all ``adjective-noun`` strings. No two pairs of these lists make the same
    string (6,171,620 = 910 x 6,782 in wonderwords 3.0.1), so drawing the halves independently is the same distribution
    without holding six million strings.
    """

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...] = ()
    english: tuple[str, ...] = ()

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of adjectives and nouns, which make keys."""
        return _digest(self.adjectives, self.nouns)

    @functools.cached_property
    def list_digest(self) -> str:
        """SHA-256 of what word lists are drawn from."""
        return _digest(self.common, self.english)

    @functools.cached_property
    def common(self) -> tuple[str, ...]:
        """Adjectives, nouns and verbs together."""
        return tuple(sorted({*self.adjectives, *self.nouns, *self.verbs}))


def _digest(first: tuple[str, ...], second: tuple[str, ...]) -> str:
    return hashlib.sha256("\n".join((*first, "", *second)).encode()).hexdigest()


@functools.cache
def load_words(english_words: str | None = None) -> WordLists:
    """The word lists of the installed ``wonderwords``.

    Args:
        english_words: RULER's ``english_words.json``, for lists of more words than those have.

    Raises:
        UserError: when the package is not installed, or the file is missing or not of that form.
    """
    english = _read_english(english_words) if english_words is not None else ()
    spec = importlib.util.find_spec("wonderwords")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("RULER's word keys need the wonderwords package: pip install wonderwords==3.0.1")
    assets = Path(next(iter(spec.submodule_search_locations))) / "assets"

    def read(name: str) -> tuple[str, ...]:
        lines = (assets / name).read_text(encoding="utf-8").splitlines()
        return tuple(sorted({line.rstrip() for line in lines}))

    return WordLists(
        adjectives=read("adjectivelist.txt"), nouns=read("nounlist.txt"), verbs=read("verblist.txt"), english=english
    )


def _read_english(source: str) -> tuple[str, ...]:
    try:
        value = json.loads(Path(source).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read --english-words {source}: {error.strerror}") from error
    except ValueError as error:
        raise UserError(f"--english-words {source} is not JSON: {error}") from error
    if not isinstance(value, dict) or not all(isinstance(word, str) for word in value.values()) or not value:
        raise UserError(f"--english-words {source} must be an object of words, as RULER's english_words.json")
    return tuple(dict.fromkeys(value.values()))


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
    return Distinct(lambda: draw(kind, rng, words), taken).first(count)
