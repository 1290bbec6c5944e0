"""Attention patterns against Megatron's own reading of them."""

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.hybrid.hybrid_layer_allocation import parse_hybrid_pattern, validate_segment_layers
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import get_sliding_window_causal_mask, is_layer_window_attention
from megatron.training.arguments import moe_freq_type, no_rope_freq_type, tuple_type
from transformers import SmolLM3Config

from megatron_lengthgen.attention.pattern import AttentionPattern, attention_layers
from megatron_lengthgen.errors import UserError


@st.composite
def patterns(draw: st.DrawFn) -> AttentionPattern:
    num_layers = draw(st.integers(1, 12))
    flags = st.lists(st.booleans(), min_size=num_layers, max_size=num_layers).map(tuple)
    windowed = draw(flags)
    return AttentionPattern(
        window=draw(st.integers(1, 4096)) if any(windowed) else None, windowed=windowed, rope=draw(flags)
    )


def _config(num_layers: int, **fields: object) -> TransformerConfig:
    return TransformerConfig(num_layers=num_layers, hidden_size=8, num_attention_heads=2, **fields)


@settings(deadline=None)
@given(patterns())
def test_round_trip_through_a_transformer_config(pattern):
    config = _config(len(pattern.rope), **pattern.to_megatron())
    assert AttentionPattern.from_megatron(config) == pattern
    seen = tuple(
        is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer)
        for layer in range(1, config.num_layers + 1)
    )
    assert seen == pattern.windowed


@given(patterns())
def test_round_trip_through_megatrons_argument_types(pattern):
    fields = pattern.to_megatron()
    parsed = {
        name: None if fields[name] is None else parse(str(fields[name]).replace(" ", ""))
        for name, parse in (
            ("window_size", tuple_type),
            ("window_attn_skip_freq", moe_freq_type),
            ("no_rope_freq", no_rope_freq_type),
        )
    }
    assert parsed == fields
    assert AttentionPattern.from_megatron(SimpleNamespace(num_layers=len(pattern.rope), **parsed)) == pattern


@pytest.mark.parametrize("window", [1, 3, 8])
def test_a_window_of_w_lets_a_query_see_w_keys(window):
    size = AttentionPattern.from_mapping({"window": window}, 2).to_megatron()["window_size"]
    hidden = get_sliding_window_causal_mask(8, 8, size)
    assert (~hidden).sum(-1).tolist() == [min(query + 1, window) for query in range(8)]
    assert (~hidden).diagonal().all()


@pytest.mark.parametrize("frequency", [1, 2, 3, None])
def test_integer_frequencies_are_read_as_megatron_reads_them(frequency):
    config = _config(6, window_size=(3, 0), window_attn_skip_freq=frequency, no_rope_freq=frequency)
    pattern = AttentionPattern.from_megatron(config)
    assert pattern.windowed == tuple(is_layer_window_attention((3, 0), frequency, layer) for layer in range(1, 7))
    skip = config.no_rope_freq or [0] * 6  # the config has made a list of the integer
    assert pattern.rope == tuple(not s for s in skip)


def test_mapping_repeats_a_period_and_can_drop_rope_in_full_layers():
    pattern = AttentionPattern.from_mapping({"window": 512, "pattern": "WWWF", "rope": "windowed"}, 6)
    assert pattern.windowed == (True, True, True, False, True, True)
    assert pattern.rope == pattern.windowed
    assert pattern.to_megatron() == {
        "window_size": (511, 0),
        "window_attn_skip_freq": [1, 1, 1, 0, 1, 1],
        "no_rope_freq": [0, 0, 0, 1, 0, 0],
    }


def test_mapping_takes_whole_lists():
    pattern = AttentionPattern.from_mapping({"window": 4, "pattern": ["F", "W"], "rope": [1, 0]}, 2)
    assert pattern == AttentionPattern(4, (False, True), (True, False))


@given(patterns())
def test_round_trip_through_a_mapping(pattern):
    assert AttentionPattern.from_mapping(pattern.to_mapping(), len(pattern.rope)) == pattern


def test_a_mapping_is_short_and_a_description_counts():
    pattern = AttentionPattern.from_mapping({"window": 512, "pattern": "WWWF", "rope": "windowed"}, 10)
    assert pattern.to_mapping() == {"window": 512, "pattern": "WWWF", "rope": "windowed"}
    assert str(pattern) == "windows of 512 tokens in 8 of 10 layers, no RoPE in 2 of 10"
    assert str(AttentionPattern.from_mapping({}, 3)) == "full attention, RoPE in every layer"


