"""How well a model answers a task at a length."""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from megatron_lengthgen.study.tasks import Task, sample

__all__ = ["Answers", "AttentionScale", "answer", "scaled_full_attention"]

#: Factor on attention logits, or ``log``: one that grows with the logarithm of a query's position.
AttentionScale = float | Literal["log"]


#: Tokens of a forward: enough to be efficient, few enough for a laptop at the longest lengths.
_BATCH_TOKENS = 16_384


class Answers(NamedTuple):
    """What a model answered.

    Attributes:
        correct: Was the most likely of all tokens the right one? ``[sequences, answers]``, bool.
        error: Distance between the right candidate's place and the mean of the model's distribution over candidates
            ``[sequences, answers]``, float32: the regression read-out of a counting task.
        loss: Cross entropy of the answers, in nats, ``[sequences, answers]``, float32.
    """

    correct: np.ndarray
    error: np.ndarray
    loss: np.ndarray


@torch.no_grad()
def answer(model: Any, task: Task, length: int, *, seed: int, sequences: int) -> Answers:
    """Let ``model`` answer the first ``sequences`` samples of the evaluation split.

    Args:
        model: A Megatron model in evaluation mode, TP = PP = 1, or this rank's part of one with TP > 1.
        task: The task.
        length: Tokens that the model sees.
        seed: Of the data.
        sequences: Number of samples.
    """
    parts = []
    size = max(_BATCH_TOKENS // length, 1)
    for start in range(0, sequences, size):
        drawn = [
            sample(task, length, seed=seed, split="evaluation", index=index)
            for index in range(start, min(start + size, sequences))
        ]
        parts.append(_answer_batch(model, task, drawn))
    return Answers(*(np.concatenate(values) for values in zip(*parts, strict=True)))


def _answer_batch(model: Any, task: Task, drawn: list[Any]) -> Answers:
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    device = next(model.parameters()).device
    tokens = torch.from_numpy(np.stack([s.tokens for s in drawn])).to(device)
    places = torch.from_numpy(np.stack([s.answers for s in drawn])).to(device)
    positions = torch.arange(tokens.shape[1] - 1, device=device).expand(len(drawn), -1)
    with _last_layer_answers(model, tokens.shape[1] - int(places.min())):
        logits = model(tokens[:, :-1].contiguous(), positions, None)
    rows = torch.arange(len(drawn), device=device).unsqueeze(1)
    asked = gather_from_tensor_model_parallel_region(logits[rows, places - 1].float())[..., : task.vocab_size]
    right = tokens[rows, places]
    first, count = task.candidates.start, len(task.candidates)
    among = torch.softmax(asked[..., first : first + count], dim=-1)
    mean = (among * torch.arange(count, device=device)).sum(-1)
    loss = torch.nn.functional.cross_entropy(asked.flatten(0, 1), right.flatten(), reduction="none")
    return Answers(
        (asked.argmax(-1) == right).cpu().numpy(),
        (mean - (right - first)).abs().cpu().numpy(),
        loss.view_as(right).cpu().numpy(),
    )


@contextmanager
def _last_layer_answers(model: Any, count: int) -> Iterator[None]:
    """Within this context the last layer attends from the last ``count`` positions only.

    What it computes elsewhere reaches no answer, and its time becomes linear in length.
    """
    last = list(_core_attentions(model))[-1]

    def keep_last(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        query, *others = arguments
        return query[-count:], *others

    def pad(module: Any, arguments: tuple[Any, ...], context: torch.Tensor) -> torch.Tensor:
        missing = arguments[1].shape[0] - context.shape[0]
        return torch.nn.functional.pad(context, (0, 0, 0, 0, missing, 0))

    with ExitStack() as hooks:
        hooks.callback(last.register_forward_pre_hook(keep_last).remove)
        hooks.callback(last.register_forward_hook(pad).remove)
        yield


@contextmanager
def scaled_full_attention(model: Any, scale: AttentionScale, training_length: int) -> Iterator[None]:
    r"""Within this context the attention logits of layers without a window are multiplied.

    Sharpening alone undoes the dilution of softmax attention at length: a gain that this gives too is no gain of the
    training.

    Args:
        model: A model of layers whose core attention is this package's.
        scale: The factor; ``log`` for :math:`\max(1, \ln n / \ln L)` at the n-th position, which counters
            dilution position by position (Nakanishi, "Scalable-Softmax Is Superior for Attention", arXiv 2501.19399;
            Llama 4 applies such a temperature to its layers without RoPE at inference).
        training_length: L, in tokens.
    """

    def sharpen(module: Any, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        query, key, *others = arguments
        return query * _factors(scale, training_length, query.shape[0], key.shape[0]).to(query), key, *others

    with ExitStack() as hooks:
        for core in _core_attentions(model):
            if core.window is None:
                hooks.callback(core.register_forward_pre_hook(sharpen).remove)
        yield


def _factors(scale: AttentionScale, training_length: int, queries: int, keys: int) -> torch.Tensor:
    """Factors ``[queries, 1, 1, 1]`` of the last ``queries`` of ``keys`` positions."""
    if scale == "log":
        seen = torch.arange(keys - queries + 1, keys + 1, dtype=torch.float64)
        return (seen.log() / math.log(training_length)).clamp(min=1.0).view(-1, 1, 1, 1)
    return torch.tensor(scale, dtype=torch.float64).expand(queries, 1, 1, 1)


def _core_attentions(model: Any) -> Iterator[Any]:
    """This package's core attentions, first layer first."""
    from megatron_lengthgen.attention.core import SDPACoreAttention

    return (module for module in model.modules() if isinstance(module, SDPACoreAttention))
