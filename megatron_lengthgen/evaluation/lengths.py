"""Lengths in tokens, as a user writes them and as reports name them."""

import re
from fractions import Fraction

from megatron_lengthgen.errors import UserError

__all__ = ["length_name", "parse_length", "parse_lengths", "parse_multiples"]

_UNITS = {"": 1, "k": 1024, "m": 1024 * 1024}


def length_name(length: int) -> str:
    """``8192`` as ``8K``, ``1048576`` as ``1M``; other numbers as they are."""
    for unit in ("m", "k"):
        if length % _UNITS[unit] == 0:
            return f"{length // _UNITS[unit]}{unit.upper()}"
    return str(length)


def parse_length(option: str, text: str) -> int:
    """A length in tokens from ``4096``, ``4k`` (1,024 tokens each) or ``1m`` (1,048,576 tokens each).

    Raises:
        UserError: for anything else, in the name of ``option``.
    """
    match = re.fullmatch(r"([0-9]+)([kKmM]?)", text.strip())
    if match is None or int(match[1]) == 0:
        raise UserError(
            f"{option} takes whole numbers of tokens such as 4096, 4k (4,096) or 1m (1,048,576), got {text.strip()!r}"
        )
    return int(match[1]) * _UNITS[match[2].lower()]


def parse_lengths(text: str) -> list[int]:
    """The lengths of a comma-separated list, short ones first.

    Raises:
        UserError: when one is not a length, there is none, or one is named twice.
    """
    return _sorted("--lengths", text, [parse_length("--lengths", part) for part in _parts(text)])


def parse_multiples(text: str, train_length: int) -> list[int]:
    """The lengths of a comma-separated list of multiples of the training length, short ones first.

    Raises:
        UserError: when one is not a number, does not come out at a whole number of tokens, or is named twice.
    """
    lengths = []
    for part in _parts(text):
        if re.fullmatch(r"[0-9]+(\.[0-9]+)?", part) is None or not Fraction(part):
            raise UserError(f"--multiples takes numbers such as 1,2,4,8, each written out, got {part!r}")
        length = Fraction(part) * train_length
        if length.denominator != 1:
            raise UserError(f"--multiples {part} of --train-length {train_length} is not a whole number of tokens")
        lengths.append(int(length))
    return _sorted("--multiples", text, lengths)


def _parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _sorted(option: str, text: str, lengths: list[int]) -> list[int]:
    if not lengths:
        raise UserError(f"{option} names no length")
    if len(set(lengths)) < len(lengths):
        raise UserError(f"{option} names a length twice: {text}")
    return sorted(lengths)
