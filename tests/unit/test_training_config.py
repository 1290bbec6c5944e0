"""A run's YAML: grouping, overrides, and every way to get it wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lengthgen import megatron_args
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import config

MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 128,
}
TRAINING: dict[str, Any] = {"micro_batch_size": 1, "global_batch_size": 2, "train_iters": 3, "lr": 1e-3}


@pytest.fixture
def write(tmp_path: Path):
    def write(tree: dict[str, Any] | str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return path

    return write


def test_groups_are_for_the_reader(write) -> None:
    grouped = config.load(write({"a": MODEL, "b": {"c": TRAINING}}))
    assert grouped == config.load(write({**MODEL, **TRAINING}))
    assert grouped.megatron["num_layers"] == 4


def test_overrides_win_with_and_without_their_group(write) -> None:
    path = write({"model": MODEL, "training": TRAINING, "lengthgen": {"placement": "vpad"}})
    run = config.load(path, ["lr=5e-4", "model.num_layers=8", "lengthgen.p=0.25", "bf16=true"])
    assert (run.megatron["lr"], run.megatron["num_layers"], run.megatron["bf16"]) == (5e-4, 8, True)
    assert run.lengthgen["p"] == 0.25


def test_environment_variables_are_filled_in(write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOMEWHERE", "/data")
    run = config.load(write({**MODEL, "save": "${oc.env:SOMEWHERE}/run"}))
    assert run.megatron["save"] == "/data/run"
    assert run.megatron["load"] == "/data/run"


def test_the_pattern_becomes_megatron_arguments(write) -> None:
    tree = {**MODEL, "lengthgen": {"attention": {"window": 16, "pattern": "WWWF", "rope": "windowed"}}}
    run = config.load(write(tree))
    assert tuple(run.megatron["window_size"]) == (15, 0)
    assert run.megatron["window_attn_skip_freq"] == [1, 1, 1, 0]
    assert run.megatron["no_rope_freq"] == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("section", "hidden_dropout", "p"),
    [({}, None, 0.1), ({}, 0.3, 0.3), ({"p": 0.2}, None, 0.2), ({"p": 0.2}, 0.3, 0.2), ({"p": 0.0}, 0.3, 0.0)],
)
def test_p_acts_in_the_spec_alone(write, section: dict[str, Any], hidden_dropout: float | None, p: float) -> None:
    tree = {**MODEL, "lengthgen": {"placement": "vpad", **section}}
    if hidden_dropout is not None:
        tree["hidden_dropout"] = hidden_dropout
    run = config.load(write(tree))
    assert run.lengthgen["p"] == p
    assert run.megatron["hidden_dropout"] == 0.0
    assert run.megatron["attention_dropout"] == 0.0


@pytest.mark.parametrize(
    ("tree", "overrides", "message"),
    [
        ({**MODEL, "lengthgen": {"placment": "vpad"}}, [], r"lengthgen\.placment.*placement"),
        ({**MODEL, "lengthgen": {"placement": "vpda"}}, [], r"vpda.*vpad"),
        ({**MODEL, "lengthgen": {"p": 1.0}}, [], r"1\.0"),
        ({**MODEL, "lengthgen": {"core_attention": "flash"}}, [], r"flash.*sdpa"),
        ({**MODEL, "lengthgen": "vpad"}, [], r"must be a mapping"),
        ({"a": MODEL, "b": {"num_layers": 2}}, [], r"num_layers.*twice"),
        ({**MODEL, "reset_attention_mask": True}, [], r"reset_attention_mask"),
        (
            {**MODEL, "window_size": "15,0", "lengthgen": {"attention": {"window": 16, "pattern": "W"}}},
            [],
            r"window_size.*twice",
        ),
        ({"lengthgen": {"attention": {"window": 16, "pattern": "W"}}}, [], r"num_layers"),
        (MODEL, ["num_layers"], r"key=value"),
        (MODEL, ["nowhere.lr=1"], r"nowhere"),
        (MODEL, ["lengthgen.attention=["], r"no YAML value"),
        ("a: [1", [], r"no valid YAML"),
        ("- 1", [], r"mapping"),
    ],
)
def test_mistakes_are_named(write, tree: Any, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config.load(write(tree), overrides)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.yaml"):
        config.load(tmp_path / "nothing.yaml")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_layer": 4}, r"'num_layer' \(did you mean 'num_layers'"),
        ({"num_layers": "four"}, r"four"),
        ({"swiglu": "yes"}, r"swiglu is a switch"),
        ({"lr_decay_style": "slowly"}, r"slowly"),
    ],
)
def test_unknown_and_malformed_arguments_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        megatron_args.to_argv({**MODEL, **TRAINING, **values})


def test_switches_go_by_either_name() -> None:
    assert megatron_args.to_argv({"no_rope_fusion": True}) == ["--no-rope-fusion"]
    assert megatron_args.to_argv({"apply_rope_fusion": False}) == ["--no-rope-fusion"]
    assert megatron_args.to_argv({"apply_rope_fusion": True, "no_rope_fusion": False}) == []
    assert megatron_args.to_argv({"swiglu": True, "bf16": False, "lr": None}) == ["--swiglu"]


def test_megatrons_own_refusals_come_as_one_sentence() -> None:
    with pytest.raises(UserError, match="Megatron refuses this configuration"):
        megatron_args.parse({name: value for name, value in MODEL.items() if name != "seq_length"})


def test_arguments_arrive(write) -> None:
    args = config.parse(config.load(write({**MODEL, **TRAINING, "mock_data": True, "lengthgen": {"p": 0.2}})))
    assert (args.num_layers, args.lr, args.hidden_dropout) == (4, 1e-3, 0.0)
    assert args.lengthgen["p"] == 0.2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tensor_model_parallel_size": 3}, r"3 does not divide num_attention_heads 4.*1, 2, 4"),
        ({"pipeline_model_parallel_size": 3}, r"3 does not divide num_layers 4"),
        ({"data_path": ["missing"]}, r"missing\.idx"),
        ({"pretrained_checkpoint": "/nowhere"}, r"/nowhere is no Megatron checkpoint"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "./nowhere"}, r"\./nowhere does not exist"),
    ],
)
def test_what_cannot_run_is_refused_before_anything_is_built(write, values: dict[str, Any], message: str) -> None:
    run = config.load(write({**MODEL, **TRAINING, "mock_data": "data_path" not in values, **values}))
    with pytest.raises(UserError, match=message):
        config.parse(run)


def test_a_split_without_documents_is_refused(write, tmp_path: Path) -> None:
    """Megatron's dataset loops forever over an empty split."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "few.bin"), dtype=np.uint16)
    for _ in range(10):
        builder.add_document(torch.arange(100), [100])
    builder.finalize(str(tmp_path / "few.idx"))
    tree = {**MODEL, **TRAINING, "data_path": [str(tmp_path / "few")]}
    with pytest.raises(UserError, match=r"validation split of .*few without a document.* 10 in all"):
        config.parse(config.load(write({**tree, "split": "99,1,0"})))
    assert config.parse(config.load(write({**tree, "split": "90,10,0"}))).split == "90,10,0"
