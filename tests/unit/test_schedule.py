"""Token budgets against Megatron's own scheduler, and schedules that would not do what they say."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import config, schedule

STEP = 2 * 64
MODEL: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 64,
    "max_position_embeddings": 64,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 128,
    "mock_data": True,
    "micro_batch_size": 1,
    "global_batch_size": 2,
    "lr": 1e-3,
    "min_lr": 1e-4,
}


def parse(**values: Any) -> Any:
    return config.parse(config.resolve({**MODEL, **values}, {}))


def scheduler(args: Any) -> OptimizerParamScheduler:
    """As Megatron builds it for a run."""
    from megatron.training.training import get_optimizer_param_scheduler

    return get_optimizer_param_scheduler(SimpleNamespace(param_groups=[{}]))


def rates(args: Any, steps: list[int]) -> list[float]:
    """The learning rate after so many steps."""
    found, built, done = [], scheduler(args), 0
    for step in steps:
        built.step((step - done) * args.global_batch_size)
        done = step
        found.append(built.optimizer.param_groups[0]["lr"])
    return found


BUDGETS = {"train_tokens": 100 * STEP, "lr_warmup_tokens": 10 * STEP}


def test_budgets_become_whole_steps_rounded_up() -> None:
    values = {**MODEL, "train_tokens": 10 * STEP + 1, "lr_warmup_tokens": 1, "lr_decay_tokens": 5e3}
    steps = schedule.in_steps({**values, "lr_wsd_decay_tokens": 2.0 * STEP})
    assert {name: steps[name] for name in steps if name.endswith("_iters")} == {
        "train_iters": 11,
        "lr_warmup_iters": 1,
        "lr_decay_iters": math.ceil(5000 / STEP),
        "lr_wsd_decay_iters": 2,
    }
    assert not set(schedule.TOKEN_BUDGETS) & steps.keys()


def test_cosine() -> None:
    args = parse(**BUDGETS, lr_decay_style="cosine")
    assert rates(args, [0, 5, 10, 55, 100]) == pytest.approx([0, 5e-4, 1e-3, 5.5e-4, 1e-4])


def test_cosine_may_end_before_the_run() -> None:
    args = parse(**BUDGETS, lr_decay_style="cosine", lr_decay_tokens=50 * STEP)
    assert rates(args, [30, 50, 100]) == pytest.approx([5.5e-4, 1e-4, 1e-4])


def test_warm_up_stable_decay() -> None:
    args = parse(**BUDGETS, lr_decay_style="WSD", lr_wsd_decay_tokens=20 * STEP, lr_wsd_decay_style="linear")
    assert rates(args, [5, 10, 79, 80, 90, 100]) == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 5.5e-4, 1e-4])


def test_inverse_square_root() -> None:
    args = parse(**BUDGETS, lr_decay_style="inverse-square-root")
    assert rates(args, [5, 10, 40, 90]) == pytest.approx([5e-4, 1e-3, 5e-4, 1e-3 / 3])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"train_tokens": 1e4, "train_iters": 5}, "train_tokens and train_iters say the same thing twice"),
        ({"train_tokens": 1e4, "train_samples": 5}, "train_tokens and train_samples say the same thing twice"),
        (
            {"train_iters": 5, "lr_warmup_tokens": 1e3, "lr_warmup_fraction": 0.1},
            "lr_warmup_tokens and lr_warmup_fraction say",
        ),
        (
            {"train_samples": 50, "lr_warmup_tokens": 1e2},
            "lr_warmup_tokens counts tokens and train_samples counts samp",
        ),
        (
            {"train_tokens": 1e4, "rampup_batch_size": [1, 1, 10]},
            "train_tokens cannot be .* exactly under rampup_batch",
        ),
        ({"train_tokens": 1e4, "global_batch_size": None}, "train_tokens needs global_batch_size .* got None"),
        ({"train_tokens": "many"}, "train_tokens must be a number of 1 or more, such as 5e9, got 'many'"),
        ({}, "the run has no length: set train_tokens, train_iters or train_samples"),
        ({"train_tokens": 0}, "train_tokens must be a number of 1 or more, .* got 0"),
        ({"train_tokens": math.inf}, "train_tokens must be a number"),
        (
            {**BUDGETS, "lr_decay_style": "WSD"},
            "lr_decay_style WSD needs the length of its decay: set lr_wsd_decay_tok",
        ),
        (
            {**BUDGETS, "lr_decay_style": "WSD", "lr_wsd_decay_tokens": 91 * STEP},
            "a warm-up of 10 iters and a decay of 91, more than the 100 in all",
        ),
        (
            {"train_tokens": 1e4, "lr_decay_style": "inverse-square-root"},
            r"without a warm-up would start at lr 0.001 / sqrt\(2\)",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(**values)


def test_inverse_square_root_without_a_warm_up_would_start_low() -> None:
    """What the refusal says of Megatron."""
    args = parse(train_iters=100, lr_warmup_iters=1, lr_decay_style="inverse-square-root", global_batch_size=64)
    args.lr_warmup_iters = 0
    assert rates(args, [1]) == pytest.approx([1e-3 / 8])


def test_the_course_is_told_in_steps_and_tokens() -> None:
    args = parse(**BUDGETS, lr_decay_style="WSD", lr_wsd_decay_tokens=20 * STEP)
    assert schedule.describe(args) == (
        "learning rate: up from 0 over 10 steps (1,280 tokens), 0.001, WSD to 0.0001 at 100 steps (12,800 tokens), "
        "constant until the last 20 steps (2,560 tokens)"
    )
