"""A stage of training that begins with another run's weights, and with nothing else of it."""

from pathlib import Path

import pytest
from launch import losses, scalars, torchrun

HERE = Path(__file__).parent
STEP = 4 * 64


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("stages")
    stage = (
        f"train_iters=null,train_tokens={4 * STEP},lr_warmup_tokens={2 * STEP},"
        f"lr_decay_style=WSD,lr_wsd_decay_tokens={STEP},lr_wsd_decay_style=linear,min_lr=1e-3"
    )
    torchrun(
        1,
        HERE / "train_layouts.py",
        HERE / "tiny.yaml",
        out,
        "first:train_iters=6",
        "weights:train_iters=6,no_save_optim=true,no_save_rng=true",
        f"second:pretrained_checkpoint={out / 'first'},{stage}",
        f"from_weights:pretrained_checkpoint={out / 'weights'},{stage}",
    )
    return out


def test_it_counts_from_zero_and_warms_up_again(out: Path) -> None:
    rates = scalars(out / "second", "learning-rate")
    assert rates == pytest.approx({1: 5e-3, 2: 1e-2, 3: 1e-2, 4: 1e-3}, rel=1e-5)


def test_adams_moments_stay_behind(out: Path) -> None:
    assert losses(out / "second") == losses(out / "from_weights")
    assert losses(out / "second")[0] < 0.95 * losses(out / "first")[0]
