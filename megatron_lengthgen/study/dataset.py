"""A task as the datasets that ``megatron.training`` asks for."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_lengthgen.study.tasks import Split, Task, sample

__all__ = ["TaskDataset", "provider"]


class TaskDataset(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Samples of one split, as the items that Megatron's ``GPTDataset`` gives.

    Args:
        task: The task.
        length: Tokens that the model sees.
        seed: Of the data.
        split: Which samples.
        size: Their number.
    """

    def __init__(self, task: Task, length: int, *, seed: int, split: Split, size: int) -> None:
        self.task, self.length, self.seed, self.name, self.size = task, length, seed, split, size
        self._positions = torch.arange(length)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """``tokens``, ``labels`` and ``position_ids`` ``[length]``, and a ``loss_mask`` that is 1 on the answers."""
        if index >= self.size:
            raise IndexError(index)
        drawn = sample(self.task, self.length, seed=self.seed, split=self.name, index=int(index))
        tokens = torch.from_numpy(drawn.tokens)
        mask = np.zeros(self.length, np.float32)
        mask[drawn.answers - 1] = 1.0
        return {
            "tokens": tokens[:-1],
            "labels": tokens[1:],
            "loss_mask": torch.from_numpy(mask),
            "position_ids": self._positions,
        }


def provider(task: Task, *, seed: int) -> Callable[..., tuple[Any, Any, Any]]:
    """The dataset provider that ``megatron.training.pretrain`` calls on every rank.

    Args:
        task: The task; lengths and sizes come from Megatron's arguments.
        seed: Of the data.
    """

    def datasets(num_samples: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
        from megatron.training import get_args

        length = get_args().seq_length
        training, validation, _ = (count or 0 for count in num_samples)
        return (
            TaskDataset(task, length, seed=seed, split="training", size=training),
            TaskDataset(task, length, seed=seed, split="validation", size=validation) if validation else None,
            None,
        )

    setattr(datasets, "is_distributed", True)  # noqa: B010 (a type checker knows no such attribute)
    return datasets
