"""Validation loss beyond the training length, by position: does a model use, or at least survive, what is far away?"""

import argparse
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import blend
from megatron_lengthgen.training.probe_forward import ProbeSequence, sum_over_samples
from megatron_lengthgen.training.probe_settings import ProbeSettings

__all__ = ["LengthProbe", "edges"]


def edges(seq_length: int, multiples: Sequence[int]) -> list[int]:
    """Where buckets of positions begin and end: half the training length, it, twice it and so on, and each multiple.

    Returns:
        Ascending positions from 0 to the longest multiple.
    """
    longest = max(multiples)
    powers = [seq_length * 2**power for power in range(longest.bit_length()) if 2**power <= longest]
    return sorted({0, max(seq_length // 2, 1), *powers, *(seq_length * multiple for multiple in multiples)})


class LengthProbe:
    """Loss of validation sequences as long as the longest multiple of the training length.

    A causal model's loss at a position does not depend on what follows, so that one pass over the longest sequences
    holds those of all shorter ones: their beginnings. "4x" is the mean over the first 4L positions.

    Args:
        settings: multiples of the training length, and the number of sequences.
        args: Megatron's arguments of this run.
    """

    name = "length probe"
    file = "length_curve.jsonl"

    def __init__(self, settings: ProbeSettings, args: argparse.Namespace) -> None:
        self.settings, self._args = settings, args
        self._edges = edges(args.seq_length, settings.multiples)
        self._data: Any = None

    def check(self) -> None:
        """Hold the probe against the validation data.

        Raises:
            UserError: where a source has too little for the sequences that the blend takes from it: a text that
                comes twice in a sequence is easy to predict the second time.
        """
        length, samples = self._edges[-1], self.settings.samples
        sources = blend.validation_sources(self._args)
        whole = len(sources) == 1
        for source in sources:
            # As many as Megatron's builder asks of a source, with its surplus.
            share = samples if whole else math.ceil(math.ceil(samples * source.share) * 1.005)
            if source.tokens <= share * length:
                raise UserError(
                    f"length_probe needs {share * length + 1:,} tokens of validation data from {source.path} ({share} "
                    f"of its {samples} sequences, of {length:,} tokens each), and the validation split of it has "
                    f"{source.tokens:,}: give that split more, or lower samples or multiples"
                )

    def prepare(self) -> None:
        """Open the data; all ranks call it once the process groups are there."""
        from megatron_lengthgen.training.data import validation_dataset

        self._data = validation_dataset(self._edges[-1], self.settings.samples)

    def measure(self, models: Sequence[torch.nn.Module]) -> dict[str, float] | None:
        """``{"loss 1x": .., "loss 4x": .., "loss at 0-31": ..}`` in nats; None on ranks without the loss."""
        borders = torch.tensor(self._edges[1:-1], device="cuda")

        def by_bucket(losses: Tensor, counted: Tensor, positions: Tensor, index: int) -> Tensor:
            buckets = torch.bucketize(positions, borders, right=True)
            sums = torch.zeros(2, len(self._edges) - 1, dtype=torch.float64, device=losses.device)
            sums[0].index_add_(0, buckets, losses * counted)
            sums[1].index_add_(0, buckets, counted)
            return sums

        total = sum_over_samples(models, self._sample, self.settings.samples, self._edges[-1], by_bucket)
        return None if total is None else self._scores(total)

    def _sample(self, index: int) -> ProbeSequence:
        sample: Mapping[str, Tensor] = self._data[index]
        return ProbeSequence(sample["tokens"], sample["labels"], sample["loss_mask"])

    def _scores(self, total: Tensor) -> dict[str, float]:
        """From sums and counts [2, buckets]."""
        scores = {}
        for multiple in self.settings.multiples:
            loss, count = total[:, : self._edges.index(multiple * self._args.seq_length)].sum(1).tolist()
            scores[f"loss {multiple}x"] = loss / max(count, 1)
        for begin, end, (loss, count) in zip(self._edges, self._edges[1:], total.t().tolist(), strict=False):
            scores[f"loss at {begin}-{end - 1}"] = loss / max(count, 1)
        return scores
