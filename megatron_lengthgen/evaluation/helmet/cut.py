"""Prompts that do not fit: their context is cut, never the question, and it is known how much and what was lost."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lengthgen.errors import UserError

__all__ = ["PLACES", "Cut", "cut_to_fit"]

#: Where the context is cut. HELMET cuts the end, where its deepest answers are; of answers at depths 0, 0.2, ... 1 a
#: small cut in the middle hits none.
PLACES = ("middle", "end")


@dataclass(frozen=True)
class Cut:
    """Args:
    ids: token ids of the prompt.
    context: what of the context is in it.
    tokens: tokens of the context that are not.
    """

    ids: tuple[int, ...]
    context: str
    tokens: int


def cut_to_fit(
    encode: Callable[[str], Sequence[int]], tokenizer: Any, context: str, budget: int, place: str, where: str
) -> Cut:
    """The prompt with as much of its context as ``budget`` tokens hold.

    Args:
        encode: from a context to the ids of the whole prompt.
        place: one of :data:`PLACES`.
        where: the question, as an error names it.

    Raises:
        UserError: when the rest of the prompt leaves no room for any context.
    """
    ids = encode(context)
    if len(ids) <= budget:
        return Cut(tuple(ids), context, 0)
    part = _parts(tokenizer, context)
    total, excess, over = part(None), 0, len(ids) - budget
    while over > 0:
        # A cut can make a token or two more where its ends meet.
        excess += over
        keep = total - excess
        if keep < 1:
            raise UserError(
                f"{where} does not fit: without its context the prompt already has more than {budget} tokens; "
                "use a longer length"
            )
        head = keep // 2 if place == "middle" else keep
        shorter = part((0, head)) + part((head + excess, total))
        ids = encode(shorter)
        over = len(ids) - budget
    return Cut(tuple(ids), shorter, excess)


def _parts(tokenizer: Any, text: str) -> Any:
    """A function from a range of the text's tokens to that part of the text, and from None to their number."""
    if tokenizer.is_fast:
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        starts = [start for start, _ in encoded["offset_mapping"]] + [len(text)]
        return lambda span: len(starts) - 1 if span is None else text[starts[span[0]] : starts[span[1]]]
    ids = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return lambda span: len(ids) if span is None else tokenizer.decode(ids[slice(*span)])
