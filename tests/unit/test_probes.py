"""What the probes measure, against plain forwards; what they refuse; what they keep."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from ruler_fixtures import ESSAY, tokenizer
from spec_models import make_config
from torch import Tensor
from torch.nn.functional import cross_entropy

from megatron_lengthgen.attention.core import SDPACoreAttention
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import config, length_probe, needle_probe, probe_forward, probes
from megatron_lengthgen.training.probe_forward import ProbeSequence, sum_over_samples
from megatron_lengthgen.training.probe_settings import ProbeSettings

VOCABULARY = 600


@pytest.fixture
def model(megatron_single) -> GPTModel:
    megatron_single(3)
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = SDPACoreAttention
    return GPTModel(
        config=make_config(init_method_std=0.3, pipeline_dtype=torch.float32),
        transformer_layer_spec=layer,
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
    ).eval()


@torch.no_grad()
def plain_losses(model: GPTModel, ids: Tensor) -> Tensor:
    """[s] for ids [s + 1]."""
    logits = model(ids[None, :-1], torch.arange(len(ids) - 1)[None], None)
    return cross_entropy(logits[0].float(), ids[1:], reduction="none")


@pytest.mark.parametrize("rows", [7, 2048])
def test_losses_taken_piece_by_piece_are_the_models(model: GPTModel, monkeypatch, rows: int) -> None:
    monkeypatch.setattr(probe_forward, "_ROWS", rows)
    ids = torch.randint(0, VOCABULARY, (3, 41), generator=torch.Generator().manual_seed(1))
    counted = torch.ones(40)
    counted[5] = 0

    def by_sample(losses: Tensor, counted: Tensor, positions: Tensor, index: int) -> Tensor:
        assert positions.tolist() == list(range(40))
        return torch.zeros(3, 40, dtype=torch.float64).index_put((torch.tensor(index),), losses * counted)

    with torch.no_grad():
        found = sum_over_samples([model], lambda i: ProbeSequence(ids[i, :-1], ids[i, 1:], counted), 3, 40, by_sample)
    wanted = torch.stack([plain_losses(model, row) for row in ids]) * counted
    torch.testing.assert_close(found, wanted.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("length", "multiples", "wanted"),
    [
        (64, [1], [0, 32, 64]),
        (64, [1, 4, 16], [0, 32, 64, 128, 256, 512, 1024]),
        (64, [3], [0, 32, 64, 128, 192]),
        (64, [2, 5], [0, 32, 64, 128, 256, 320]),
        (1, [1, 2], [0, 1, 2]),
    ],
)
def test_buckets(length: int, multiples: list[int], wanted: list[int]) -> None:
    assert length_probe.edges(length, multiples) == wanted


@pytest.fixture
def published(tmp_path: Path) -> Path:
    tokenizer().save_pretrained(tmp_path / "hf")
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "one.txt").write_text(ESSAY * 20)
    return tmp_path


def needles(published: Path, length: int = 512, **settings: Any) -> needle_probe.NeedleProbe:
    args = Namespace(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=published / "hf", seq_length=length)
    return needle_probe.NeedleProbe(ProbeSettings(**{"multiples": (1, 2), "samples": 2, **settings}), args)


def test_the_needle_probe_is_the_probability_of_the_whole_answer(model: GPTModel, published: Path) -> None:
    probe = needles(published, essays=str(published / "essays"))
    probe.check()
    with torch.no_grad():
        scores = probe.measure([model])
    assert scores is not None
    assert list(scores) == [f"niah_single_{task} {multiple}x" for task in (1, 2) for multiple in (1, 2)]
    for task in probe._tasks:
        for multiple in (1, 2):
            probabilities = []
            for index in range(2):
                sample = probe._ruler.sample(task, multiple * 512, index)
                assert multiple * 512 * 0.9 < sample.length <= multiple * 512
                answer = probe._ruler.encoder.tokenizer.encode(f" {sample.outputs[0]}")
                losses = plain_losses(model, torch.tensor([*sample.prompt_ids, *answer]))
                probabilities.append(losses[-len(answer) :].double().sum().neg().exp().item())
            assert scores[f"{task.name} {multiple}x"] == pytest.approx(sum(probabilities) / 2, rel=1e-4)


def test_a_token_that_spans_prompt_and_answer_counts(published: Path) -> None:
    """A tokenizer may join the prompt's end with the answer's start."""
    probe = needles(published)
    sample = probe._ruler.sample(probe._tasks[0], 512, 0)
    ids = list(sample.prompt_ids)

    class Joining:
        def encode(self, body: str, answer_prefix: str) -> list[int]:
            return [*ids[:-1], 7, 8, 9]

    sequence = needle_probe.answered(sample, Joining())  # type: ignore[arg-type]
    assert sequence.labels[sequence.counted.bool()].tolist() == [7, 8, 9]
    assert len(sequence.tokens) == 512


MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "position_embedding_type": "rope",
    "seq_length": 64,
    "max_position_embeddings": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 128,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-3,
    "eval_iters": 1,
    "eval_interval": 5,
    "split": "90,10,0",
}


def make(section: dict[str, Any], **values: Any) -> list[probes.Probe]:
    values = {**MODEL, "mock_data": "data_path" not in values and "sources" not in values, **values}
    run = config.resolve(values, section)
    return probes.make(run.lengthgen, config.parse(run))


def test_a_configuration_comes_to_its_probes() -> None:
    (probe,) = make({"length_probe": {"multiples": [4, 1, 4], "every": 10}})
    assert probe.settings == ProbeSettings((1, 4), 8, 10)
    (default,) = make({"length_probe": {}})
    assert default.settings == ProbeSettings((1, 4, 16), 8)
    assert make({}) == []


def test_checkpoints_do_not_know_of_probes() -> None:
    run = config.resolve({**MODEL, "mock_data": True}, {"length_probe": {}})
    assert "length_probe" in run.lengthgen
    assert "length_probe" not in config.parse(run).lengthgen


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ({"length_probe": {"multiple": [1]}}, {}, r"length_probe key 'multiple' \(did you mean 'multiples'"),
        ({"length_probe": {"essays": "x"}}, {}, "unknown length_probe key 'essays'"),
        ({"length_probe": {"multiples": [0.5]}}, {}, r"length_probe.multiples must list .*\[0\.5\]"),
        ({"length_probe": {"multiples": 4}}, {}, "length_probe.multiples must list"),
        ({"length_probe": {"samples": 0}}, {}, "length_probe.samples must be a whole number of 1 or more, got 0"),
        ({"length_probe": 3}, {}, "length_probe must be a mapping"),
        ({"length_probe": {}}, {"eval_iters": 0}, "eval_iters is 0: set it to 1 or more"),
        ({"length_probe": {}}, {"split": "100,0,0"}, "split 100,0,0 leaves none: give its second part more"),
        ({"length_probe": {"every": 7}}, {}, "every 7 is no multiple of eval_interval 5"),
        (
            {"length_probe": {}},
            {"position_embedding_type": "learned_absolute"},
            r"looks at 1,024 tokens, and the model has learned 64 positions .* lower multiples",
        ),
        ({"needle_probe": {}}, {}, "needle_probe asks in words, and tokenizer_type NullTokenizer has none"),
    ],
)
def test_probes_that_cannot_be_are_refused(section: dict[str, Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make(section, **values)


def test_a_training_length_without_room_for_a_question_is_refused(published: Path) -> None:
    with pytest.raises(UserError, match=r"length 64 is too small for niah_single_1.* use at least"):
        needles(published, length=64).check()


@pytest.fixture
def corpus(tmp_path: Path):
    def make(name: str, documents: int) -> str:
        builder = IndexedDatasetBuilder(str(tmp_path / f"{name}.bin"), dtype=np.uint16)
        for _ in range(documents):
            builder.add_document(torch.arange(100), [100])
        builder.finalize(str(tmp_path / f"{name}.idx"))
        return str(tmp_path / name)

    return make


def test_validation_data_too_short_for_the_longest_sequences_is_refused(corpus) -> None:
    few = corpus("few", 100)
    section = {"length_probe": {"multiples": [1, 4], "samples": 4}}
    with pytest.raises(
        UserError, match=r"needs 1,025 tokens .*few \(4 of its 4 sequences, of 256 .* of it has 1,000: "
    ):
        make(section, data_path=[few])
    assert make(section, data_path=[corpus("enough", 108)])
    with pytest.raises(UserError, match=r"few \(2 of its 4 sequences|few \(3 of its 4 sequences"):
        sources = [{"path": few, "weight": 1}, {"path": corpus("rich", 1000), "weight": 1}]
        make({"length_probe": {"multiples": [1, 8], "samples": 4}}, sources=sources)


def test_the_validation_data_holds_no_text_twice(corpus, megatron_single) -> None:
    """At the least that is accepted, Megatron's dataset needs a single epoch."""
    from megatron_lengthgen.training.data import validation_dataset

    run = config.resolve({**MODEL, "data_path": [corpus("enough", 108)]}, {})
    config.parse(run)
    dataset = validation_dataset(256, 4)
    assert sorted(dataset.document_index.tolist()) == sorted(dataset.indices.tolist())
    assert len(dataset) == 4
    assert len(dataset[3]["tokens"]) == 256


