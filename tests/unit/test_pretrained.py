"""A run is held against the checkpoint that it starts from."""

from types import SimpleNamespace
from typing import Any

import pytest

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import pretrained

WINDOWS: dict[str, Any] = {
    "window_size": (511, 0),
    "window_attn_skip_freq": [1, 1, 1, 0],
    "no_rope_freq": [0, 0, 0, 1],
}


def model(**changes: Any) -> SimpleNamespace:
    values = {
        "num_layers": 4,
        "hybrid_layer_pattern": None,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "group_query_attention": True,
        "num_query_groups": 2,
        "kv_channels": 16,
        "padded_vocab_size": 128,
        "num_experts": None,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "untie_embeddings_and_output_weights": True,
        "rotary_base": 10000,
        "window_size": None,
        "window_attn_skip_freq": None,
        "no_rope_freq": None,
        "pretrained_checkpoint": "start",
        "lengthgen": {},
    }
    return SimpleNamespace(**{**values, **changes})


@pytest.fixture
def check(monkeypatch):
    def check(run: SimpleNamespace, **checkpoint: Any) -> str | None:
        monkeypatch.setattr(pretrained, "checkpoint_args", lambda path: model(**checkpoint))
        return pretrained.check_pretrained(run)

    return check


def test_the_same_model_says_nothing(check) -> None:
    assert check(model()) is None
    assert check(model(**WINDOWS, lengthgen={"attention": {"window": 512}}), **WINDOWS) is None
    assert check(model(rotary_base=500000)) is None
    assert check(model(pretrained_checkpoint=None), hidden_size=32) is None
    assert check(model(padded_vocab_size=None)) is None
    # Without grouped queries Megatron leaves any number there.
    assert check(model(group_query_attention=False, num_query_groups=1), group_query_attention=False) is None
    assert check(model(hybrid_layer_pattern="*-|*-"), hybrid_layer_pattern="*-*-") is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 32}, r"start has hidden_size 32, and this run 64: write the checkpoint's values"),
        ({"num_attention_heads": 8, "kv_channels": 8}, "has num_attention_heads 8, and this run 4"),
        ({"hybrid_layer_pattern": "*-*-"}, r"has hybrid_layer_pattern \*-\*-, and this run"),
        ({"swiglu": False}, "has swiglu False, and this run True"),
    ],
)
def test_another_model_is_refused(check, changes, message) -> None:
    with pytest.raises(UserError, match=message):
        check(model(), **changes)


def test_windows_are_not_lost_in_silence(check) -> None:
    message = (
        r"has windows of 512 tokens in 3 of 4 layers, no RoPE in 1 of 4, and this run says nothing .*"
        r"write lengthgen.attention: {window: 512, pattern: WWWF, rope: windowed}, or {pattern: F}"
    )
    with pytest.raises(UserError, match=message):
        check(model(), **WINDOWS)
    remark = check(model(lengthgen={"attention": {"pattern": "F"}}), **WINDOWS)
    assert remark is not None and remark.startswith("attention: full attention, RoPE in every layer; the pretrained")


def test_windows_that_a_run_adds_are_said(check) -> None:
    remark = check(model(**WINDOWS))
    assert remark == (
        "attention: windows of 512 tokens in 3 of 4 layers, no RoPE in 1 of 4; the pretrained checkpoint has full "
        "attention, RoPE in every layer"
    )


def test_what_an_older_checkpoint_does_not_say_is_not_held_against_it(check, monkeypatch) -> None:
    stored = model()
    del stored.num_experts
    monkeypatch.setattr(pretrained, "checkpoint_args", lambda path: stored)
    assert pretrained.check_pretrained(model()) is None
