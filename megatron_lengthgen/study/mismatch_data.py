"""Tokens to measure on: from an indexed dataset, a text file or a task."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.study.tasks import Task, sample

__all__ = ["check_fit", "from_indexed", "from_task", "from_text"]


def from_indexed(prefix: str | os.PathLike[str], sequences: int, length: int) -> Tensor:
    """The first tokens of an indexed dataset, documents one after the other, as ``[sequences, length]`` int64.

    Args:
        prefix: Path of its ``.bin`` and ``.idx`` without the suffix, as ``tools/prepare_data.py`` writes them.
        sequences: Number of sequences.
        length: Their length.

    Raises:
        UserError: no such dataset, or too few tokens in it.
    """
    for suffix in (".idx", ".bin"):
        if not Path(f"{prefix}{suffix}").is_file():
            raise UserError(f"no file {prefix}{suffix}: make the dataset with tools/prepare_data.py")
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    pieces: list[np.ndarray] = []
    have = 0
    for index in range(len(dataset)):
        if have >= sequences * length:
            break
        pieces.append(dataset.get(index, length=min(int(dataset.sequence_lengths[index]), sequences * length - have)))
        have += len(pieces[-1])
    ids = np.concatenate(pieces) if pieces else np.empty(0)
    return _sequences(ids, str(prefix), sequences, length)


def from_text(path: str | os.PathLike[str], tokenizer: str | os.PathLike[str], sequences: int, length: int) -> Tensor:
    """The first tokens of a text file, ``[sequences, length]`` int64.

    Args:
        path: The file, UTF-8.
        tokenizer: Directory of a Hugging Face tokenizer.
        sequences: Number of sequences.
        length: Their length.

    Raises:
        UserError: no such file or tokenizer, or too few tokens.
    """
    try:
        with open(path, encoding="utf-8") as file:
            # Hardly any text has more than 32 characters a token; a long file need not be encoded whole.
            text = file.read(32 * sequences * length)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as text ({error}): give a text file in UTF-8") from error
    from megatron_lengthgen.evaluation.prompt import load_tokenizer

    ids = load_tokenizer(str(tokenizer)).encode(text, add_special_tokens=False, verbose=False)
    return _sequences(np.asarray(ids), str(path), sequences, length)


def from_task(task: Task, sequences: int, length: int, *, seed: int) -> Tensor:
    """Samples of the evaluation split as a model sees them, ``[sequences, length]`` int64.

    Args:
        task: The task.
        sequences: Number of samples.
        length: Their length.
        seed: Of the data.
    """
    drawn = [sample(task, length, seed=seed, split="evaluation", index=index) for index in range(sequences)]
    return torch.from_numpy(np.stack([one.tokens[:-1] for one in drawn]))


def _sequences(ids: np.ndarray, source: str, sequences: int, length: int) -> Tensor:
    if len(ids) < sequences * length:
        raise UserError(
            f"{source} holds {len(ids):,} tokens, fewer than the {sequences * length:,} of {sequences} sequences of "
            f"{length:,}: give more data, or fewer --tokens or a smaller --length"
        )
    return torch.from_numpy(ids[: sequences * length].astype(np.int64)).view(sequences, length)


def check_fit(tokens: Tensor, args: Any) -> None:
    """Refuse tokens that the model was not built for.

    Args:
        tokens: ``[sequences, length]``.
        args: Megatron's arguments of the model.

    Raises:
        UserError: a token id outside of the vocabulary, or positions past the last one that was learned.
    """
    largest = int(tokens.max())
    if largest >= args.padded_vocab_size:
        raise UserError(
            f"the data have token id {largest}, and the model knows ids below {args.padded_vocab_size}: give data made "
            "with the checkpoint's own tokenizer or task"
        )
    length = tokens.shape[1]
    if args.position_embedding_type == "learned_absolute" and length > args.max_position_embeddings:
        raise UserError(
            f"the model has learned {args.max_position_embeddings} positions: set --length to no more, not {length}"
        )
