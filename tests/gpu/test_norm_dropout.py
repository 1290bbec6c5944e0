"""The kernel of norm and dropout against PyTorch in float64 and the masks of the plain path, on a GPU.

Without one the same tests run in Triton's interpreter, in a process of their own: ``tests/unit/test_fused.py``.
"""

import functools
import hashlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

triton = pytest.importorskip("triton")
if not (torch.cuda.is_available() or triton.knobs.runtime.interpret):
    pytest.skip("needs a CUDA device", allow_module_level=True)

from megatron_lengthgen.dropout.functional import pre_linear_dropout, vpad  # noqa: E402
from megatron_lengthgen.dropout.fused import (  # noqa: E402
    IS_INTERPRETED,
    Norm,
    key_tensor,
    norm_dropout,
    norm_moments,
)
from megatron_lengthgen.dropout.masks import MaskCoordinates, counter_keep_mask, quantize  # noqa: E402
from megatron_lengthgen.dropout.moments import moments  # noqa: E402

DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
WHERE = MaskCoordinates(key=2**64 - 3, stream=2**31 + 5, positions=((7, 1), (100, 1)), sample=3)
ROWS = (2, 2)
# Relative error of one rounding, by norm. The interpreter rounds to bf16 towards zero, compiled code to nearest.
DTYPES = {torch.float32: 3e-6, torch.bfloat16: 2**-7 if IS_INTERPRETED else 2**-8, torch.float16: 2**-11}
# (placement, fill, statistics)
MODES = {
    "none": ("pre_linear", "zero", "norm"),
    "pre_linear": ("pre_linear", "zero", "norm"),
    "zero, norm": ("vpad", "zero", "norm"),
    "mean, norm": ("vpad", "mean", "norm"),
    "zero, batch": ("vpad", "zero", "batch"),
    "mean, batch": ("vpad", "mean", "batch"),
}
NORMS = list(itertools.product((False, True), (False, True)))  # centred, zero_centred


def random(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0, mean: float = 0.0) -> Tensor:
    """Fresh numbers: pytest shows no seed, for none is needed."""
    return (torch.randn(*shape, device=DEVICE) * scale + mean).to(dtype)


def make_norm(hidden: int, centred: bool, zero_centred: bool, dtype: torch.dtype = torch.float32) -> Norm:
    weight = random(hidden, dtype=dtype, scale=0.4, mean=0.0 if zero_centred else 1.0).requires_grad_()
    bias = random(hidden, dtype=dtype, scale=0.5).requires_grad_() if centred else None
    return Norm(weight, bias, 1e-5, centred, zero_centred)


def float64_norm(x: Tensor, norm: Norm, weight: Tensor, bias: Tensor | None) -> Tensor:
    gain = weight + 1.0 if norm.zero_centred else weight
    if norm.centred:
        return F.layer_norm(x, x.shape[-1:], gain, bias, norm.eps)
    return F.rms_norm(x, x.shape[-1:], gain, norm.eps)


def reference(x: Tensor, norm: Norm, mode: str, p: float, where: MaskCoordinates, dy: Tensor) -> list[Tensor]:
    """Output and gradients in float64, by PyTorch's norm and the plain path's dropout."""
    placement, fill, statistics = MODES[mode]
    tensors = [t.detach().double().requires_grad_() for t in (x, norm.weight, norm.bias) if t is not None]
    wide, weight = tensors[:2]
    bias = tensors[2] if norm.bias is not None else None
    z = float64_norm(wide, norm, weight, bias)
    y = z
    if mode != "none":
        mask = counter_keep_mask(x.shape, p, where, DEVICE)
        if placement == "pre_linear":
            y = pre_linear_dropout(z, quantize(p), mask=mask)
        else:
            rows = z.detach().flatten(0, 1)
            gain = weight.detach() + (1.0 if norm.zero_centred else 0.0)
            mean, variance = rows.mean(0), rows.var(0, correction=0)
            if statistics == "norm":
                mean, variance = torch.zeros_like(gain) if bias is None else bias.detach(), gain.square()
            y = vpad(z, quantize(p), mean, variance, fill=fill, mask=mask)  # type: ignore[arg-type]
    return [y.detach(), *torch.autograd.grad(y, tensors, dy.double())]


def fused(x: Tensor, norm: Norm, mode: str, p: float, where: MaskCoordinates, **options: Any) -> Tensor:
    placement, fill, statistics = MODES[mode]
    if mode == "none":
        return norm_dropout(x, norm)
    given = None
    if statistics == "batch":
        total = norm_moments(x, norm)
        given = (total.mean, total.variance)
    return norm_dropout(x, norm, p, where, placement=placement, fill=fill, moments=given, **options)  # type: ignore[arg-type]


