"""Checkpoints of Transformer Engine's fused layers and of ours, loaded into each other."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from megatron.core import dist_checkpointing, optimizer
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import distrib_optimizer
from te_models import (
    CASES,
    Case,
    assert_equal,
    build,
    checkpoint_content,
    disturb,
    parameters,
    regularized,
    values,
)

from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.site import sites
from megatron_lengthgen.training import optimizer_state

_ON_TWO_RANKS = ("dense", "bias", "moe_grouped", "hybrid")


def build_ours(case: Case, seed: int, **fields: Any) -> Any:
    config = case.config(**fields)
    specs = regularized(case.specs(config), Regularization("vpad", p=0.1, sites=case.sites))
    return build(case, specs, config, seed=seed)


def build_stock(case: Case, seed: int, **fields: Any) -> Any:
    config = case.config(**fields)
    return build(case, case.specs(config), config, seed=seed)


def carry_over(source: Any, target: Any, path: Path) -> None:
    """Save and load as Megatron does, into a model that holds something else, but let no key go missing unnoticed."""
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(7)
    path.mkdir(exist_ok=True)
    dist_checkpointing.save({"model": source.sharded_state_dict()}, str(path))
    state, missing, unexpected = dist_checkpointing.load(
        {"model": target.sharded_state_dict()}, str(path), strict=StrictHandling.RETURN_ALL
    )
    assert (missing, unexpected) == (set(), set())
    target.load_state_dict(state["model"], strict=True)


def check_round_trip(stock: Any, ours: Any, out: Path) -> None:
    """Stock -> ours -> stock, with norms far from 1 and biases far from 0."""
    disturb(stock)
    expected = values(stock)
    carry_over(stock, ours, out / "stock")
    assert_equal(values(ours), expected)
    carry_over(ours, stock, out / "ours")
    assert_equal(values(stock), expected)
    assert list(sites(ours))


@pytest.mark.usefixtures("megatron_single")
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_goes_from_the_stock_model_to_ours_and_back(name: str, tmp_path: Path) -> None:
    check_round_trip(build_stock(CASES[name], 1), build_ours(CASES[name], 1), tmp_path)


# ------------------------------------------------------------------------ two tensor-parallel ranks


def ranks(out: Path) -> None:
    """What ``two_ranks.py`` runs."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(2)
    torch.cuda.is_available = lambda: True
    for name in _ON_TWO_RANKS:
        case, layout = CASES[name], {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        stock, ours = build_stock(case, 1, **layout), build_ours(case, 1, **layout)
        assert checkpoint_content(ours) == checkpoint_content(stock), name
        assert_equal(values(ours), values(stock))
        expected = parameters(stock)
        for key, parameter in parameters(ours).items():
            assert {"allreduce": True, **vars(parameter)} == {"allreduce": True, **vars(expected[key])}, (name, key)
            # Else the ranks' gradients of a norm, each of a part of the tokens, would not be summed. The norm inside a
            # Mamba mixer is split over the ranks instead.
            is_split = getattr(parameter, "tensor_model_parallel", False)
            assert "norm" not in key[0] or is_split or parameter.sequence_parallel, (name, key)
        (out / name).mkdir(exist_ok=True)
        check_round_trip(stock, ours, out / name)
        print(f"{name} is whole")
    dist.destroy_process_group()


def test_round_trip_on_two_tensor_parallel_ranks_with_sequence_parallelism(tmp_path: Path) -> None:
    from launch import torchrun

    output = torchrun(2, Path(__file__).with_name("two_ranks.py"), tmp_path)
    for name in _ON_TWO_RANKS:
        assert output.count(f"{name} is whole") == 2


# ------------------------------------------------------------------------------- optimizer state


@contextlib.contextmanager
def adam_of_pytorch() -> Iterator[None]:
    """Transformer Engine's FusedAdam runs on CUDA alone; what is tested here does not depend on who computes Adam."""
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=False),
        mock.patch.multiple(distrib_optimizer, HAVE_APEX_OR_TE=False, USING_TE_OPTIMIZER=False),
        mock.patch.multiple(optimizer, Adam=torch.optim.AdamW, USING_PYTORCH_OPTIMIZER=True),
    ):
        yield


