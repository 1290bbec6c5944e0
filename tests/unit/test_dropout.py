"""The mathematics of dropout between norm and linear."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lengthgen.dropout.functional import Moments, merge_moments, moments, pre_linear_dropout, vpad
from megatron_lengthgen.dropout.masks import draw_keep_mask, quantize
from megatron_lengthgen.specs.statistics import batch_statistics

TOKENS = 100_000
# Mean and spread of each coordinate: centred, moderate, a massive activation, one far off, a tiny one.
MEANS = torch.tensor([0.0, 1.0, -3.0, 200.0, 50.0, 1e-3])
SPREADS = torch.tensor([1.0, 1.0, 1.0, 20.0, 0.5, 1e-3])

METHODS = {
    "pre_linear": lambda x, p, mask=None: pre_linear_dropout(x, p, mask=mask),
    "vpad zero": lambda x, p, mask=None: vpad(x, p, *_batch(x), mask=mask),
    "vpad mean": lambda x, p, mask=None: vpad(x, p, *_batch(x), fill="mean", mask=mask),
}


def _batch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = moments(x)
    return found.mean, found.variance


@pytest.fixture
def sample() -> torch.Tensor:
    torch.manual_seed(0)
    return MEANS + SPREADS * torch.randn(TOKENS, len(MEANS))


def _assert_moments(y: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> None:
    """Within six standard errors, from the sample's own fourth moment."""
    y = y.double()
    deviation = y - y.mean(0)
    error_of_mean = y.std(0) / math.sqrt(TOKENS)
    error_of_variance = (deviation.pow(4).mean(0) - y.var(0).square()).sqrt() / math.sqrt(TOKENS)
    assert ((y.mean(0) - mean.double()).abs() < 6 * error_of_mean).all()
    assert ((y.var(0) - variance.double()).abs() < 6 * error_of_variance).all()


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("fill", ["zero", "mean"])
def test_vpad_keeps_mean_and_variance_of_every_coordinate(sample, fill, p):
    mean, variance = _batch(sample)
    _assert_moments(vpad(sample, p, mean, variance, fill=fill), mean, variance)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_pre_linear_keeps_the_mean_and_inflates_the_variance_as_derived(sample, p):
    mean, variance = _batch(sample)
    q = 1 - p
    _assert_moments(pre_linear_dropout(sample, p), mean, variance / q + mean.square() * p / q)


def test_vpad_on_a_layer_norm_with_bias():
    """The statistics that the norm's parameters imply are right where its normalised coordinates are standard."""
    torch.manual_seed(1)
    norm = torch.nn.LayerNorm(512)
    with torch.no_grad():
        norm.weight.uniform_(0.2, 3)
        norm.bias.normal_(0, 4)
        x = norm(torch.randn(20_000, 512))
        y = vpad(x, 0.2, norm.bias, norm.weight.square())
    assert torch.allclose(y.mean(0), norm.bias, atol=6 * 3 / math.sqrt(20_000))
    assert torch.allclose(y.var(0), norm.weight.square(), rtol=0.12)


def test_fills_agree_where_the_mean_is_zero():
    torch.manual_seed(2)
    x, mask = torch.randn(64, 8), torch.rand(64, 8) > 0.3
    zero, one = torch.zeros(8), torch.ones(8)
    torch.testing.assert_close(
        vpad(x, 0.3, zero, one, mask=mask), vpad(x, 0.3, zero, one, fill="mean", mask=mask), rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pre_linear_equals_torch_dropout_with_its_mask(dtype):
    """Not in bfloat16, where PyTorch rounds 1/q to 8 bits before it multiplies, and so changes the mean."""
    x = torch.randn(128, 96, dtype=dtype) + 0.5
    x[x == 0] = 1
    torch.manual_seed(3)
    expected = F.dropout(x, 0.25, training=True)
    assert torch.equal(pre_linear_dropout(x, 0.25, mask=expected != 0), expected)


@pytest.mark.parametrize("name", METHODS)
def test_gradient_with_a_fixed_mask(name):
    torch.manual_seed(4)
    x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(6, 5) > 0.3
    mean, variance = _batch(x + torch.tensor([0.0, 1.0, 5.0, -2.0, 30.0], dtype=torch.float64))
    functions = {
        "pre_linear": lambda x: pre_linear_dropout(x, 0.3, mask=mask),
        "vpad zero": lambda x: vpad(x, 0.3, mean, variance, mask=mask),
        "vpad mean": lambda x: vpad(x, 0.3, mean, variance, fill="mean", mask=mask),
    }
    assert torch.autograd.gradcheck(functions[name], (x,))


@pytest.mark.parametrize("fill", ["zero", "mean"])
def test_statistics_are_constants_in_backward(fill):
    x = torch.randn(16, 4, requires_grad=True)
    mean, variance = x.mean(0), x.var(0)
    mask = torch.ones(16, 4, dtype=torch.bool)
    vpad(x, 0.2, mean, variance, fill=fill, mask=mask).sum().backward()
    scale = variance / (0.8 * (variance + 0.2 * mean.square())) if fill == "zero" else torch.full((4,), 1 / 0.8)
    torch.testing.assert_close(x.grad, scale.sqrt().detach().expand(16, 4))


@pytest.mark.parametrize("name", METHODS)
def test_low_precision_is_the_wide_result_rounded_once(name):
    torch.manual_seed(5)
    x = (torch.randn(64, 32) * 3 + torch.linspace(-300, 300, 32)).bfloat16()
    mask = torch.rand(64, 32) > 0.1
    low = METHODS[name](x.clone().requires_grad_(), 0.1, mask)
    assert low.dtype is torch.bfloat16
    assert torch.equal(low, METHODS[name](x.float(), 0.1, mask).bfloat16())


@pytest.mark.parametrize("name", METHODS)
def test_p_zero_is_the_identity(name):
    x = torch.randn(8, 4)
    assert METHODS[name](x, 0.0) is x


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5, float("nan"), True, "0.1", None])
def test_p_outside_its_range_is_refused_with_the_value(name, p):
    with pytest.raises(ValueError, match=rf"in \[0, 1\), got {p!r}"):
        METHODS[name](torch.randn(8, 4), p)


