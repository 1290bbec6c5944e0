"""Greedy generation with a Megatron model: chunked prefill, key-value caches, continuous batching."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megatron_lengthgen.errors import UserError

from .base import Request
from .prefixes import families

if TYPE_CHECKING:
    import torch

__all__ = ["MegatronGenerator"]

_PREFILL_CHUNK = 2048
_DEFAULT_SEQUENCES = 4


class MegatronGenerator:
    """Runs a GPT model at any tensor and pipeline parallel size.

    A prompt is read alone, in chunks that bound the memory of activations. Then all sequences that fit decode together,
    each with a cache of its own length: none is padded, one that ends makes room for the next at once. All ranks of a
    model are given the same requests and take the same decisions, because these depend on the requests and on tokens
    that all of them agree on. The stages of a pipeline read the chunks of a prompt at the same time, one behind the
    other; in decoding they take turns.

    Prompts that start alike share that start (:mod:`.prefixes`): it is read once, into a cache that counts towards
    ``max_batch_tokens`` while prompts wait for it, and copied. Starts are whole chunks, so the model is given the
    same tensors as without sharing, and answers the same to the bit.

    Args:
        model: this rank's model; see :class:`~.cached_forward.CachedForward` for what it must be.
        max_length: most tokens that a request may need, prompt and answer together.
        max_batch_tokens: tokens for which caches are held at the same time, over all sequences that decode together;
            None for four times ``max_length``. A token takes ``2 * layers * num_query_groups * kv_channels`` values,
            spread over the tensor parallel group; fewer where layers have windows.
        prefill_chunk: most tokens of a prompt that go through the model at once; None for 2048. Smaller chunks share
            more of prompts that start alike, and take longer (a tenth for 512 on a CPU).
        share_prefixes: read what prompts have in common once.
        vocab_size: ids from here on are padding of the embedding and never chosen; None where there is no padding.

    Raises:
        UserError: an argument is out of range, or the model cannot be run like this.
    """

    def __init__(
        self,
        model: "torch.nn.Module",
        *,
        max_length: int,
        max_batch_tokens: int | None = None,
        prefill_chunk: int | None = None,
        share_prefixes: bool = True,
        vocab_size: int | None = None,
    ):
        _check_sizes(max_length, max_batch_tokens, prefill_chunk)
        from .cached_forward import CachedForward

        self.max_length = max_length
        self.max_batch_tokens = _DEFAULT_SEQUENCES * max_length if max_batch_tokens is None else max_batch_tokens
        self._run = CachedForward(
            model,
            max_length=max_length,
            prefill_chunk=_PREFILL_CHUNK if prefill_chunk is None else prefill_chunk,
            vocab_size=vocab_size,
        )
        self._share_prefixes = share_prefixes
        #: Tokens of all prompts started so far, and how many of them were not read because another prompt's were.
        self.prompt_tokens = self.shared_tokens = 0

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint: str,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        dtype: str = "bf16",
        max_length: int,
        max_batch_tokens: int | None = None,
        prefill_chunk: int | None = None,
    ) -> "MegatronGenerator":
        """Load a ``torch_dist`` checkpoint of any layout; under ``torchrun``, every rank calls it.

        Args:
            checkpoint: an iteration's directory, or its parent.
            tensor_parallel: ranks that each layer is split over.
            pipeline_parallel: stages that the layers are dealt to. What tensor and pipeline size leave of the ranks
                holds copies, and they share the requests.
            dtype: ``bf16``, ``fp16`` or ``fp32``.
            max_length: see the class.
            max_batch_tokens: see the class.
            prefill_chunk: see the class.

        Raises:
            UserError: as the class, or the checkpoint cannot be loaded.
        """
        _check_sizes(max_length, max_batch_tokens, prefill_chunk)
        from megatron_lengthgen.checkpoint.load import load_model

        model, args = load_model(
            checkpoint,
            tensor_parallel=tensor_parallel,
            pipeline_parallel=pipeline_parallel,
            dtype=dtype,
            overrides={"no_rope_fusion": True},
        )
        return cls(
            model,
            max_length=max_length,
            max_batch_tokens=max_batch_tokens,
            prefill_chunk=prefill_chunk,
            vocab_size=args.vocab_size,
        )

    @property
    def data_parallel_rank(self) -> int:
        """Which share of the requests this process is to be given."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_rank()

    @property
    def data_parallel_size(self) -> int:
        """Into how many shares the requests are to be cut."""
        from megatron.core import parallel_state

        return parallel_state.get_data_parallel_world_size()

    @property
    def is_first_model_rank(self) -> bool:
        """Whether this process is the one of its model's that records the answers."""
        from megatron.core import parallel_state

        return parallel_state.get_model_parallel_group().rank() == 0

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        """Continue prompts greedily; see :class:`~.base.Generator`.

        The model is in evaluation mode until the iterator is exhausted or closed.

        Raises:
            UserError: at once, when a request does not fit.
        """
        requests = list(requests)
        for position, request in enumerate(requests):
            self._check(position, request)
        return self._generate(requests)

    def _check(self, position: int, request: Request) -> None:
        if not request.prompt_ids:
            raise UserError(f"request {position} has an empty prompt; give it at least one token")
        if request.max_new_tokens < 1:
            raise UserError(f"request {position} asks for {request.max_new_tokens} new tokens; ask for at least 1")
        needed = len(request.prompt_ids) + request.max_new_tokens
        if needed > self.max_length:
            raise UserError(
                f"request {position} needs {needed} tokens ({len(request.prompt_ids)} of prompt), more than "
                f"max_length={self.max_length}: raise it or shorten the prompt"
            )
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self._run.vocab_size:
            raise UserError(
                f"request {position} holds token {lowest if lowest < 0 else highest}, outside the vocabulary of "
                f"{self._run.vocab_size}: tokenizer and model do not belong together"
            )

    def _generate(self, requests: list[Request]) -> Iterator[tuple[int, list[int]]]:
        in_training = [module for module in self._run.model.modules() if module.training]
        self._run.model.eval()
        try:
            waiting = deque(self._sequences(requests))
            running: list[_Sequence] = []
            while waiting or running:
                while waiting and sum(s.capacity for s in running) + waiting[0].room <= self.max_batch_tokens:
                    sequence = waiting.popleft()
                    if sequence.take(self._start(sequence)):
                        yield sequence.position, sequence.new
                    else:
                        running.append(sequence)
                if not running:
                    continue
                tokens = self._run.decode(
                    [s.new[-1] for s in running], [s.length - 1 for s in running], [s.cache for s in running]
                )
                # Ended sequences leave before anything is yielded, so that their caches are free.
                ended = [s for s, token in zip(running, tokens, strict=True) if s.take(token)]
                running = [s for s in running if not s.done]
                for sequence in ended:
                    yield sequence.position, sequence.new
        finally:
            for module in in_training:
                module.training = True

    def _sequences(self, requests: list[Request]) -> Iterator["_Sequence"]:
        """In the order in which they start: whoever shares a start stands together."""
        prompts = [request.prompt_ids for request in requests]
        # With its path, the longest request must fit.
        limit = self.max_batch_tokens - max((_capacity(request) for request in requests), default=0)
        for family in families(prompts, self._run.prefill_chunk, limit if self._share_prefixes else 0):
            path = _Path(family.path, family.members[-1][1])
            for shared, position in family.members:
                yield _Sequence(position, requests[position], path, shared)

    def _start(self, sequence: "_Sequence") -> int:
        """Read the prompt, from the end of the start that it shares; return the first new token."""
        from megatron_lengthgen.attention.cache import SequenceCache

        prompt, path, shared = sequence.request.prompt_ids, sequence.path, sequence.shared
        self.prompt_tokens += len(prompt)
        if shared == 0:
            sequence.cache = SequenceCache(sequence.capacity)
            return self._run.prefill(prompt, sequence.cache)
        if path.cache is None:
            path.cache = SequenceCache(len(path.ids))
        self.shared_tokens += path.read
        if shared > path.read:
            self._run.extend(path.ids[path.read : shared], path.cache, path.read)
            path.read = shared
        sequence.cache = path.cache.fork(sequence.capacity)
        if sequence.position == path.last:
            path.cache = None
        return self._run.prefill(prompt[shared:], sequence.cache, shared)


