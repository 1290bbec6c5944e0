"""What weight decay acts on, against the groups that Megatron's optimizer makes."""

from typing import Any

import pytest
from megatron.core.optimizer import _get_param_groups
from megatron.training.training import get_megatron_optimizer_config

from megatron_lengthgen.models import build
from megatron_lengthgen.training import config, decay, run

pytestmark = pytest.mark.usefixtures("megatron_single")
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 64,
    "padded_vocab_size": 64,
    "mock_data": True,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "train_iters": 5,
    "lr": 1e-3,
}


def parse(**values: Any) -> Any:
    return config.parse(config.resolve({**MODEL, **values}, {}))


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"untie_embeddings_and_output_weights": True, "position_embedding_type": "rope"},
        {"qk_layernorm": True, "apply_wd_to_qk_layernorm": True, "normalization": "RMSNorm"},
        {"num_experts": 2, "disable_bias_linear": True},
        {"num_layers": None, "hybrid_layer_pattern": "*-*-", "position_embedding_type": "rope"},
    ],
)
def test_the_groups_are_those_of_megatrons_optimizer(values: dict[str, Any]) -> None:
    args = parse(**values)
    models = build.build_model(args)
    counts = decay.count(args, models)
    groups = {"decayed": 0, "kept": 0}
    for group in _get_param_groups(models, *get_megatron_optimizer_config(args)):
        groups["decayed" if group["wd_mult"] else "kept"] += sum(one.numel() for one in group["params"])
    assert {side: sum(kinds.values()) for side, kinds in counts.items()} == groups
    assert sum(groups.values()) == sum(one.numel() for model in models for one in model.parameters())


def test_a_run_decays_nothing_unless_it_says_so() -> None:
    assert parse().weight_decay == parse().end_weight_decay == 0
    assert parse(weight_decay=0.1).weight_decay == 0.1


def test_the_line() -> None:
    args = parse(weight_decay=0.1)
    counts = decay.count(args, build.build_model(args))
    matrices, embeddings = 2 * (32 * 96 + 32 * 32 + 2 * 32 * 64), (64 + 16) * 32
    norms, biases = 5 * 2 * 32, 2 * (96 + 32 + 64 + 32)
    # Another rank that only holds copies.
    assert decay.describe(args, [counts, {"decayed": {}, "kept": {}}]) == (
        f"weight decay: 0.1, on {matrices + embeddings:,} parameters (weight matrices {matrices:,}, embeddings "
        f"{embeddings:,}); never on {norms + biases:,} parameters (biases {biases}, norms {norms})"
    )
    assert decay.describe(parse(), [counts]).startswith(
        "weight decay: 0, on nothing; another value would act on 18,944 p"
    )


def test_a_dry_run_says_what_the_stage_is(capsys: pytest.CaptureFixture[str]) -> None:
    budgets = {"train_iters": None, "train_tokens": 100, "lr_warmup_tokens": 16}
    run.dry_run(config.resolve({**MODEL, **budgets, "weight_decay": 0.1, "position_embedding_type": "rope"}, {}))
    lines = capsys.readouterr().out.splitlines()
    assert "training: 7 steps, 112 tokens" in lines
    assert "data: mock data" in lines
    assert "learning rate: up from 0 over 1 steps (16 tokens), 0.001, linear to 0 at 7 steps (112 tokens)" in lines
    assert any(line.startswith("weight decay: 0.1, on 18,432 parameters (weight matrices 16,384, ") for line in lines)
