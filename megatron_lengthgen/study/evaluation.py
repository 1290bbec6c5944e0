"""How well a model answers a task at a length."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron_lengthgen.study.tasks import Task, sample

__all__ = ["Answers", "answer", "scaled_full_attention"]

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
def scaled_full_attention(model: Any, factor: float) -> Iterator[None]:
    """Within this context the attention logits of layers without a window are ``factor`` times as large.

    Sharpening alone undoes the dilution of softmax attention at length: a gain that this gives too is no gain of the
    training.

    Args:
        model: A model of layers whose core attention is this package's.
        factor: On the softmax scale.
    """
    from megatron_lengthgen.attention.core import SDPACoreAttention

    layers = [m for m in model.modules() if isinstance(m, SDPACoreAttention) and m.window is None]
    for layer in layers:
        layer.softmax_scale *= factor
    try:
        yield
    finally:
        for layer in layers:
            layer.softmax_scale /= factor
