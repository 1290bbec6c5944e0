"""Answers of a model: the last layer computes what is asked for only, and attention scales do what they say."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lengthgen.attention.core import SDPACoreAttention
from megatron_lengthgen.study import evaluation, tasks

LENGTH = 8
WIDTH = 16
TASK = tasks.Recall(needles=1, keys=3, values=3, states=4, successors=2)


class Model(torch.nn.Module):
    """Two layers of nothing but attention, the second one full; ``[b, s]`` token ids to ``[b, s, vocabulary]``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = TransformerConfig(
            num_layers=2,
            hidden_size=WIDTH,
            num_attention_heads=2,
            attention_dropout=0.0,
            window_size=(3, 0),
            window_attn_skip_freq=2,
        )
        self.embedding = torch.nn.Embedding(TASK.vocab_size, WIDTH)
        self.layers = torch.nn.ModuleList(
            SDPACoreAttention(config, number, AttnMaskType.causal, "self") for number in (1, 2)
        )
        self.queries = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in self.layers)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, mask: None) -> torch.Tensor:
        hidden = self.embedding(tokens).transpose(0, 1)
        for core, project in zip(self.layers, self.queries, strict=True):
            heads = hidden.unflatten(-1, (2, -1))
            hidden = hidden + core(project(hidden).unflatten(-1, (2, -1)), heads, heads, None)
        return (hidden @ self.embedding.weight.T).transpose(0, 1)


@pytest.fixture
def model(megatron_single: Any) -> Model:
    return Model().eval()


def reference(model: Model, length: int, sequences: int) -> np.ndarray:
    """Losses ``[sequences, answers]`` of whole forward passes, one sequence at a time."""
    rows = []
    for index in range(sequences):
        drawn = tasks.sample(TASK, length, seed=3, split="evaluation", index=index)
        tokens = torch.from_numpy(drawn.tokens)[None]
        logits = model(tokens[:, :-1], torch.arange(length)[None], None)[0].log_softmax(-1)
        rows.append([-logits[place - 1, tokens[0, place]].item() for place in drawn.answers])
    return np.array(rows)


@pytest.mark.parametrize("length", [LENGTH, 50])
def test_answers_are_those_of_whole_forward_passes(model: Model, length: int) -> None:
    found = evaluation.answer(model, TASK, length, seed=3, sequences=4)
    np.testing.assert_allclose(found.loss, reference(model, length, 4), rtol=1e-5, atol=1e-6)


def test_the_last_layer_attends_from_what_is_asked_only(model: Model) -> None:
    seen = []
    model.layers[1].register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[0]))
    evaluation.answer(model, TASK, 50, seed=3, sequences=1)
    assert seen == [1]
    model(torch.zeros(1, 50, dtype=torch.long), torch.arange(50)[None], None)
    assert seen == [1, 50]


def test_a_factor_multiplies_the_logits_of_full_layers(model: Model) -> None:
    with evaluation.scaled_full_attention(model, 1.7, LENGTH):
        scaled = evaluation.answer(model, TASK, 50, seed=3, sequences=2).loss
    plain = evaluation.answer(model, TASK, 50, seed=3, sequences=2).loss
    model.layers[1].softmax_scale *= 1.7
    expected = evaluation.answer(model, TASK, 50, seed=3, sequences=2).loss
    np.testing.assert_allclose(scaled, expected, rtol=1e-5)
    assert np.abs(plain - expected).max() > 1e-3


def test_log_grows_with_the_position(model: Model) -> None:
    queries = []
    core = model.layers[1]
    tokens = torch.zeros(1, 50, dtype=torch.long)
    core.register_forward_hook(lambda module, inputs, output: queries.append(inputs[0]))
    model(tokens, torch.arange(50)[None], None)
    with evaluation.scaled_full_attention(model, "log", LENGTH):
        model(tokens, torch.arange(50)[None], None)
    plain, scaled = queries
    factors = (scaled / plain)[:, 0, 0, 0]
    expected = [max(1.0, math.log(n) / math.log(LENGTH)) for n in range(1, 51)]
    torch.testing.assert_close(factors, torch.tensor(expected), rtol=1e-5, atol=1e-6)
    # Within its training length a model computes what it was trained to.
    assert (factors[:LENGTH] == 1).all() and factors[-1] > 1.8