def with_optimizer(model: Any) -> tuple[Any, Any]:
    wrapped = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=True), model
    )
    config = optimizer.OptimizerConfig(lr=1e-2, use_distributed_optimizer=True)
    return wrapped, optimizer.get_megatron_optimizer(config, [wrapped])


def moments(model: Any, adam: Any) -> dict[tuple[Any, ...], torch.Tensor]:
    """Adam's moments by the parameters' keys in a checkpoint."""
    found = {}
    for key, parameter in parameters(model).items():
        for part in adam.chained_optimizers:
            if parameter in part.model_param_group_index_map:
                state = part._get_main_param_and_optimizer_states(parameter)
                found |= {(name, *key): state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    return found


def training_state(model: Any, adam: Any, sharding: str, **more: Any) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "distrib_optim_sharding_type": sharding,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    state = {"model": model.sharded_state_dict(metadata=metadata)}
    return {**state, "optimizer": adam.sharded_state_dict(state, metadata=metadata, **more)}


def carry_over_training(case: Case, sharding: str, path: Path, build_target: Any = build_ours) -> tuple[Any, Any]:
    """Weights and moments of a stock model that has done two steps, and what the target has of them."""
    stock, target = build_stock(case, 1), build_target(case, 2)
    with adam_of_pytorch():
        (wrapped, adam), (_, target_adam) = with_optimizer(stock), with_optimizer(target)
        for _ in range(2):
            for parameter in wrapped.parameters():
                parameter.main_grad.normal_()
            # Not adam.step(), which also takes the gradients' norm, by a kernel of Transformer Engine's.
            adam.prepare_grads()
            adam.step_with_ready_grads()
        dist_checkpointing.save(training_state(stock, adam, sharding), str(path))
        state = dist_checkpointing.load(training_state(target, target_adam, sharding, is_loading=True), str(path))
        target.load_state_dict(state["model"], strict=True)
        target_adam.load_state_dict(state["optimizer"])
    return {**values(stock), **moments(stock, adam)}, {**values(target), **moments(target, target_adam)}


@pytest.mark.usefixtures("megatron_single")
@pytest.mark.parametrize("name", ["dense", "moe_grouped", "hybrid"])
def test_optimizer_state_in_the_fully_reshardable_format_goes_to_our_model(name: str, tmp_path: Path) -> None:
    expected, found = carry_over_training(CASES[name], "fully_reshardable", tmp_path)
    assert len(expected) == 3 * sum("exp_avg" in key for key in expected)
    assert_equal(found, expected)


@pytest.mark.usefixtures("megatron_single")
@pytest.mark.parametrize(
    ("name", "site", "moves"),
    [
        ("dense", "attention", True),
        ("dense", "mlp", False),
        ("bias", "mlp", False),
        ("hybrid", "attention", True),
        ("hybrid", "mamba", True),
        ("hybrid", "mlp", False),
    ],
)
def test_which_norms_change_the_order_of_parameters(name: str, site: str, moves: bool) -> None:
    """What ``training/optimizer_state.py`` takes for granted."""
    case = dataclasses.replace(CASES[name], sites=(site,))

    def order(model: Any) -> list[tuple[str, ...]]:
        keys = {id(parameter): key for key, parameter in parameters(model).items()}
        return [keys[id(parameter)] for parameter in model.parameters()]

    stock, ours = order(build_stock(case, 1)), order(build_ours(case, 1))
    assert sorted(ours) == sorted(stock)
    assert (ours != stock) == moves == (site in optimizer_state.MOVING)


@pytest.mark.usefixtures("megatron_single")
def test_optimizer_state_by_position_does_not_which_is_why_it_is_refused(tmp_path: Path) -> None:
    """Megatron says nothing: our norms come before their layer's linears, those of fused layers between them. The
    state holds Megatron's main parameters too, so that weights go astray as well as moments."""
    (tmp_path / "stock").mkdir()
    (tmp_path / "ours").mkdir()
    expected, found = carry_over_training(CASES["dense"], "dp_reshardable", tmp_path / "stock", build_stock)
    assert_equal(found, expected)
    expected, found = carry_over_training(CASES["dense"], "dp_reshardable", tmp_path / "ours")
    wrong = {name for name, tensor in expected.items() if not torch.equal(found[name], tensor)}
    print(sorted(wrong))
    print(sorted(expected.keys() - wrong))
    assert any("linear_qkv" in name for key in wrong for name in key)