def run(x: Tensor, norm: Norm, mode: str, p: float, where: MaskCoordinates, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    leaves = [t for t in (x, norm.weight, norm.bias) if t is not None]
    y = fused(x, norm, mode, p, where)
    grads = torch.autograd.grad(y, leaves, dy)
    assert [g.dtype for g in grads] == [leaf.dtype for leaf in leaves]
    return [y.detach(), *grads]


def assert_close(found: list[Tensor], expected: list[Tensor], dtype: torch.dtype) -> None:
    """Each within one rounding of its dtype, by norm; a bf16 sum over rows is rounded once too."""
    for name, got, want in zip(("y", "dx", "dgain", "dbias"), found, expected, strict=False):
        error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
        assert error < DTYPES[dtype], f"{name}: {error}"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("centred", "zero_centred", "dtype"),
    [(*norm, dtype) for norm in NORMS for dtype in DTYPES if dtype == torch.float32 or norm == (False, False)],
)
def test_output_and_gradients_equal_float64(mode, centred, zero_centred, dtype):
    x = random(2, 2, 44, dtype=dtype, scale=2.0, mean=0.5)
    norm, dy = make_norm(44, centred, zero_centred, dtype), random(2, 2, 44, dtype=dtype)
    found, expected = (of(x, norm, mode, 0.3, WHERE, dy) for of in (run, reference))
    assert found[0].dtype == dtype
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("hidden", [3, 8, 100])
@pytest.mark.parametrize("mode", MODES)
def test_any_hidden_size(mode, hidden):
    x, dy, norm = random(*ROWS, hidden), random(*ROWS, hidden), make_norm(hidden, hidden == 100, False)
    assert_close(*(of(x, norm, mode, 0.3, WHERE, dy) for of in (run, reference)), torch.float32)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_one_channel(mode, centred):
    """Its normalised value is a sign, or 0 with the mean off, so that dx is a difference of equal terms."""
    x, dy, norm = random(*ROWS, 1), random(*ROWS, 1), make_norm(1, centred, False)
    x = x.sign() * (x.abs() + 0.5)
    found, expected = (of(x, norm, mode, 0.3, WHERE, dy) for of in (run, reference))
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("p", [1e-9, 0.1, 0.999])
@pytest.mark.parametrize("shape", [(2, 1, 1), (2, 3, 100)])
def test_masks_are_those_of_the_plain_path_bit_for_bit(shape, p):
    """In forward, and drawn again in backward."""
    x = random(*shape).abs().add_(0.5).requires_grad_()
    dy = torch.ones(shape, device=DEVICE)
    bias = torch.ones(shape[-1], device=DEVICE, requires_grad=True)
    norm = Norm(torch.ones(shape[-1], device=DEVICE), bias, 1e-5)
    y = norm_dropout(x, norm, p, WHERE)
    mask = counter_keep_mask(shape, p, WHERE, DEVICE)
    assert torch.equal(y != 0, mask)
    (dbias,) = torch.autograd.grad(y, bias, dy)
    torch.testing.assert_close(dbias, mask.float().sum((0, 1)) / (1 - quantize(p)))


def test_a_mask_of_known_answers():
    """The digest that ``tests/unit/test_masks.py`` pins."""
    where = MaskCoordinates(key=2**64 - 3, stream=2**31 + 5, positions=((0, 64),))
    y = norm_dropout(torch.ones(64, 4, 96, device=DEVICE), Norm(torch.ones(96, device=DEVICE), None, 1e-5), 0.1, where)
    digest = hashlib.sha256((y != 0).cpu().numpy().tobytes()).hexdigest()
    assert digest == "a1c5e86797de28a29e75d56a58f161472eebf80871869fd5b722b20e4d158251"


@pytest.mark.parametrize("positions", [((2**31, 4),), ((3, 1), (90, 3)), ((90, 3), (3, 1)), ((2**32 - 4, 4),)])
def test_positions_in_one_run_or_two(positions):
    where = MaskCoordinates(key=5, stream=70, positions=positions, sample=2**31)
    y = norm_dropout(torch.ones(4, 2, 64, device=DEVICE), Norm(torch.ones(64, device=DEVICE), None, 1e-5), 0.3, where)
    assert torch.equal(y != 0, counter_keep_mask((4, 2, 64), 0.3, where, DEVICE))


def test_key_and_sample_are_read_from_a_tensor():
    norm, ones = Norm(torch.ones(64, device=DEVICE), None, 1e-5), torch.ones(2, 2, 64, device=DEVICE)
    key = torch.tensor([11, 4], device=DEVICE)
    other = MaskCoordinates(key=2**63 + 9, stream=WHERE.stream, positions=WHERE.positions, sample=8)
    drawn = [norm_dropout(ones, norm, 0.3, WHERE, key=key) != 0]
    key.copy_(key_tensor(other.key, other.sample, DEVICE))
    drawn.append(norm_dropout(ones, norm, 0.3, WHERE, key=key) != 0)
    assert torch.equal(drawn[1], counter_keep_mask((2, 2, 64), 0.3, other, DEVICE))
    assert not torch.equal(*drawn)


