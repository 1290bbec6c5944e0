"""Long texts cut to the length by the benchmark itself, so that every model reads the same.

Source: princeton-nlp/HELMET ``data.py``, ``truncate_llama2`` and ``filter_length``; it counts tokens of Llama 2.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

from megatron_lengthgen.errors import UserError

__all__ = ["OMITTED", "Shortener"]

OMITTED = " ... [the rest of the text is omitted]"


class Shortener:
    """Counts and cuts texts, each tokenised once however many questions are asked of it.

    Args:
        tokenizer: a fast tokenizer; published figures are with Llama 2's.
        limits: the numbers of tokens that texts will be cut to.

    Raises:
        UserError: for a tokenizer that does not say where its tokens are.
    """

    def __init__(self, tokenizer: Any, limits: Sequence[int]) -> None:
        if not tokenizer.is_fast:
            raise UserError("HELMET's long texts are cut by token positions: give --cut-tokenizer, a fast tokenizer")
        self._tokenizer = tokenizer
        # With the special tokens, as HELMET counts.
        self._mark = len(tokenizer(OMITTED)["input_ids"])
        self._limits = tuple(limits)
        self._known: dict[bytes, tuple[int, dict[int, int]]] = {}

    def count(self, text: str) -> int:
        """Tokens of ``text``, special tokens included."""
        return self._look(text)[0]

    def shorten(self, text: str, limit: int) -> tuple[str, int]:
        """``text`` in at most about ``limit`` tokens, its end replaced by :data:`OMITTED`; and what is left out."""
        count, ends = self._look(text)
        if count <= limit:
            return text, 0
        return text[: ends[limit]] + OMITTED, count - limit + self._mark

    def _look(self, text: str) -> tuple[int, dict[int, int]]:
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
        if key not in self._known:
            encoded = self._tokenizer(text, return_offsets_mapping=True, verbose=False)
            offsets = encoded["offset_mapping"]
            ends = {limit: offsets[max(limit - self._mark, 0)][1] for limit in self._limits if limit < len(offsets)}
            self._known[key] = len(offsets), ends
        return self._known[key]
