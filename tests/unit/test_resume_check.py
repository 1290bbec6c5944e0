"""What a checkpoint records of its run's dropout, and which resumes are refused for it.

Run under torchrun, this file is a training run on two processes, a resume of it that must be refused, and a hybrid run.
"""

import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_lengthgen import backends

backends.prepare()

from megatron_lengthgen.dropout.masks import MASK_VERSION  # noqa: E402
from megatron_lengthgen.errors import UserError  # noqa: E402
from megatron_lengthgen.regularization import Regularization  # noqa: E402
from megatron_lengthgen.training import config, resume  # noqa: E402

SITES = ["attention", "mlp", "mamba"]
CONF = Path(__file__).parents[1] / "parallel" / "tiny.yaml"


def run_args(regularization: Regularization, **fields: Any) -> Namespace:
    """Arguments as of this package's trainer."""
    section = resume.record({**regularization.to_dict(), "core_attention": "sdpa"})
    return stock_args(**{"lengthgen": section, **fields})


def stock_args(**fields: Any) -> Namespace:
    """Arguments as of stock Megatron."""
    new = {"load": None, "finetune": False, "pretrained_checkpoint": None, "ckpt_step": None, "iteration": 500}
    optimizer = {"use_distributed_optimizer": False, "no_load_optim": False}
    return Namespace(**{**new, **optimizer, "seed": 1234, "hidden_dropout": 0.0, "spec": None, **fields})


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``check(stored, args)``: resume a checkpoint at step 500 whose arguments are ``stored``."""

    def check(stored: Namespace, args: Namespace, tracker: str | None = "500") -> int:
        def stored_args(path: Path) -> Namespace:
            read.append(path)
            return stored

        monkeypatch.setattr(resume, "checkpoint_args", stored_args)
        if tracker is not None:
            (tmp_path / "latest_checkpointed_iteration.txt").write_text(tracker)
        args.load = str(tmp_path)
        return resume.check_resume(args)

    read: list[Path] = []
    check.read = read
    return check


def vpad(**fields: Any) -> Regularization:
    return Regularization(**{"placement": "vpad", "p": 0.1, **fields})


@pytest.mark.parametrize(
    "regularization",
    [Regularization("none", p=0.1), Regularization("pre_norm", p=0.1), vpad(), vpad(start_step=10, ramp_steps=5)],
)
def test_the_same_run_goes_on(check, regularization: Regularization) -> None:
    assert check(run_args(regularization), run_args(regularization)) == 500


@pytest.mark.parametrize(
    ("changed", "key", "old", "new"),
    [
        ({"placement": "pre_linear"}, "placement", "vpad", "pre_linear"),
        ({"placement": "none"}, "placement", "vpad", "none"),
        ({"placement": "pre_norm"}, "placement", "vpad", "pre_norm"),
        ({"p": 0.2}, "p", "0.1", "0.2"),
        ({"p": 0.0}, "p", "0.1", "0.0"),
        ({"fill": "mean"}, "fill", "zero", "mean"),
        ({"statistics": "norm"}, "statistics", "batch", "norm"),
        ({"sites": ("mlp",)}, "sites", "[attention, mlp, mamba]", "[mlp]"),
        ({"start_step": 10}, "start_step", "0", "10"),
        ({"start_step": 500}, "start_step", "0", "500"),
        ({"ramp_steps": 10}, "ramp_steps", "0", "10"),
    ],
)
def test_a_change_is_refused_with_both_values(check, changed: dict[str, Any], key: str, old: str, new: str) -> None:
    with pytest.raises(UserError) as refused:
        check(run_args(vpad()), run_args(vpad(**changed)))
    message = str(refused.value)
    assert f"did its 500 steps with lengthgen.{key}: {old}, and would go on with lengthgen.{key}: {new}: " in message
    assert "write the old value, or start a new run from its weights with pretrained_checkpoint" in message


def test_all_changes_are_named_at_once(check) -> None:
    with pytest.raises(UserError) as refused:
        check(run_args(vpad()), run_args(vpad(p=0.2, fill="mean"), seed=1))
    assert "lengthgen.p: 0.1, lengthgen.fill: zero, seed: 1234, and would go on" in str(refused.value)
    assert "lengthgen.p: 0.2, lengthgen.fill: mean, seed: 1: write the old values" in str(refused.value)


@pytest.mark.parametrize("version", [None, MASK_VERSION + 1])
def test_masks_of_another_version_are_refused(check, version: int | None) -> None:
    stored = run_args(vpad())
    stored.lengthgen["mask_version"] = version
    message = rf"mask_version: {version}, .* mask_version: {MASK_VERSION}: use the release .* that wrote it, or start"
    with pytest.raises(UserError, match=message.replace(" mask", r" lengthgen\.mask")):
        check(stored, run_args(vpad()))


def test_values_without_effect_do_not_count(check) -> None:
    quiet = {"fill": "mean", "statistics": "norm", "p": 0.3}
    assert check(run_args(Regularization("none", p=0.1)), run_args(Regularization("none", **quiet), seed=1)) == 500
    changed = run_args(Regularization("pre_linear", p=0.1, fill="mean"))
    assert check(run_args(Regularization("pre_linear", p=0.1)), changed) == 500
    assert check(run_args(vpad()), run_args(vpad(sites=("mamba", "mlp", "attention")))) == 500


def test_dropout_may_begin_where_a_run_without_any_stopped(check) -> None:
    without = run_args(Regularization("none"))
    assert check(without, run_args(vpad(start_step=500), seed=1)) == 500
    assert check(without, run_args(vpad(p=0.0))) == 500
    with pytest.raises(UserError, match=r"placement: none, .* let the dropout begin now with .*start_step: 500, or"):
        check(without, run_args(vpad(start_step=499)))
    with pytest.raises(UserError, match="placement: none") as refused:
        check(without, run_args(Regularization("pre_norm", p=0.1)))
    assert "start_step" not in str(refused.value)


def test_a_checkpoint_of_stock_megatron_had_megatrons_dropout(check) -> None:
    assert check(stock_args(), run_args(Regularization("none"))) == 500
    assert check(stock_args(), run_args(vpad(start_step=600))) == 500
    assert check(stock_args(hidden_dropout=0.1), run_args(Regularization("pre_norm", p=0.1))) == 500
    with pytest.raises(UserError, match=r"placement: none, .*placement: vpad"):
        check(stock_args(), run_args(vpad()))
    with pytest.raises(UserError, match=r"placement: pre_norm, .*placement: vpad"):
        check(stock_args(hidden_dropout=0.1), run_args(vpad()))
    with pytest.raises(UserError, match=r"--spec somebody\.specs one and left no record"):
        check(stock_args(spec=["somebody.specs", "one"]), run_args(Regularization("none")))


@pytest.mark.parametrize(
    ("fields", "tracker"),
    [({"finetune": True}, "500"), ({}, "release"), ({}, None), ({"pretrained_checkpoint": "/elsewhere"}, None)],
)
def test_a_new_run_may_do_as_it_likes(check, fields: dict[str, Any], tracker: str | None) -> None:
    assert check(run_args(vpad()), run_args(vpad(p=0.5), **fields), tracker) == 0
    assert check.read == []


def test_a_run_that_is_under_way_is_resumed_whatever_it_started_from(check, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        check(run_args(vpad()), run_args(vpad(p=0.5), pretrained_checkpoint="/elsewhere"))
    assert check.read == [tmp_path]
    check(run_args(vpad()), run_args(vpad(), ckpt_step=20))
    assert check.read[-1] == tmp_path / "iter_0000020"


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    from launch import torchrun

    out = tmp_path_factory.mktemp("resume")
    return out, torchrun(2, Path(__file__), out)


def test_the_record_is_complete_in_a_real_checkpoint(launched: tuple[Path, str]) -> None:
    from megatron_lengthgen.checkpoint.info import describe

    assert describe(launched[0] / "run")["lengthgen"] == {
        "placement": "vpad",
        "p": 0.1,
        "fill": "zero",
        "statistics": "batch",
        "sites": SITES,
        "start_step": 1,
        "ramp_steps": 0,
        "core_attention": "sdpa",
        "attention": yaml.safe_load(CONF.read_text())["lengthgen"]["attention"],
        "mask_version": MASK_VERSION,
    }


def test_every_rank_refuses_before_anything_is_set_up(launched: tuple[Path, str]) -> None:
    out, output = launched
    refused = f"the run in {out / 'run'} did its 2 steps with lengthgen.p: 0.1, and would go on with lengthgen.p: 0.2: "
    for rank in (0, 1):
        assert f"rank {rank}, nothing set up: {refused}" in output


def test_a_hybrid_checkpoint_of_two_stages_loads_on_any_tensor_size(launched: tuple[Path, str]) -> None:
    # Ranks share the output, and two may end up on one line.
    losses = re.findall(r"hybrid loss at (\d), rank \d: (\d\.\d{8})", launched[1])
    assert sorted(size for size, _ in losses) == ["1", "1", "2", "2"]
    whole, split = (float(loss) for _, loss in sorted(losses)[::2])
    assert whole == pytest.approx(split, rel=1e-5)


def _main(out: Path) -> None:
    import torch
    from megatron.core import parallel_state
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    from megatron_lengthgen.checkpoint.load import load_model
    from megatron_lengthgen.training.run import train

    rank = os.environ["RANK"]
    steps = ["train_iters=2", "lengthgen.placement=vpad"]
    run = [*steps, f"save={out / 'run'}", "lengthgen.start_step=1"]
    train(config.load(CONF, run))
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
    try:
        train(config.load(CONF, [*run, "lengthgen.p=0.2"]))
    except UserError as error:
        built = parallel_state.model_parallel_is_initialized()
        print(f"rank {rank}, {'too late' if built else 'nothing set up'}: {error}", flush=True)
    pattern = "lengthgen.attention={window: 16, pattern: [W, F]}"
    stages = ["num_layers=null", "hybrid_layer_pattern='*-|*-'", "pipeline_model_parallel_size=2"]
    train(config.load(CONF, [*steps, f"save={out / 'hybrid'}", *stages, pattern]))
    parallel_state.destroy_model_parallel()
    destroy_rerun_state_machine()
    tokens = torch.arange(64).view(1, 64)
    for size in (1, 2):
        model, _ = load_model(out / "hybrid", tensor_parallel=size, dtype="fp32")
        with torch.no_grad():
            loss = model(tokens, tokens, None, labels=tokens).mean().item()
        print(f"hybrid loss at {size}, rank {rank}: {loss:.8f}", flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