@dataclass
class _Path:
    """What a family of prompts shares."""

    ids: tuple[int, ...]
    last: int  # position of the request that needs it last
    cache: Any = None
    read: int = 0


@dataclass
class _Sequence:
    """A request on its way."""

    position: int
    request: Request
    path: _Path
    shared: int
    new: list[int] = field(default_factory=list)
    cache: Any = None
    done: bool = False

    @property
    def capacity(self) -> int:
        return _capacity(self.request)

    @property
    def room(self) -> int:
        """Tokens of cache that it takes to start: its own, and the path's."""
        return self.capacity + len(self.path.ids)

    @property
    def length(self) -> int:
        return len(self.request.prompt_ids) + len(self.new)

    def take(self, token: int) -> bool:
        """Add the next token; return whether this ends the answer. A stop token does, and is not part of it."""
        stop = token in self.request.stop_ids
        if not stop:
            self.new.append(token)
        self.done = stop or len(self.new) == self.request.max_new_tokens
        if self.done:
            self.cache = None
        return self.done


def _capacity(request: Request) -> int:
    return len(request.prompt_ids) + request.max_new_tokens


def _check_sizes(max_length: int, max_batch_tokens: int | None, prefill_chunk: int | None) -> None:
    if max_length < 2:
        raise UserError(f"max_length must leave room for a prompt and an answer, got {max_length}")
    if max_batch_tokens is not None and max_batch_tokens < max_length:
        raise UserError(
            f"max_batch_tokens={max_batch_tokens} does not hold one sequence of max_length={max_length}: raise it"
        )
    if prefill_chunk is not None and prefill_chunk < 1:
        raise UserError(f"prefill_chunk must be at least 1, got {prefill_chunk}")
