"""Porter's stemmer, with the additions that ROUGE's usual implementation takes from NLTK.

Source: M. F. Porter, "An algorithm for suffix stripping", Program 14 (1980), with its author's later rules (``bli``,
``logi``). What NLTK adds is marked: Google's ``rouge_score`` stems with NLTK, and equal scores need equal stems.
"""

import functools
from collections.abc import Callable, Sequence

__all__ = ["stem"]

Rule = tuple[str, str, Callable[[str], bool]]

#: NLTK: words that the rules get wrong.
_IRREGULAR = {
    "skies": "sky",
    "sky": "sky",
    "dying": "die",
    "lying": "lie",
    "tying": "tie",
    "news": "news",
    "innings": "inning",
    "inning": "inning",
    "outings": "outing",
    "outing": "outing",
    "cannings": "canning",
    "canning": "canning",
    "howe": "howe",
    "proceed": "proceed",
    "exceed": "exceed",
    "succeed": "succeed",
}


@functools.lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """The stem of a lower-case word."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    for step in (_plural, _past, _final_y, _double_suffix, _suffix, _last_suffix, _final_e, _final_ll):
        word = step(word)
    return word


def _kinds(word: str) -> str:
    """``c`` for each consonant and ``v`` for each vowel; a ``y`` after a consonant is a vowel."""
    kinds = ""
    for letter in word:
        vowel = letter in "aeiou" or (letter == "y" and kinds.endswith("c"))
        kinds += "v" if vowel else "c"
    return kinds


def _measure(word: str) -> int:
    """Porter's m: how often a vowel is followed by a consonant."""
    return _kinds(word).count("vc")


def _has_measure(word: str) -> bool:
    return _measure(word) > 0


def _short(word: str) -> bool:
    """Porter's \\*o: ends consonant, vowel, consonant, the last not w, x or y. NLTK: or is vowel, consonant."""
    kinds = _kinds(word)
    return (kinds.endswith("cvc") and word[-1] not in "wxy") or kinds == "vc"


def _apply(word: str, rules: Sequence[Rule]) -> str:
    """The first rule whose suffix fits decides, whether or not its condition holds."""
    for suffix, replacement, condition in rules:
        if word.endswith(suffix):
            rest = word.removesuffix(suffix)
            return rest + replacement if condition(rest) else word
    return word


def _always(_: str) -> bool:
    return True


def _plural(word: str) -> str:
    if word.endswith("ies") and len(word) == 4:  # NLTK: flies and dies apart
        return word[:-1]
    return _apply(word, (("sses", "ss", _always), ("ies", "i", _always), ("ss", "ss", _always), ("s", "", _always)))


def _past(word: str) -> str:
    if word.endswith("ied"):  # NLTK: as for ies
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _has_measure(word[:-3]) else word
    rest = next(
        (word.removesuffix(end) for end in ("ed", "ing") if word.endswith(end) and "v" in _kinds(word[: -len(end)])),
        None,
    )
    if rest is None:
        return word
    if rest.endswith(("at", "bl", "iz")):
        return rest + "e"
    if len(rest) > 1 and rest[-1] == rest[-2] and _kinds(rest).endswith("c"):
        return rest if rest[-1] in "lsz" else rest[:-1]
    return rest + "e" if _measure(rest) == 1 and _short(rest) else rest


def _final_y(word: str) -> str:
    # NLTK: happy to happi, but neither enjoy to enjoi nor by to bi.
    return _apply(word, (("y", "i", lambda rest: len(rest) > 1 and _kinds(rest).endswith("c")),))


def _double_suffix(word: str) -> str:
    if word.endswith("alli") and _has_measure(word[:-4]):  # NLTK: what is left may have another suffix
        return _double_suffix(word[:-2])
    pairs = (
        "ational ate, tional tion, enci ence, anci ance, izer ize, bli ble, alli al, entli ent, eli e, ousli ous, "
        "ization ize, ation ate, ator ate, alism al, iveness ive, fulness ful, ousness ous, aliti al, iviti ive, "
        "biliti ble, fulli ful"
    )
    rules: list[Rule] = [(*pair.split(), _has_measure) for pair in pairs.split(", ")]  # type: ignore[misc]
    # NLTK: the l counts with the stem, for geo, theo and the like.
    rules.append(("logi", "log", lambda rest: _has_measure(rest + "l")))
    return _apply(word, rules)


def _suffix(word: str) -> str:
    pairs = (
        ("icate", "ic"),
        ("ative", ""),
        ("alize", "al"),
        ("iciti", "ic"),
        ("ical", "ic"),
        ("ful", ""),
        ("ness", ""),
    )
    return _apply(word, [(suffix, replacement, _has_measure) for suffix, replacement in pairs])


def _last_suffix(word: str) -> str:
    def long(rest: str) -> bool:
        return _measure(rest) > 1

    suffixes = "al, ance, ence, er, ic, able, ible, ant, ement, ment, ent, ion, ou, ism, ate, iti, ous, ive, ize"
    rules: list[Rule] = [
        (suffix, "", (lambda rest: long(rest) and rest[-1] in "st") if suffix == "ion" else long)
        for suffix in suffixes.split(", ")
    ]
    return _apply(word, rules)


def _final_e(word: str) -> str:
    return _apply(word, (("e", "", lambda rest: _measure(rest) > 1 or (_measure(rest) == 1 and not _short(rest))),))


def _final_ll(word: str) -> str:
    return _apply(word, (("ll", "l", lambda rest: _measure(rest + "l") > 1),))
