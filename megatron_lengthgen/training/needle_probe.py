"""Needles in a haystack, while a model is trained: how probable is the right answer, at the training length and beyond?

Samples are RULER's (:mod:`megatron_lengthgen.evaluation.ruler`), scored by teacher forcing: the probability that the
model gives to the whole answer, the product of its tokens' probabilities. It needs one forward and no generation, and
so runs on every layout. It is not greedy accuracy. Above one half it implies it, since each token of the answer is then
the most probable one; an answer may be greedy at a probability far below, and RULER also counts one that comes later in
the text.
"""

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.prompt import PromptEncoder, load_tokenizer
from megatron_lengthgen.evaluation.ruler.data import Ruler, Sample
from megatron_lengthgen.evaluation.ruler.sources import load_sources
from megatron_lengthgen.evaluation.ruler.tasks import parse_tasks
from megatron_lengthgen.training.probe_forward import ProbeSequence, sum_over_samples
from megatron_lengthgen.training.probe_settings import ProbeSettings

__all__ = ["NeedleProbe", "answered"]


class NeedleProbe:
    """Probability of the answers to RULER's ``niah_single_1``, and with essays of ``niah_single_2`` too.

    Args:
        settings: multiples of the training length, samples of each task at each, and where essays are.
        args: Megatron's arguments of this run.

    Raises:
        UserError: without a Hugging Face tokenizer, or where RULER's sources are missing.
    """

    name = "needle probe"
    file = "needle_curve.jsonl"

    def __init__(self, settings: ProbeSettings, args: argparse.Namespace) -> None:
        if args.tokenizer_type != "HuggingFaceTokenizer":
            raise UserError(
                f"needle_probe asks in words, and tokenizer_type {args.tokenizer_type} has none here: use "
                "HuggingFaceTokenizer, or leave needle_probe out"
            )
        self.settings, self._length = settings, args.seq_length
        self._tasks = parse_tasks(["niah_single_1", *(["niah_single_2"] if settings.essays else [])])
        sources, _, _ = load_sources(self._tasks, essays=settings.essays)
        self._ruler = Ruler(PromptEncoder(load_tokenizer(str(args.tokenizer_model))), sources)
        self._sequences: dict[tuple[str, int, int], ProbeSequence] = {}

    def check(self) -> None:
        """Refuse a training length that has no room for the questions."""
        for task in self._tasks:
            for multiple in self.settings.multiples:
                self._ruler.check(task, multiple * self._length, self.settings.samples)

    def prepare(self) -> None:
        """Nothing: each rank makes the samples that it needs at the first look."""

    def measure(self, models: Sequence[torch.nn.Module]) -> dict[str, float] | None:
        """``{"niah_single_1 4x": mean probability of the answers, ..}``; None on ranks without the loss."""
        scores: dict[str, float] = {}
        number = self.settings.samples

        def answer_loss(losses: Tensor, counted: Tensor, positions: Tensor, index: int) -> Tensor:
            sums = losses.new_zeros(number)
            sums[index] = (losses * counted).sum()
            return sums

        for task in self._tasks:
            for multiple in self.settings.multiples:
                length = multiple * self._length

                def sample(index: int, task=task, length=length) -> ProbeSequence:
                    key = (task.name, length, index)
                    if key not in self._sequences:
                        made = self._ruler.sample(task, length, index)
                        self._sequences[key] = answered(made, self._ruler.encoder)
                    return self._sequences[key]

                total = sum_over_samples(models, sample, number, length, answer_loss)
                if total is not None:
                    scores[f"{task.name} {multiple}x"] = total.neg().exp().mean().item()
        return scores or None


def answered(sample: Sample, encoder: PromptEncoder) -> ProbeSequence:
    """A sample with its first reference as the answer, and padding up to its length behind, which causality hides.

    Args:
        sample: made with ``encoder``, at a length with room for the answer.
    """
    ids = encoder.encode(sample.body, f"{sample.answer_prefix} {sample.outputs[0]}")
    # A tokenizer that joins the prompt's last token with the answer is asked for that token too.
    pairs = zip(ids, sample.prompt_ids, strict=False)
    begin = next((i for i, (one, other) in enumerate(pairs) if one != other), len(sample.prompt_ids))
    padded = torch.zeros(sample.max_length + 1, dtype=torch.int64)
    padded[: len(ids)] = torch.tensor(ids)
    counted = torch.zeros(sample.max_length)
    counted[begin - 1 : len(ids) - 1] = 1.0
    return ProbeSequence(padded[:-1], padded[1:], counted)
