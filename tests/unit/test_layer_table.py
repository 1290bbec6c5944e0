"""The table that tells a user what each layer does."""

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.layer_table import format_layer_table, layer_table
from megatron_lengthgen.specs.substitution import apply

VPAD = "vpad p=0.1 fill=zero statistics=batch"


def make_config(**fields: Any) -> TransformerConfig:
    return TransformerConfig(
        **{"num_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "hidden_dropout": 0.1, **fields}
    )


def make_block(num_layers: int) -> TransformerBlockSubmodules:
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    return TransformerBlockSubmodules(layer_specs=[layer] * num_layers, layer_norm=WrappedTorchNorm)


def test_rows_say_window_rope_and_dropout_of_each_layer():
    config = make_config(window_size=(511, 0), window_attn_skip_freq=[1, 1, 1, 0], no_rope_freq=[0, 0, 0, 1])
    assert layer_table(config, Regularization()) == [
        {"layer": 1, "window": 512, "rope": True, "attention": VPAD, "mlp": VPAD},
        {"layer": 2, "window": 512, "rope": True, "attention": VPAD, "mlp": VPAD},
        {"layer": 3, "window": 512, "rope": True, "attention": VPAD, "mlp": VPAD},
        {"layer": 4, "window": "full", "rope": False, "attention": VPAD, "mlp": VPAD},
    ]


@pytest.mark.parametrize(
    "regularization",
    [
        Regularization("none"),
        Regularization("pre_norm"),
        Regularization("pre_norm", p=0.25),
        Regularization("pre_linear", p=0.25, sites=("mlp",)),
        Regularization("vpad", fill="mean", statistics="norm", sites=("attention", "output")),
        Regularization("vpad", p=0.0),
    ],
)
def test_a_built_block_reads_like_the_options_that_it_was_made_with(regularization):
    config = make_config()
    assert layer_table(config, apply(make_block(4), regularization)) == layer_table(config, regularization)


def test_stock_block_has_megatrons_residual_dropout():
    rows = layer_table(make_config(), make_block(4))
    assert {row[site] for row in rows for site in ("attention", "mlp")} == {"pre_norm p=0.1"}


def test_a_stage_is_numbered_globally():
    config = make_config(window_size=(3, 0), window_attn_skip_freq=[1, 1, 1, 0])
    rows = layer_table(config, make_block(2), first_layer=3)
    assert [(row["layer"], row["window"]) for row in rows] == [(3, 4), (4, "full")]
    with pytest.raises(UserError, match="layers 4 to 5 do not fit a model of 4 layers"):
        layer_table(config, make_block(2), first_layer=4)


def test_a_model_without_rotary_positions_has_no_rope():
    nested = SimpleNamespace(transformer=make_config(), position_embedding_type="none")
    assert not any(row["rope"] for row in layer_table(nested, Regularization()))


def test_text_joins_equal_layers():
    config = make_config(window_size=(511, 0), window_attn_skip_freq=[1, 1, 1, 0])
    rows = layer_table(config, Regularization("pre_linear", sites=("mlp", "output")))
    assert format_layer_table(rows).splitlines() == [
        "layer  window  rope  attention  mlp",
        "1-3    512     yes   none       pre_linear p=0.1",
        "4      full    yes   none       pre_linear p=0.1",
        "output: pre_linear p=0.1",
    ]