def test_empty_mapping_is_plain_attention():
    pattern = AttentionPattern.from_mapping({}, 3)
    assert pattern.to_megatron() == {"window_size": None, "window_attn_skip_freq": None, "no_rope_freq": None}


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"windw": 5}, r"unknown attention key 'windw' \(did you mean 'window'"),
        ({"window": 0}, "positive number of tokens, got 0"),
        ({"window": "512"}, "positive number of tokens, got '512'"),
        ({"pattern": "WF"}, "no window is given"),
        ({"window": 8, "pattern": "F"}, "window is 8, and no layer is windowed"),
        ({"window": 8, "pattern": "WXF"}, "W .windowed. and F .full attention., got 'WXF'"),
        ({"window": 8, "pattern": "WWWWF"}, "'WWWWF' is 5 layers long, and the model has 4"),
        ({"window": 8, "pattern": ["W", "F"]}, "pattern lists 2 layers, and the model has 4"),
        ({"window": 8, "pattern": ["W", "F", "W", "Q"]}, "unknown letter in pattern 'Q'"),
        ({"window": 8, "pattern": 3}, "got 3"),
        ({"rope": "window"}, r"unknown rope 'window' \(did you mean 'windowed'"),
        ({"rope": [1, 0]}, "rope lists 2 layers, and the model has 4"),
        ({"rope": [1, 0, 2, 1]}, "got 2"),
        ([], r"must be a mapping of names to values, got \[\]"),
    ],
)
def test_bad_mappings_are_refused(mapping, message):
    with pytest.raises(UserError, match=message):
        AttentionPattern.from_mapping(mapping, 4)


def test_a_window_that_looks_ahead_is_refused():
    with pytest.raises(UserError, match=r"\(3, 2\) does not end at the query"):
        AttentionPattern.from_megatron(
            SimpleNamespace(num_layers=2, window_size=(3, 2), window_attn_skip_freq=None, no_rope_freq=None)
        )


def test_unlimited_window_is_full_attention():
    config = _config(2, window_size=(-1, 0))
    assert AttentionPattern.from_megatron(config).windowed == (False, False)
    assert torch.equal(get_sliding_window_causal_mask(4, 4, (4, 0)), torch.ones(4, 4).triu(1).bool())


@given(patterns())
def test_round_trip_through_a_hugging_face_config(pattern):
    layers = len(pattern.rope)
    fields = pattern.to_hugging_face()
    assert AttentionPattern.from_hugging_face(fields, layers) == pattern
    # transformers' own reading of the same fields, and ours of what it writes
    config = SmolLM3Config(num_hidden_layers=layers, **fields)
    assert config.layer_types == fields["layer_types"] and config.no_rope_layers == fields["no_rope_layers"]
    assert AttentionPattern.from_hugging_face(json.loads(config.to_json_string(use_diff=False)), layers) == pattern


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"no_rope_layer_interval": 2},
        {"use_sliding_window": True, "sliding_window": 8},
        {"sliding_window": 8},
        {"no_rope_layers": [1, 0, 0, 1, 1, 0, 1, 1]},
    ],
)
def test_what_a_config_leaves_out_is_what_transformers_fills_in(fields):
    pattern = AttentionPattern.from_hugging_face(fields, 6)
    config = SmolLM3Config(num_hidden_layers=6, **fields)
    assert pattern.rope == tuple(map(bool, config.no_rope_layers[:6]))
    assert pattern.windowed == tuple(kind == "sliding_attention" for kind in config.layer_types)
    assert pattern.window == (config.sliding_window if any(pattern.windowed) else None)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types lists 1 layers, and the model has 2"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "unknown kind in layer_types 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window None, so that their window is unknown"),
        (
            {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
            "use_sliding_window False and sliding_window 4",
        ),
        ({"no_rope_layers": [1]}, "rope lists 1 layers, and the model has 2"),
    ],
)
def test_bad_hugging_face_configs_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        AttentionPattern.from_hugging_face(fields, 2)


@given(patterns(), st.data())
def test_round_trip_through_a_hybrids_numbering(pattern, data):
    others = st.text("M-E|", max_size=3)
    symbols = "*".join(data.draw(others) for _ in range(len(pattern.rope) + 1)) + data.draw(
        st.sampled_from(["", "/*M"])
    )
    assert attention_layers(symbols) == len(pattern.rope)
    laid = pattern.in_hybrid(symbols)
    assert laid.of_attention_layers(symbols) == pattern
    layers = get_hybrid_layers(symbols)
    assert len(laid.rope) == len(layers)
    config = SimpleNamespace(num_layers=len(layers), **laid.to_megatron())
    assert AttentionPattern.from_megatron(config) == laid
    for windowed, rope, symbol in zip(laid.windowed, laid.rope, layers, strict=True):
        assert symbol == "*" or (rope and not windowed)


def get_hybrid_layers(symbols: str) -> list[str]:
    """The main decoder's layers as Megatron parses them."""
    main = parse_hybrid_pattern(symbols).main_pattern
    return validate_segment_layers(main.replace("|", ""))


def test_a_hybrid_with_another_number_of_attention_layers_is_refused():
    pattern = AttentionPattern.from_mapping({"window": 4}, 2)
    with pytest.raises(UserError, match=r"'M\*M' has 1 attention layers \(\*\), and the attention of 2 is given"):
        pattern.in_hybrid("M*M")
    with pytest.raises(UserError, match="lists 2 layers, and the model has 3"):
        pattern.of_attention_layers("M*M")
    with pytest.raises(UserError, match="'M-' has no attention layer"):
        pattern.of_attention_layers("M-")


def test_booleans_in_no_rope_layers_are_refused() -> None:
    with pytest.raises(UserError, match=r"no_rope_layers \[True, False\]: write 1 for a layer with RoPE"):
        AttentionPattern.from_hugging_face({"no_rope_layers": [True, False]}, 2)
