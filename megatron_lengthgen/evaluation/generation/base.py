"""The small interface behind which generation engines stand."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Generator", "Request"]


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


class Generator(Protocol):
    """An engine that continues prompts greedily.

    An engine that runs on several processes also offers ``data_parallel_rank`` and ``data_parallel_size`` (which share
    of the requests this process is to be given) and ``is_first_model_rank`` (whether it is the one of its model's that
    records the answers). Processes that hold parts of one model are given the same requests.
    """

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        """Yield ``(position in requests, new token ids)`` as each finishes, in any order.

        The ids hold neither the prompt nor the stop token; there are none when the first token is a stop token, and
        ``max_new_tokens`` of them when the limit ended the answer.
        """