@pytest.mark.parametrize("fill", ["zero", "mean"])
def test_coordinate_without_spread_becomes_its_mean(fill):
    x = torch.randn(32, 3)
    mean, variance = torch.tensor([0.0, 2.0, -5.0]), torch.tensor([0.0, 0.0, 1.0])
    x[:, :2] = mean[:2]
    y = vpad(x, 0.4, mean, variance, fill=fill)
    assert torch.equal(y[:, :2], x[:, :2])
    assert not torch.equal(y[:, 2], x[:, 2])


def test_unknown_fill_and_wrong_masks_are_refused():
    x, one = torch.randn(4, 3), torch.ones(3)
    with pytest.raises(ValueError, match="'zero' or 'mean', got 'median'"):
        vpad(x, 0.1, one, one, fill="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\(4, 3\), got torch.bool of shape \(3, 4\)"):
        pre_linear_dropout(x, 0.1, mask=torch.ones(3, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"got torch.float32 of shape"):
        vpad(x, 0.1, one, one, mask=torch.ones(4, 3))


@pytest.mark.parametrize("name", METHODS)
def test_backward_keeps_one_byte_per_activation(name):
    x = torch.randn(256, 64).bfloat16().requires_grad_()
    kept: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        METHODS[name](x, 0.1)
    assert sum(kept) == x.numel()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_input_and_incoming_gradient_are_not_overwritten(name, dtype):
    x = torch.randn(16, 8).to(dtype).requires_grad_()
    grad = torch.randn(16, 8).to(dtype)
    before, grad_before = x.detach().clone(), grad.clone()
    METHODS[name](x, 0.5).backward(grad)
    assert torch.equal(x.detach(), before)
    assert torch.equal(grad, grad_before)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.9])
def test_mask_keeps_the_asked_share_independently(p):
    torch.manual_seed(6)
    mask = draw_keep_mask((999, 1001), p)
    assert mask.shape == (999, 1001)
    drop = (~mask).double().flatten()
    spread = math.sqrt(p * (1 - p))
    assert abs(drop.mean().item() - p) < 6 * spread / math.sqrt(drop.numel())
    standard = (drop - p) / spread
    for lag in (1, 2, 3, 4, 1001):
        correlation = (standard[lag:] * standard[:-lag]).mean().item()
        assert abs(correlation) < 6 / math.sqrt(drop.numel())


def test_mask_follows_the_seed_and_moves_on():
    torch.manual_seed(7)
    first, second = draw_keep_mask((5, 7), 0.5), draw_keep_mask((5, 7), 0.5)
    torch.manual_seed(7)
    assert torch.equal(draw_keep_mask((5, 7), 0.5), first)
    assert not torch.equal(first, second)


@given(st.floats(min_value=1e-9, max_value=1.0, exclude_max=True))
def test_quantized_p_is_near_and_never_all_or_nothing(p):
    assert 0 < quantize(p) < 1
    assert abs(quantize(p) - p) <= 1 / 65536


def test_moments_of_a_massive_coordinate_are_those_of_float64():
    torch.manual_seed(8)
    x = torch.randn(4096, 1, 3) * torch.tensor([1.0, 0.01, 1e-3]) + torch.tensor([0.0, 1000.0, -3000.0])
    found = moments(x)
    variance, mean = torch.var_mean(x.double(), dim=(0, 1), correction=0)
    assert found.tokens.item() == 4096
    torch.testing.assert_close(found.mean.double(), mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.variance.double(), variance, rtol=0.02, atol=0)
    assert found.mean.dtype is torch.float32


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=6), st.integers(0, 2**31))
def test_merged_moments_equal_those_of_the_whole(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randn(n, 4, generator=generator) * 2 + torch.tensor([0.0, 7, -90, 900]) for n in lengths]
    whole, merged = moments(torch.cat(parts)), merge_moments(moments(part) for part in parts)
    assert isinstance(merged, Moments)
    assert merged.tokens.item() == sum(lengths)
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(merged.variance, whole.variance, rtol=1e-3, atol=1e-4)


def test_moments_are_detached():
    x = torch.randn(8, 4, requires_grad=True)
    assert not any(part.requires_grad for part in moments(x))


def _statistics_of_a_rank(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    # Tokens split unevenly: 8 on the first rank, 12 on the second.
    part = torch.load(f"{folder}/x.pt").split([8, 12])[rank]
    torch.save(batch_statistics(part, dist.group.WORLD), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_batch_statistics_do_not_depend_on_how_tokens_are_split_over_ranks(tmp_path: Path):
    torch.manual_seed(9)
    x = torch.randn(20, 2, 16) * 3 + torch.linspace(-500, 500, 16)
    torch.save(x, tmp_path / "x.pt")
    torch.multiprocessing.spawn(_statistics_of_a_rank, args=(str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    for mine, other, whole in zip(first, second, batch_statistics(x, None), strict=True):
        assert torch.equal(mine, other)
        torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-5)
