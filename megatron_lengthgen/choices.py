"""Names that a user writes, checked against the known ones."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from megatron_lengthgen.errors import UserError

__all__ = ["check_choice", "check_keys", "suggest"]


def suggest(name: object, known: Iterable[str]) -> str:
    """A parenthesis that names the known names nearest to ``name``, or all of them where they are few."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    if near:
        return f" (did you mean {' or '.join(map(repr, near))}?)"
    return f" (known: {', '.join(names)})" if len(names) <= 12 else ""


def check_choice(what: str, value: object, known: Iterable[str]) -> None:
    """Raise :class:`UserError` naming the nearest known names unless ``value`` is one of ``known``."""
    names = tuple(known)
    if value not in names:
        raise UserError(f"unknown {what} {value!r}{suggest(value, names)}")


def check_keys(what: str, mapping: object, known: Iterable[str]) -> Mapping[str, Any]:
    """Return ``mapping`` when it is one with known keys only, else raise :class:`UserError`."""
    if not isinstance(mapping, Mapping):
        raise UserError(f"{what} must be a mapping of names to values, got {mapping!r}")
    names = tuple(known)
    for key in mapping:
        check_choice(f"{what} key", key, names)
    return mapping
