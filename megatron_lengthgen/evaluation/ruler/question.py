"""What every task kind hands over: a drawn question that can be asked in a haystack of any size."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Question", "Rendering", "around"]


@dataclass(frozen=True)
class Rendering:
    """A question in a haystack of one size.

    Attributes:
        pieces: the user's text, cut where a tokenizer is likely to begin a new token: before the space that starts a
            word, and after the newline that ends a line. See :mod:`.splice`.
        answer_prefix: the start of the answer that the model continues.
        outputs: the references.
        depths: share of the haystack before each needle that holds an answer.
    """

    pieces: Sequence[str]
    answer_prefix: str
    outputs: tuple[str, ...]
    depths: tuple[float, ...] = ()

    @property
    def body(self) -> str:
        """The user's text."""
        return "".join(self.pieces)


class Question(Protocol):
    """One sample apart from the size of its haystack.

    Everything is drawn from the sample's stream key, so that :meth:`render` is a pure function of the size.

    Attributes:
        minimum: the smallest size that can be asked.
    """

    @property
    def minimum(self) -> int: ...

    def render(self, size: int) -> Rendering:
        """The question in a haystack of ``size`` units, in the task's own unit."""


def around(template: str, context: Sequence[str], **values: str) -> list[str]:
    """A template as pieces, with the pieces of a context in place of ``{context}``.

    Spaces before the context go to its first piece, and newlines after it to its last, since tokenizers join them so.
    """
    head, tail = (part.format(**values) for part in template.split("{context}"))
    kept, after = head.rstrip(" "), tail.lstrip("\n")
    pieces = [kept, *context, after]
    pieces[1] = head[len(kept) :] + pieces[1]
    pieces[-2] += tail[: len(tail) - len(after)]
    return pieces
