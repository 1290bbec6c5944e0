"""A run's YAML: grouping, overrides, and every way to get it wrong."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.ssm.mamba_mixer import HAVE_MAMBA_SSM

from megatron_lengthgen import megatron_args
from megatron_lengthgen.dropout.masks import MASK_VERSION
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models import build
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.training import config, run

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
        (
            {**MODEL, "reset_attention_mask": True, "pipeline_model_parallel_size": 3},
            [],
            r"reset_attention_mask keeps .* the last pipeline stage alone",
        ),
        ({**MODEL, "dataloader_inter_document_masking": True}, [], r"use reset_attention_mask: true"),
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


def test_everything_about_the_dropout_is_recorded_defaults_included(write) -> None:
    section = {"placement": "pre_linear", "sites": ["mlp"], "ramp_steps": 2}
    run = config.load(write({**MODEL, **TRAINING, "mock_data": True, "hidden_dropout": 0.3, "lengthgen": section}))
    args = config.parse(run)
    assert args.lengthgen == {
        "placement": "pre_linear",
        "p": 0.3,
        "fill": "zero",
        "statistics": "batch",
        "sites": ["mlp"],
        "start_step": 0,
        "ramp_steps": 2,
        "core_attention": "sdpa",
        "mask_version": MASK_VERSION,
    }
    assert build.regularization(args) == Regularization("pre_linear", p=0.3, sites=("mlp",), ramp_steps=2)
    # What --dry-run shows can be written into a configuration again.
    assert config.load(write({**MODEL, "lengthgen": run.lengthgen})).lengthgen == run.lengthgen


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"start_step": 3}, r"start_step 3 is never reached in a run of 3 steps"),
        ({"start_step": 1000}, r"start_step 1000 is never reached"),
        (
            {"start_step": 1, "ramp_steps": 3},
            r"start_step 1 and ramp_steps 3 end after .* 3 steps, so that p 0\.1 would",
        ),
        ({"ramp_steps": 4}, r"ramp_steps 4 end after"),
        ({"start_step": 1.5}, r"start_step must be a number of training steps, got 1\.5"),
        ({"placement": "pre_norm", "start_step": 1}, r"leave out start_step and ramp_steps"),
    ],
)
def test_a_schedule_that_does_not_fit_the_run_is_refused(write, section: dict[str, Any], message: str) -> None:
    tree = {**MODEL, **TRAINING, "mock_data": True, "lengthgen": {"placement": "vpad", **section}}
    with pytest.raises(UserError, match=message):
        config.parse(config.load(write(tree)))


@pytest.mark.parametrize(
    "section",
    [
        {"placement": "vpad", "start_step": 2},
        {"placement": "vpad", "start_step": 1, "ramp_steps": 2},
        {"placement": "none", "start_step": 1000},
        {"placement": "vpad", "p": 0.0, "start_step": 1000},
    ],
)
def test_a_schedule_that_ends_in_time_or_drops_nothing_is_taken(write, section: dict[str, Any]) -> None:
    config.parse(config.load(write({**MODEL, **TRAINING, "mock_data": True, "lengthgen": section})))


def test_steps_may_be_given_in_samples(write) -> None:
    training = {name: value for name, value in TRAINING.items() if name != "train_iters"}
    tree = {**MODEL, **training, "mock_data": True, "train_samples": 20, "lengthgen": {"placement": "vpad"}}
    config.parse(config.load(write(tree), ["lengthgen.start_step=9"]))
    with pytest.raises(UserError, match="start_step 10 is never reached in a run of 10 steps"):
        config.parse(config.load(write(tree), ["lengthgen.start_step=10"]))


HYBRID: dict[str, Any] = {**MODEL, "num_layers": None, "position_embedding_type": "rope"}


def test_a_hybrids_attention_is_laid_over_its_attention_layers(write) -> None:
    section = {"attention": {"window": 16, "pattern": ["W", "F"], "rope": "windowed"}}
    tree = {**HYBRID, **TRAINING, "mock_data": True, "hybrid_layer_pattern": "*-*-", "lengthgen": section}
    args = config.parse(config.load(write(tree)))
    assert (args.num_layers, args.window_attn_skip_freq, args.no_rope_freq) == (4, [1, 0, 0, 0], [0, 0, 1, 0])
    del section["attention"]["pattern"]
    assert config.load(write(tree)).megatron["window_attn_skip_freq"] == [1, 0, 1, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lengthgen": {"attention": {"window": 16, "pattern": ["W"] * 4}}}, r"pattern lists 4 layers.* has 2"),
        (
            {"hybrid_layer_pattern": "--", "lengthgen": {"attention": {"window": 16}}},
            r"'--' has no attention layer .*leave lengthgen.attention out",
        ),
        ({"num_layers": 2}, r"has 4 layers: leave num_layers 2 out"),
        ({"hybrid_layer_pattern": "*X"}, r"'\*X' is no pattern of layers: .*'X' is not a valid layer symbol"),
        ({"hybrid_layer_pattern": 4}, r"4 is no pattern of layers"),
        ({"hybrid_layer_pattern": "*-|*-"}, r"1 does not fit the 2 stages of .*set it to 2, or take \\| out"),
        ({"hybrid_layer_pattern": "*-|*-|*", "pipeline_model_parallel_size": 2}, r"2 does not fit the 3 stages"),
        ({"pipeline_model_parallel_size": 3}, r"3 does not divide num_layers 4.*borders as \\|"),
    ],
)
def test_hybrids_that_cannot_run_are_refused(write, values: dict[str, Any], message: str) -> None:
    tree = {**HYBRID, **TRAINING, "mock_data": True, "hybrid_layer_pattern": "*-*-", **values}
    with pytest.raises(UserError, match=message):
        config.parse(config.load(write(tree)))


needs_absent = pytest.mark.skipif(HAVE_TE or HAVE_MAMBA_SSM, reason="Transformer Engine or mamba_ssm is installed here")


@needs_absent
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**MODEL, "transformer_impl": "transformer_engine"}, r"Transformer Engine cannot be imported .*impl: local"),
        ({**HYBRID, "hybrid_layer_pattern": "M-*-"}, r"'M-\*-' has Mamba layers \(M\), which need mamba_ssm"),
        ({**HYBRID, "hybrid_layer_pattern": "G-*-"}, r"layers of kind 'G', which transformer_impl: local does not"),
        ({**HYBRID, "hybrid_layer_pattern": "E*"}, r"experts \(E\): say how many experts with num_experts"),
        ({**HYBRID, "hybrid_layer_pattern": "*-", "use_rope_scaling": True}, r"use_rope_scaling is on"),
        ({**MODEL, "flash_decode": True, "window_size": "15,0"}, r"flash_decode ignores window_size"),
        ({**MODEL, "spec": ["somebody.specs", "one"]}, r"'somebody\.specs one' and the lengthgen section"),
    ],
)
def test_what_the_layers_lack_is_said_before_the_model_is_built(write, values: dict[str, Any], message: str) -> None:
    args = config.parse(config.load(write({**values, **TRAINING, "mock_data": True})))
    with pytest.raises(UserError, match=message):
        build.model_config(args)


def shown(write, capsys: pytest.CaptureFixture[str], tree: dict[str, Any]) -> list[str]:
    run.dry_run(config.load(write({**TRAINING, "mock_data": True, "position_embedding_type": "rope", **tree})))
    return capsys.readouterr().out.splitlines()


def test_a_dry_run_names_the_masks_and_what_each_layer_does(write, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"placement": "vpad", "attention": {"window": 16, "pattern": "WWWF", "rope": "windowed"}}
    lines = shown(write, capsys, {**MODEL, "position_embedding_type": "rope", "lengthgen": section})
    assert (
        f"masks: layout-invariant, Philox4x32-10, version {MASK_VERSION}, seed 1234; the same under any TP/PP/DP/CP "
        "layout, recomputation and resume"
    ) in lines
    vpad = "vpad p=0.1 fill=zero statistics=batch"
    assert [line.split(maxsplit=5) for line in lines[-2:]] == [
        ["1-3", "attention,", "mlp", "16", "yes", f"{vpad}  {vpad}"],
        ["4", "attention,", "mlp", "full", "no", f"{vpad}  {vpad}"],
    ]


@pytest.mark.parametrize(("placement", "site"), [("pre_norm", "pre_norm p=0.1"), ("none", "none")])
def test_a_dry_run_says_where_the_masks_are_megatrons(
    write, capsys: pytest.CaptureFixture[str], placement: str, site: str
) -> None:
    lines = shown(write, capsys, {**MODEL, "lengthgen": {"placement": placement}})
    (masks,) = (line for line in lines if line.startswith("masks: "))
    assert masks.startswith(f"masks: Megatron's random streams (placement {placement}")
    assert lines[-1].split()[5:] == [*site.split(), *site.split()]


def test_a_dry_run_of_a_hybrid_in_stages_shows_all_its_layers(write, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"placement": "pre_linear", "attention": {"window": 16, "pattern": "WF"}}
    model = {**HYBRID, "hybrid_layer_pattern": "*-|*E", "pipeline_model_parallel_size": 2, "num_experts": 4}
    lines = shown(write, capsys, {**model, "add_bias_linear": False, "lengthgen": section})
    assert "layout: TP 1, PP 2, CP 1, DP 1 on 2 process(es)" in lines
    assert [line.split() for line in lines[-4:]] == [
        ["1", "attention", "16", "yes", "pre_linear", "p=0.1", "none"],
        ["2", "mlp", "-", "-", "none", "pre_linear", "p=0.1"],
        ["3", "attention", "full", "yes", "pre_linear", "p=0.1", "none"],
        ["4", "moe", "-", "-", "none", "pre_linear", "p=0.1", "(experts;", "not", "the", "router)"],
    ]


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