@pytest.mark.parametrize("mode", [mode for mode in MODES if "batch" not in mode])
@pytest.mark.parametrize("centred", [False, True])
def test_nan_stays_in_its_row(mode, centred):
    """A row with a NaN or an infinity is all NaN, the kept and the dropped; the others are as if it were not there."""
    x, dy, norm = random(2, 2, 44), random(2, 2, 44), make_norm(44, centred, False)
    clean = run(x, norm, mode, 0.3, WHERE, dy)
    x[1, 1, 3], x[0, 0, 0] = float("nan"), float("inf")
    found = run(x, norm, mode, 0.3, WHERE, dy)
    broken = torch.zeros(2, 2, dtype=torch.bool, device=DEVICE)
    broken[1, 1] = broken[0, 0] = True
    for got, before in zip(found[:2], clean[:2], strict=True):
        assert got[1, 1].isnan().all()
        assert torch.equal(got[~broken], before[~broken])
        assert not torch.equal(got[0, 0], before[0, 0])


@pytest.mark.parametrize("mode", MODES)
def test_outliers(mode):
    """Channels a thousand times the others, as real models have."""
    x, dy, norm = random(2, 2, 100), random(2, 2, 100), make_norm(100, True, False)
    x[..., 7] += 3000.0
    x[..., 8] *= 1000.0
    assert_close(*(of(x, norm, mode, 0.3, WHERE, dy) for of in (run, reference)), torch.float32)


def test_layout_of_input_and_gradient_does_not_matter():
    norm, dy = make_norm(44, True, False), random(2, 2, 44)
    x = random(2, 2, 44)
    views = {
        "transposed": x.transpose(0, 1),
        "strided": random(4, 2, 88)[::2, :, ::2],
        "expanded": random(2, 1, 44).expand(2, 2, 44),
        "a row for all": random(44).expand(2, 2, 44),
    }
    for name, view in views.items():
        expected = run(view.contiguous(), norm, "pre_linear", 0.3, WHERE, dy)
        for got, want in zip(run(view, norm, "pre_linear", 0.3, WHERE, dy), expected, strict=True):
            assert torch.equal(got, want), name
    ones = torch.ones((), device=DEVICE).expand(2, 2, 44)  # as sum().backward() hands it on
    for got, want in zip(
        run(views["transposed"], norm, "pre_linear", 0.3, WHERE, ones),
        run(views["transposed"], norm, "pre_linear", 0.3, WHERE, ones.contiguous()),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(0, 2, 44), (2, 0, 44)])
@pytest.mark.parametrize("mode", MODES)
def test_no_tokens(mode, shape):
    where = MaskCoordinates(key=1, stream=2, positions=((0, shape[0]),))
    norm, x = make_norm(44, True, False), random(*shape)
    y, dx, dgain, dbias = run(x, norm, mode, 0.3, where, random(*shape))
    assert y.shape == dx.shape == shape
    assert not dgain.any()
    assert not dbias.any()