def test_a_curve_keeps_one_line_a_step_in_order(tmp_path: Path) -> None:
    path = tmp_path / "curve.jsonl"
    for step, loss in ((5, 3.0), (10, 2.0), (15, 1.5)):
        probes.keep(path, {"step": step, "loss 1x": loss})
    # The run was killed and went back to step 5.
    probes.keep(path, {"step": 10, "loss 1x": 2.5})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 5, "loss 1x": 3.0},
        {"step": 10, "loss 1x": 2.5},
    ]


def test_weights_and_biases_is_asked_for_before_training(tmp_path: Path, monkeypatch) -> None:
    values = {**MODEL, "mock_data": True, "wandb_project": "lengths", "save": str(tmp_path)}
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="wandb_project lengths needs Weights & Biases: pip install wandb, or leave"):
        config.parse(config.resolve(values, {}), logs=False)


def test_weights_and_biases_needs_a_folder(monkeypatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    values = {**MODEL, "mock_data": True, "wandb_project": "lengths"}
    with pytest.raises(UserError, match="wandb_project lengths needs a folder for its files: set save"):
        config.parse(config.resolve(values, {}), logs=False)
    with pytest.raises(UserError, match="gets nothing without TensorBoard"):
        config.parse(config.resolve({**values, "wandb_save_dir": "w"}, {}), logs=False)
