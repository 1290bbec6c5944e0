"""The small interface behind which generation engines stand."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Answer", "Generator", "Request"]


@dataclass(frozen=True)
class Request:
    """One greedy continuation to compute.

    Args:
        prompt_ids: token ids of the complete prompt, special tokens included.
        max_new_tokens: the largest number of tokens to generate.
        stop_ids: tokens that end the answer; empty to run to the limit.
    """

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: frozenset[int]


@dataclass(frozen=True)
class Answer:
    """A finished continuation as text.

    Args:
        text: without the prompt and what ended it.
        tokens: how many were generated.
        cut: whether the limit of new tokens ended it.
    """

    text: str
    tokens: int
    cut: bool

    @classmethod
    def from_ids(cls, ids: Sequence[int], limit: int, decode: Callable[[Sequence[int]], str]) -> "Answer":
        """From what an engine generated under a limit of ``limit`` tokens."""
        return cls(decode(ids), len(ids), len(ids) >= limit)


class Generator(Protocol):
    """An engine that continues prompts greedily.

    An engine that runs on several processes also offers ``data_parallel_rank`` and ``data_parallel_size`` (which share
    of the requests this process is to be given) and ``is_first_model_rank`` (whether it is the one of its model's that
    records the answers). Processes that hold parts of one model are given the same requests.
    """

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int] | Answer]]:
        """Yield ``(position in requests, new token ids)`` as each finishes, in any order.

        An engine that is told text alone, by a server, yields an :class:`Answer` in place of ids.

        The ids hold neither the prompt nor the stop token; there are none when the first token is a stop token, and
        ``max_new_tokens`` of them when the limit ended the answer.
        """
