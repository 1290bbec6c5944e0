"""Models whose norms run the kernel against the same on the plain path; ``test_fused.py`` runs it, interpreted."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import spec_models
import torch
from spec_models import assert_same, build, logits, make_config, sharded_keys, stock_block, train_step

from megatron_lengthgen.dropout import fused
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import fused_norm, step_key
from megatron_lengthgen.specs.binding import bind
from megatron_lengthgen.specs.fused_norm import SWITCH, FusedNorm
from megatron_lengthgen.specs.site import AfterNorm, sites
from megatron_lengthgen.specs.substitution import apply

pytestmark = pytest.mark.usefixtures("megatron_single")
SITES = ("attention", "mlp", "output", "linear_fc2")
BEHIND_NORMS = 2 + 1


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter takes milliseconds for each."""
    whole = spec_models.batch()
    monkeypatch.setattr(spec_models, "batch", lambda: tuple(tensor[:, :2] for tensor in whole))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The shape of what each launch of the kernel was given."""
    seen: list[Any] = []
    real = fused.norm_dropout
    monkeypatch.setattr(fused, "norm_dropout", lambda x, *a, **k: (seen.append(tuple(x.shape)), real(x, *a, **k))[1])
    yield seen


def make_model(monkeypatch: Any, kernel: str, is_bound: bool = True, fields: Any = None, **choices: Any) -> Any:
    monkeypatch.setenv(SWITCH, kernel)
    config = make_config(num_layers=1, **(fields or {}))
    regularization = Regularization(**{"placement": "vpad", "p": 0.3, "sites": SITES, **choices})
    model = build(apply(stock_block(config), regularization), config).train()
    if is_bound:
        bind([model], seed=3, step=lambda: 4, microbatches=lambda: 1)
    return model


def assert_near(a: Any, b: Any) -> None:
    torch.testing.assert_close(a[0], b[0], rtol=1e-5, atol=1e-6)
    assert a[1].keys() == b[1].keys()
    for name, grad in a[1].items():
        error = (grad - b[1][name]).norm() / b[1][name].norm().clamp(min=1e-12)
        assert error < 1e-4, f"{name}: {error}"


@pytest.mark.parametrize(
    ("normalization", "choices"),
    [
        ("RMSNorm", {"placement": "pre_linear"}),
        ("LayerNorm", {"statistics": "norm", "sites": SITES[:3]}),
        ("RMSNorm", {"statistics": "batch"}),
        ("LayerNorm", {"statistics": "batch", "fill": "mean"}),
    ],
)
def test_a_step_is_that_of_the_plain_path(monkeypatch, megatron_single, calls, normalization, choices):
    fields = {"normalization": normalization}
    plain, model = (make_model(monkeypatch, kernel, fields=fields, **choices) for kernel in ("plain", "fused"))
    expected = train_step(plain, megatron_single)
    assert calls == []
    found = train_step(model, megatron_single)
    assert calls == [(2, 2, 48)] * BEHIND_NORMS
    assert_near(found, expected)
    # It is no accident that they are near: masks of another seed give another step.
    bind([plain], seed=4, step=lambda: 4, microbatches=lambda: 1)
    assert not torch.allclose(train_step(plain, megatron_single)[0], expected[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("recompute", "repeated"),
    [
        ({"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}, 2),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, 0),
    ],
)
def test_recomputation_changes_nothing(monkeypatch, megatron_single, calls, recompute, repeated):
    # Without biases, which as a checkpoint's outputs send its backward round in circles.
    stored, again = (
        make_model(monkeypatch, "fused", fields={"add_bias_linear": False, **fields}) for fields in ({}, recompute)
    )
    expected = train_step(stored, megatron_single)
    assert_same(train_step(again, megatron_single), expected)
    assert len(calls) == 2 * BEHIND_NORMS + repeated


def test_evaluation_is_the_stock_models_bit_for_bit(monkeypatch, calls):
    model = make_model(monkeypatch, "fused").eval()
    config = make_config(num_layers=1)
    assert torch.equal(logits(model), logits(build(stock_block(config), config).eval()))
    assert calls == []


def test_a_model_that_is_not_bound_draws_on_the_plain_path(monkeypatch, megatron_single, calls):
    plain, model = (make_model(monkeypatch, kernel, is_bound=False) for kernel in ("plain", "fused"))
    assert_same(train_step(model, megatron_single), train_step(plain, megatron_single))
    assert calls == []


def test_before_the_start_of_a_schedule_the_norms_are_stock(monkeypatch, megatron_single, calls):
    plain, model = (make_model(monkeypatch, kernel, start_step=10) for kernel in ("plain", "fused"))
    assert_same(train_step(model, megatron_single), train_step(plain, megatron_single))
    assert calls == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_than_the_weights_is_left_to_the_stock_norm(monkeypatch, calls, dtype):
    norm = make_model(monkeypatch, "fused").decoder.layers[0].input_layernorm
    x = torch.randn(2, 2, 48)
    step_key.write(step_key.StepKey(1, 2, 3))
    try:
        near, far = norm(x.to(dtype)), norm(x)
    finally:
        step_key.clear()
    assert calls == [(2, 2, 48)]
    torch.testing.assert_close(near.double(), far.double(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("kernel", ["plain", "fused"])
def test_names_classes_and_checkpoint_keys_are_the_stock_models(monkeypatch, kernel):
    config = make_config(num_layers=1)
    stock, model = build(stock_block(config), config), make_model(monkeypatch, kernel)
    assert sharded_keys(model) == sharded_keys(stock)
    assert [(name, type(m)) for name, m in model.named_modules()] == [(n, type(m)) for n, m in stock.named_modules()]
    assert model.state_dict().keys() == stock.state_dict().keys()


def test_sites_are_found_and_a_copied_norm_has_its_own(monkeypatch):
    found = list(sites(make_model(monkeypatch, "fused")))
    assert len(found) == BEHIND_NORMS + 1
    for name, module, dropout in found:
        if "norm" not in name:
            continue
        assert not any(isinstance(hook, AfterNorm) for hook in module._forward_hooks.values())
        twin = copy.deepcopy(module)
        ((_, same, copied),) = sites(twin)
        assert same is twin
        assert copied is not dropout
        assert isinstance(twin.forward, FusedNorm)
        assert twin.forward.norm is twin


def test_the_interpreter_is_not_chosen_by_itself(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    model = make_model(monkeypatch, "auto")
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert "PyTorch" in fused_norm.describe()
    monkeypatch.setenv(SWITCH, "fused")
    assert "Triton" in fused_norm.describe()