def test_p_of_zero_is_the_norm_alone_also_without_coordinates():
    x, norm = random(3, 44), make_norm(44, False, False)
    torch.testing.assert_close(norm_dropout(x, norm), F.rms_norm(x, (44,), norm.weight, 1e-5))
    assert torch.equal(
        norm_dropout(random(2, 2, 44) * 0 + 2, norm, 0.0, WHERE), norm_dropout(random(2, 2, 44) * 0 + 2, norm)
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("centred", [False, True])
def test_input_row_statistics_and_key_are_kept_and_no_mask(mode, centred):
    x, norm = random(2, 2, 256, dtype=torch.bfloat16).requires_grad_(), make_norm(256, centred, False, torch.bfloat16)
    given = {x.data_ptr(), norm.weight.data_ptr()} | ({norm.bias.data_ptr()} if norm.bias is not None else set())
    kept: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in given:
            kept.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        fused(x, norm, mode, 0.3, WHERE)
    rows, key, channels = 4 * 4 * (1 + centred), 16, 4 * 2 * 256
    assert sum(kept) == rows + (key if mode != "none" else 0) + (channels if "batch" in mode else 0)


@pytest.mark.parametrize("mode", MODES)
def test_activation_recompute_changes_nothing(mode):
    x, dy, norm = random(2, 2, 44).requires_grad_(), random(2, 2, 44), make_norm(44, True, False)
    leaves = [x, norm.weight, norm.bias]
    of = functools.partial(fused, norm=norm, mode=mode, p=0.3, where=WHERE)
    stored = torch.autograd.grad(of(x), leaves, dy)
    again = torch.autograd.grad(checkpoint(of, x, use_reentrant=False), leaves, dy)
    assert all(torch.equal(a, b) for a, b in zip(stored, again, strict=True))


def test_torch_compile_leaves_it_correct():
    """With the real compiler where there is a GPU; what it makes of the rest of the function is not at issue."""
    norm = make_norm(44, True, False)

    def step(x: Tensor) -> Tensor:
        return (fused(x * 2.0, norm, "zero, batch", 0.3, WHERE) * 3.0).sin()

    compiled = torch.compile(step, backend="eager" if IS_INTERPRETED else "inductor")
    x, dy = random(2, 2, 44).requires_grad_(), random(2, 2, 44)
    for _ in range(2):
        torch.testing.assert_close(compiled(x), step(x))
        torch.testing.assert_close(
            torch.autograd.grad(compiled(x), [x, norm.weight], dy), torch.autograd.grad(step(x), [x, norm.weight], dy)
        )
        x = random(2, 2, 44).requires_grad_()


@pytest.mark.parametrize(("centred", "zero_centred"), NORMS)
def test_moments_are_those_of_the_norms_output(centred, zero_centred):
    """Also where a channel's mean is a thousand times its spread."""
    x, norm = random(4, 2, 44), make_norm(44, centred, zero_centred)
    x[..., 5] += 4000.0
    found = norm_moments(x, norm)
    wide = (t if t is None else t.detach().double() for t in (x, norm.weight, norm.bias))
    expected = moments(float64_norm(next(wide), norm, next(wide), next(wide)))
    assert found.tokens.item() == 8
    torch.testing.assert_close(found.mean.double(), expected.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.m2.double(), expected.m2, rtol=1e-4, atol=1e-9)
    few = norm_moments(x[:1, :2], norm)  # fewer rows than programs
    assert few.tokens.item() == 2
    torch.testing.assert_close(few.mean, norm_dropout(x, norm)[:1, :2].detach().mean((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, norm: norm_dropout(x, norm, 1.0, WHERE), r"p must be a number in \[0, 1\), got 1.0"),
        (lambda x, norm: norm_dropout(x.double(), norm), "x must be float32, bfloat16 or float16, got torch.float64"),
        (lambda x, norm: norm_dropout(x[..., :9], norm), r"weight must have shape \(9,\), got \(44,\)"),
        (lambda x, norm: norm_dropout(x, norm, 0.1), r"needs coordinates and activations \[s, b, h\], got None"),
        (lambda x, norm: norm_dropout(x[:1], norm, 0.1, WHERE), "at most two runs of 1 in all"),
        (lambda x, norm: norm_dropout(x, norm, 0.1, WHERE, placement="none"), "placement must be .*, got 'none'"),
        (lambda x, norm: norm_dropout(x, norm, 0.1, WHERE, fill="one"), "fill must be .*, got 'one'"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(random(2, 2, 44), make_norm(44, False, False))


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a CUDA device")
def test_a_captured_graph_draws_fresh_masks_at_every_replay():
    norm, x, dy = make_norm(2048, False, False), random(64, 2, 2048).requires_grad_(), random(64, 2, 2048)
    where = MaskCoordinates(key=0, stream=9, positions=((0, 64),))
    key = torch.zeros(2, dtype=torch.int64, device=DEVICE)

    def step() -> tuple[Tensor, Tensor]:
        y = norm_dropout(x, norm, 0.3, where, key=key)
        return y, torch.autograd.grad(y, x, dy)[0]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, dx = step()
    for value in (5, 2**63 + 1):
        key.copy_(key_tensor(value, 2, DEVICE))
        graph.replay()
        eager = step()
        assert torch.equal(y, eager[0])
        assert torch.equal(dx, eager[1])
        shifted = MaskCoordinates(key=value, stream=9, positions=((0, 64),), sample=2)
        assert torch.equal(y != 0, counter_keep_mask((64, 2, 2048), 0.3, shifted, DEVICE))


@pytest.mark.skipif(IS_INTERPRETED, reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("hidden", "dtype"),
    [
        (2048, torch.float32),
        (2048, torch.float16),
        (2048, torch.bfloat16),
        (4096, torch.bfloat16),
        (20000, torch.bfloat16),
    ],
)
@pytest.mark.parametrize("centred", [False, True])
def test_sizes_of_real_models(hidden, dtype, centred):
    where = MaskCoordinates(key=77, stream=9, positions=((0, 1031),))
    x, dy = random(1031, 2, hidden, dtype=dtype), random(1031, 2, hidden, dtype=dtype)
    norm = make_norm(hidden, centred, False, dtype)
    for mode in ("pre_linear", "zero, batch"):
        assert_close(*(of(x, norm, mode, 0.1, where, dy) for of in (run, reference)), dtype)
