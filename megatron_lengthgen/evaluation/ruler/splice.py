"""Token ids of a prompt from the ids of its pieces, so that text which returns in every prompt is encoded once."""

import itertools
from array import array
from collections.abc import Sequence

from megatron_lengthgen.evaluation.prompt import PromptEncoder

from .question import Rendering

__all__ = ["Splicer"]

#: Stand before a piece while it is encoded, and after one that ends in white space: what tokenizers make of a space
#: depends on whether the text starts or ends there, and in a prompt it does not.
_BEFORE, _AFTER = "\n", "A"
#: Seams are told apart by this many characters on either side, and tried with up to ``_REACH`` of them.
_SEAM, _REACH = 2, 32
#: Ids kept before the memory is emptied.
_KEPT_IDS = 16_000_000


class Splicer:
    """Encodes prompts by putting the ids of their pieces together.

    A tokenizer that cuts text at white space before it looks for tokens gives the same ids for a text and for its
    pieces. Whether it does is not taken on trust: every kind of seam (the two characters on either side of it) is tried
    once on the text around it, and where the ids of both sides are not those of the whole, the prompt is encoded as a
    text. Either way the ids are those of the text.

    Args:
        encoder: what encodes whole prompts.
    """

    def __init__(self, encoder: PromptEncoder) -> None:
        self.encoder = encoder
        self._ids: dict[str, array[int]] = {}
        self._held = 0
        self._seams: dict[tuple[str, str], bool] = {}
        self._before, both = encoder.encode_texts([_BEFORE, _BEFORE + _AFTER])
        self._after = both[len(self._before) :]

    def ids(self, rendering: Rendering) -> tuple[int, ...] | None:
        """Ids of the complete prompt, or None where its pieces cannot be spliced."""
        parts = self._parts(rendering)
        return None if parts is None else tuple(array("i", b"".join(parts)))

    def count(self, rendering: Rendering) -> int | None:
        """Number of ids of the complete prompt, or None where its pieces cannot be spliced."""
        parts = self._parts(rendering)
        return None if parts is None else sum(map(len, parts))

    def _parts(self, rendering: Rendering) -> list["array[int]"] | None:
        frame = self.encoder.frame
        if frame is None or len(rendering.pieces) < 2:
            return None
        texts = list(rendering.pieces)
        texts[0] = frame[0] + texts[0]
        texts[-1] += frame[1] + rendering.answer_prefix
        if not self._learn(texts):
            return None
        head, tail = self.encoder.encode_texts([_closed(texts[0]), _BEFORE + texts[-1]])
        first, last = self._until_close(texts[0], head), self._from_start(tail)
        if first is None or last is None:
            return None
        middle = map(self._ids.__getitem__, texts[1:-1])
        return [array("i", self.encoder.lead(first)), *middle, array("i", last)]

    def _learn(self, texts: list[str]) -> bool:
        """Encode the pieces and try the seams that are new; say whether all seams hold."""
        if self._held > _KEPT_IDS:
            self._ids.clear()
            self._held = 0
        seams = {(left[-_SEAM:], right[:_SEAM]): (left, right) for left, right in itertools.pairwise(texts)}
        if new_seams := [seam for seam in seams if seam not in self._seams]:
            self._try([(seam, *seams[seam]) for seam in new_seams])
        if not all(map(self._seams.__getitem__, seams)):
            return False
        known = self._ids
        if new := [text for text in dict.fromkeys(texts[1:-1]) if text not in known]:
            encoded = self.encoder.encode_texts([_BEFORE + _closed(text) for text in new])
            for text, ids in zip(new, encoded, strict=True):
                if (own := self._from_start(self._until_close(text, ids))) is None:
                    return False
                known[text] = array("i", own)
                self._held += len(own)
        return True

    def _try(self, seams: Sequence[tuple[tuple[str, str], str, str]]) -> None:
        around = [(left[-_REACH:], right[:_REACH]) for _, left, right in seams]
        texts = [
            text
            for left, right in around
            for text in (_BEFORE + left + right, _BEFORE + _closed(left), _BEFORE + right)
        ]
        encoded = self.encoder.encode_texts(texts)
        for at, ((seam, _, _), (left, _)) in enumerate(zip(seams, around, strict=True)):
            both, left_ids, right_ids = encoded[3 * at : 3 * at + 3]
            first, second = self._until_close(left, left_ids), self._from_start(right_ids)
            self._seams[seam] = first is not None and second is not None and both == first + second

    def _from_start(self, ids: list[int] | None) -> list[int] | None:
        """``ids`` without what stands before a piece; None where it cannot be told apart."""
        size = len(self._before)
        return ids[size:] if ids is not None and ids[:size] == self._before else None

    def _until_close(self, text: str, ids: list[int]) -> list[int] | None:
        """``ids`` of :func:`_closed` text without what stands after it; None where it cannot be told apart."""
        if not text[-1:].isspace():
            return ids
        stop = len(ids) - len(self._after)
        return ids[:stop] if ids[stop:] == self._after else None


def _closed(text: str) -> str:
    return text + _AFTER if text[-1:].isspace() else text
