"""The table that tells a user what each layer of a built model does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from spec_models import build, build_hybrid, hybrid_stack, make_config, stock_block

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import gpt, hybrid
from megatron_lengthgen.specs.layer_table import format_layer_table, layer_table
from megatron_lengthgen.specs.substitution import apply

pytestmark = pytest.mark.usefixtures("megatron_single")
VPAD = "vpad p=0.1 fill=zero statistics=batch"
PATTERN = {"window_size": (511, 0), "window_attn_skip_freq": [1, 1, 1, 0], "no_rope_freq": [0, 0, 0, 1]}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32, "add_bias_linear": False}


def config_of(**fields: Any) -> Any:
    return make_config(**{"num_layers": 4, "hidden_dropout": 0.1, **fields})


def rows_of(config: Any, regularization: Regularization, **fields: Any) -> list[dict[str, Any]]:
    """Of a GPT model of ``config`` without weights."""
    with torch.device("meta"):
        model = build(gpt.block_spec(config, regularization, core_attention="megatron"), config, **fields)
    return layer_table(config, model)


def layer(number: Any, kind: str = "attention, mlp", **cells: Any) -> dict[str, Any]:
    return {"layer": number, "kind": kind, "window": "full", "rope": True, **cells}


def test_rows_say_window_rope_and_dropout_of_each_layer():
    assert rows_of(config_of(**PATTERN), Regularization()) == [
        layer(1, window=512, attention=VPAD, mlp=VPAD),
        layer(2, window=512, attention=VPAD, mlp=VPAD),
        layer(3, window=512, attention=VPAD, mlp=VPAD),
        layer(4, window="full", rope=False, attention=VPAD, mlp=VPAD),
    ]


@pytest.mark.parametrize(
    ("regularization", "cells", "outside"),
    [
        (Regularization("none"), {}, []),
        (Regularization("pre_norm"), {"attention": "pre_norm p=0.1", "mlp": "pre_norm p=0.1"}, []),
        (Regularization("pre_norm", p=0.25), {"attention": "pre_norm p=0.25", "mlp": "pre_norm p=0.25"}, []),
        (Regularization("pre_norm", p=0.0), {}, []),
        (Regularization("pre_linear", p=0.25, sites=("mlp",)), {"mlp": "pre_linear p=0.25"}, []),
        (
            Regularization("vpad", fill="mean", statistics="norm", sites=("attention", "output")),
            {"attention": "vpad p=0.1 fill=mean statistics=norm"},
            [{"layer": "output", "output": "vpad p=0.1 fill=mean statistics=norm"}],
        ),
        (
            Regularization("pre_linear", start_step=100, ramp_steps=50, sites=("linear_proj", "linear_fc2")),
            dict.fromkeys(("linear_proj", "linear_fc2"), "pre_linear p=0.1 from step 100 over 50"),
            [],
        ),
        (Regularization("vpad", p=0.0), {}, []),
    ],
)
def test_the_dropout_is_read_from_the_model(regularization, cells, outside):
    rows = rows_of(config_of(num_layers=2), regularization)
    assert rows == [layer(1, **cells), layer(2, **cells), *outside]


def test_the_stock_model_has_megatrons_residual_dropout():
    config = config_of()
    rows = layer_table(config, build(stock_block(config), config))
    assert {row[site] for row in rows for site in ("attention", "mlp")} == {"pre_norm p=0.1"}


def test_a_stage_is_numbered_globally():
    config = config_of(**PATTERN)
    model = build(stock_block(config), config)
    stage = torch.nn.ModuleDict({"module": model})
    del model.decoder.layers[:2]
    assert [(row["layer"], row["window"]) for row in layer_table(config, stage)] == [(3, 512), (4, "full")]


@pytest.mark.parametrize(
    ("position_embedding_type", "rope"), [("rope", True), ("yarn", True), ("none", False), ("learned_absolute", False)]
)
def test_a_model_without_rotary_positions_has_no_rope(position_embedding_type, rope):
    config = config_of(num_layers=2)
    model = build(stock_block(config), config)
    nested = SimpleNamespace(transformer=config, position_embedding_type=position_embedding_type)
    assert [row["rope"] for row in layer_table(nested, model)] == [rope, rope]


def test_a_pattern_of_another_length_is_refused():
    config = config_of()
    model = build(stock_block(config), config)
    config.window_size, config.window_attn_skip_freq = (511, 0), [1, 0]
    with pytest.raises(UserError, match="window_attn_skip_freq lists 2 layers, and the model has 4"):
        layer_table(config, model)


def test_experts_say_that_the_router_is_left_out():
    rows = rows_of(config_of(num_layers=2, moe_layer_freq=[0, 1], **EXPERTS), Regularization("pre_linear"))
    text = "pre_linear p=0.1"
    assert rows == [
        layer(1, "attention, mlp", attention=text, mlp=text),
        layer(2, "attention, moe", attention=text, mlp=f"{text} (experts; not the router)"),
    ]
    stock = rows_of(config_of(num_layers=1, **EXPERTS), Regularization("pre_norm"))
    assert stock == [layer(1, "attention, moe", attention="pre_norm p=0.1", mlp="pre_norm p=0.1")]


@pytest.mark.parametrize("placement", ["vpad", "pre_norm", "none"])
def test_layers_of_a_hybrid_have_one_part_each(placement):
    config = config_of(num_layers=3, **EXPERTS, window_size=(15, 0), window_attn_skip_freq=[0, 1, 1])
    sites = {"sites": ("attention", "mlp", "output")} if placement == "vpad" else {}
    spec = hybrid.stack_spec("local", Regularization(placement, **sites))
    with torch.device("meta"):
        model = build_hybrid(spec, config, "-*E")
    text = {"vpad": VPAD, "pre_norm": "pre_norm p=0.1"}.get(placement)
    cells: list[dict[str, Any]] = [{}, {}, {}]
    if text:
        note = " (experts; not the router)" if placement == "vpad" else ""
        cells = [{"mlp": text}, {"attention": text}, {"mlp": text + note}]
    without = {"window": None, "rope": None}
    assert layer_table(SimpleNamespace(transformer=config, position_embedding_type="rope"), model) == [
        {"layer": 1, "kind": "mlp", **without, **cells[0]},
        {"layer": 2, "kind": "attention", "window": 16, "rope": True, **cells[1]},
        {"layer": 3, "kind": "moe", **without, **cells[2]},
        *([{"layer": "output", "output": VPAD}] if placement == "vpad" else []),
    ]


@pytest.mark.parametrize(
    ("regularization", "cells"),
    [
        (Regularization("pre_linear", p=0.2), {"mamba": "pre_linear p=0.2"}),
        (
            Regularization("pre_linear", p=0.2, sites=("mamba", "out_proj")),
            dict.fromkeys(("mamba", "out_proj"), "pre_linear p=0.2"),
        ),
        (Regularization("pre_norm"), {"mamba": "pre_norm p=0.1"}),
        (Regularization("pre_norm", p=0.2), {"mamba": "pre_norm p=0.2"}),
        (Regularization("none"), {}),
    ],
)
def test_mamba_layers_have_columns_of_their_own(regularization, cells):
    config = config_of(num_layers=1, add_bias_linear=False)
    model = build_hybrid(apply(hybrid_stack(), regularization), config, "M")
    rows = layer_table(config, model)
    assert rows == [{"layer": 1, "kind": "mamba", "window": None, "rope": None, **cells}]
    header, line = format_layer_table(rows).splitlines()
    assert header.split() == ["layer", "kind", "window", "rope", "attention", "mlp", *cells]
    assert line.split()[:6] == ["1", "mamba", "-", "-", "none", "none"]


def test_layers_of_multi_token_prediction_have_rows_of_their_own():
    config = config_of(num_layers=2, mtp_num_layers=2, window_size=(511, 0), window_attn_skip_freq=[0, 1])
    block = gpt.stock_block(config)
    sites = ("attention", "mlp", "output")
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
    model = build(
        apply(block, Regularization("pre_linear", sites=sites)),
        config,
        mtp_block_spec=apply(mtp, Regularization("pre_linear", p=0.3, sites=(*sites, "mtp"))),
    )
    text, other = "pre_linear p=0.1", "pre_linear p=0.3"
    theirs = dict.fromkeys(("attention", "mlp", "mtp", "output"), other)
    assert layer_table(config, model) == [
        layer(1, attention=text, mlp=text),
        layer(2, window=512, attention=text, mlp=text),
        # Megatron reads the pattern by the number within multi-token prediction.
        layer("mtp 1", **theirs),
        layer("mtp 2", window=512, **theirs),
        {"layer": "output", "output": text},
    ]
    layers = [*model.decoder.layers, *(depth.mtp_model_layer for depth in model.mtp.layers)]
    assert [layer.self_attention.core_attention.window for layer in layers] == [None, 512, None, 512]


def test_text_joins_equal_layers():
    config = config_of(window_size=(511, 0), window_attn_skip_freq=[1, 1, 1, 0])
    rows = rows_of(config, Regularization("pre_linear", sites=("mlp", "output")))
    assert format_layer_table(rows).splitlines() == [
        "layer  kind            window  rope  attention  mlp",
        "1-3    attention, mlp  512     yes   none       pre_linear p=0.1",
        "4      attention, mlp  full    yes   none       pre_linear p=0.1",
        "output: pre_linear p=0.1",
    ]


def test_text_does_not_join_layers_with_those_of_multi_token_prediction():
    rows = [layer(1), layer(2), layer("mtp 1")]
    assert [line.split("  ")[0] for line in format_layer_table(rows).splitlines()[1:]] == ["1-2", "mtp 1"]
