r"""Norm and dropout in one pass: Triton kernels for RMSNorm and LayerNorm with Pre-Linear dropout or VPAD behind them.

With the normalised row :math:`n = (x - \bar x) r` (RMSNorm: :math:`\bar x = 0`), gain :math:`\gamma` and bias
:math:`\beta`, forward and backward are

.. math::
    z_i = \gamma_i n_i + \beta_i, \qquad y_i = b_i + f_i (z_i - c_i), \qquad f_i = m_i a_i,

    dz_i = f_i\, dy_i, \qquad d\gamma_i = \sum dz_i n_i, \qquad d\beta_i = \sum dz_i, \qquad
    dx_i = r \left(\gamma_i dz_i - \overline{\gamma\, dz} - n_i \overline{\gamma\, dz\, n}\right)

(RMSNorm: without :math:`\overline{\gamma\, dz}`), with scale a, centre c and shift b as
:mod:`megatron_lengthgen.dropout.functional` has them. Input, row statistics and key are kept for backward; the mask is
drawn again. It is, bit for bit, the one of :func:`~megatron_lengthgen.dropout.masks.counter_keep_mask`.

**Bytes that must move**, per element of e bytes: forward 2e (x, y), backward 3e (x, dy, dx); with batch statistics
forward 3e, since x is read once more before. A bf16 element takes 4 and 6 bytes (batch: 6 and 6). At the 4.3 TB/s of a
device copy on an H200 that is a floor of 0.93 and 1.40 ns per 1000 elements. Per channel and row 12 bytes at most come
on top, and, where gradients of gain and bias are summed, 4 bytes per channel, program and parameter, written and read.

**Integer operations** for the mask. One Philox4x32-10 counter costs 10 rounds of two 32 x 32-bit products and two
three-way XORs: 40, the key schedule being the same for all. Its four words are read as eight 16-bit draws: 5 operations
per element, and 2.5 to align (every second one), compare and select. An H200 does 132 multiprocessors x 64 lanes x
1.98 GHz = 16.7e12 of them per second, so a floor of 0.45 ns per 1000 elements: under both floors above. At one word per
element it would be 12.5 operations and 0.75 ns; at one counter per element, as ``triton.language.rand`` draws, 42 and
2.5 ns: bound by integer arithmetic.

**As compiled** for sm_90 by Triton 3.7.1 at 2,048 channels, RMSNorm and Pre-Linear in bf16: 22.6 instructions per
element forward, 10.4 of them on integers (2.6 without a mask), and 25.5 backward. At 33.4e12 instructions per second
(128 a cycle and multiprocessor) that is 0.68 and 0.76 ns per 1000 elements, behind the 0.93 and 1.40 of memory. With a
word per element the forward's integers alone would take the 0.93: hence the 16-bit lanes.
"""

import functools
from typing import Any, Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengthgen.dropout.masks import MaskCoordinates, check_probability, quantize
from megatron_lengthgen.dropout.moments import Moments

__all__ = ["DTYPES", "IS_INTERPRETED", "Norm", "key_tensor", "norm_dropout", "norm_moments"]

#: Of activations and parameters; arithmetic is in float32.
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Do the kernels run in Triton's interpreter, on tensors of the CPU? (``TRITON_INTERPRET=1`` before the import.)
IS_INTERPRETED: bool = triton.knobs.runtime.interpret

#: More saves instructions (a row's reductions and divisions are shared by fewer threads) and costs registers.
ELEMENTS_PER_THREAD = 16
_LANES = tl.constexpr(8)  # 16-bit draws in the four words of one counter, as in masks.py
_INTERPRETED_PROGRAMS = 3

# p, the step and the place of a tensor change from call to call, and a kernel must not be compiled anew for that.
_VARYING = ("first", "run", "second", "stream", "threshold")


@triton.jit
def _channels(groups: tl.constexpr):
    """Channel of each element of a row, ``[groups, 8]``: a row of it is what one counter gives draws for."""
    return tl.arange(0, groups)[:, None] * _LANES + tl.arange(0, _LANES)[None, :]


@triton.jit
def _parameters(weight, bias, channels, inside, zero_centred: tl.constexpr):
    """Gain and bias in float32; 0 beyond the row, so that nothing there counts in a sum."""
    gain = tl.load(weight + channels, mask=inside, other=0.0).to(tl.float32)
    if zero_centred:
        gain = tl.where(inside, gain + 1.0, 0.0)
    shift = tl.zeros_like(gain)
    if bias is not None:
        shift = tl.load(bias + channels, mask=inside, other=0.0).to(tl.float32)
    return gain, shift


@triton.jit
def _row_statistics(x, inside, hidden, eps, centred: tl.constexpr):
    """Mean (0 for RMSNorm) and reciprocal of the root mean square around it, of one row."""
    mean = 0.0
    if centred:
        mean = tl.sum(x) / hidden
        x = tl.where(inside, x - mean, 0.0)
    return mean, tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x) / hidden + eps))


@triton.jit
def _channel_map(gain, bias, mean, variance, channels, inside, p, mode: tl.constexpr):
    """Scale, centre and shift of each channel, from given moments of z or from those that gain and bias imply."""
    scale = tl.zeros_like(gain) + 1.0
    centre = tl.zeros_like(gain)
    shift = tl.zeros_like(gain)
    keep = 1.0 - p
    if mode == "pre_linear":
        scale = tl.zeros_like(gain) + tl.div_rn(1.0, keep)
    elif mode != "none":
        mu, var = bias, gain * gain
        if mean is not None:
            mu = tl.load(mean + channels, mask=inside, other=0.0)
            var = tl.load(variance + channels, mask=inside, other=0.0)
        if mode == "mean":
            scale = tl.where(var > 0.0, tl.div_rn(1.0, tl.sqrt_rn(keep)), 0.0)
            centre = mu
            shift = mu
        else:
            scale = tl.where(var > 0.0, tl.sqrt_rn(tl.div_rn(var, keep * (var + p * mu * mu))), 0.0)
            shift = mu * (1.0 - scale * keep)
    return scale, centre, shift


@triton.jit
def _philox(c0, c1, c2, c3, key):
    """Philox4x32-10 as in masks.py. ``tl.philox`` gives the same words, and takes two instructions for each product."""
    k0 = key.to(tl.uint32)
    k1 = (key.to(tl.uint64) >> 32).to(tl.uint32)
    for _ in tl.static_range(10):
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ k0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ k1
        c3 = p0.to(tl.uint32)
        k0 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False)
        k1 = tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def _key(pointer):
    """Key and first sample; 0 where nothing is dropped."""
    key = tl.zeros((), tl.int64)
    sample = tl.zeros((), tl.int64)
    if pointer is not None:
        key = tl.load(pointer)
        sample = tl.load(pointer + 1)
    return key, sample


@triton.jit
def _masked(
    scale, key, sample, row, batch, first, run, second, stream, threshold, groups: tl.constexpr, mode: tl.constexpr
):
    """``scale`` where the element of this row is kept, 0 where it is dropped, ``[groups, 8]``."""
    factor = scale
    if mode != "none":
        token = row // batch
        position = (tl.where(token < run, first, second) + token).to(tl.uint32)
        sample = (sample + row % batch).to(tl.uint32)
        group = tl.arange(0, groups)[:, None].to(tl.uint32)
        w0, w1, w2, w3 = _philox(position, sample, group, stream.to(tl.uint32), key)
        lane = tl.arange(0, _LANES)[None, :]
        word = tl.where(lane < 4, tl.where(lane < 2, w0, w1), tl.where(lane < 6, w2, w3))
        # A draw is compared in the upper half of its word, where what is below it does not matter.
        draw = tl.where(lane % 2 == 0, word << 16, word).to(tl.int32, bitcast=True)
        factor = tl.where(draw >= threshold, scale, 0.0)
    return factor


@triton.jit(do_not_specialize=_VARYING)
def _forward_kernel(
    x_pointer, weight, bias, mean, variance, key_pointer, y_pointer, row_mean, row_scale,
    rows, hidden, batch, first, run, second, stream, threshold, p, eps,
    groups: tl.constexpr, mode: tl.constexpr, centred: tl.constexpr, zero_centred: tl.constexpr,
):  # fmt: skip
    """y, and the statistics of its rows, of every row whose number is the program's modulo their count."""
    channels = _channels(groups)
    inside = channels < hidden
    gain, offset = _parameters(weight, bias, channels, inside, zero_centred)
    scale, centre, shift = _channel_map(gain, offset, mean, variance, channels, inside, p, mode)
    key, sample = _key(key_pointer)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * hidden
        x = tl.load(x_pointer + start + channels, mask=inside, other=0.0).to(tl.float32)
        factor = _masked(scale, key, sample, row, batch, first, run, second, stream, threshold, groups, mode)
        middle, r = _row_statistics(x, inside, hidden, eps, centred)
        z = (x - middle) * r * gain + offset
        y = factor * (z - centre) + shift
        tl.store(y_pointer + start + channels, y.to(y_pointer.dtype.element_ty), mask=inside)
        tl.store(row_scale + row, r)
        if centred:
            tl.store(row_mean + row, middle)


@triton.jit(do_not_specialize=_VARYING)
def _backward_kernel(
    dy_pointer, x_pointer, weight, bias, mean, variance, key_pointer, row_mean, row_scale,
    dx_pointer, dgain_sums, dbias_sums,
    rows, hidden, batch, first, run, second, stream, threshold, p,
    groups: tl.constexpr, mode: tl.constexpr, centred: tl.constexpr, zero_centred: tl.constexpr,
):  # fmt: skip
    """dx of the same rows, and this program's share of the gradients of gain and bias."""
    channels = _channels(groups)
    inside = channels < hidden
    gain, offset = _parameters(weight, bias, channels, inside, zero_centred)
    scale, _, _ = _channel_map(gain, offset, mean, variance, channels, inside, p, mode)
    key, sample = _key(key_pointer)
    dgain = tl.zeros_like(gain)
    dbias = tl.zeros_like(gain)
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * hidden
        x = tl.load(x_pointer + start + channels, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_pointer + start + channels, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(row_scale + row)
        normed = x * r
        if centred:
            normed = (x - tl.load(row_mean + row)) * r
        dz = dy * _masked(scale, key, sample, row, batch, first, run, second, stream, threshold, groups, mode)
        dgain += dz * normed
        dn = dz * gain
        dx = dn - normed * (tl.sum(dn * normed) / hidden)
        if centred:
            dx -= tl.sum(dn) / hidden
        tl.store(dx_pointer + start + channels, (dx * r).to(dx_pointer.dtype.element_ty), mask=inside)
        if bias is not None:
            dbias += dz
    sums = tl.program_id(0).to(tl.int64) * hidden + channels
    tl.store(dgain_sums + sums, dgain, mask=inside)
    if bias is not None:
        tl.store(dbias_sums + sums, dbias, mask=inside)


@triton.jit
def _moments_kernel(
    x_pointer, weight, bias, means, m2s, rows, hidden, eps,
    groups: tl.constexpr, centred: tl.constexpr, zero_centred: tl.constexpr,
):  # fmt: skip
    """Mean and sum of squared deviations of each channel of z over the program's rows, by Welford's recurrence."""
    channels = _channels(groups)
    inside = channels < hidden
    gain, offset = _parameters(weight, bias, channels, inside, zero_centred)
    mean = tl.zeros_like(gain)
    m2 = tl.zeros_like(gain)
    count = 0.0
    for row in tl.range(tl.program_id(0), rows, tl.num_programs(0)):
        start = tl.cast(row, tl.int64) * hidden
        x = tl.load(x_pointer + start + channels, mask=inside, other=0.0).to(tl.float32)
        middle, r = _row_statistics(x, inside, hidden, eps, centred)
        z = (x - middle) * r * gain + offset
        count += 1.0
        delta = z - mean
        mean += delta / count
        m2 += delta * (z - mean)
    sums = tl.program_id(0).to(tl.int64) * hidden + channels
    tl.store(means + sums, mean, mask=inside)
    tl.store(m2s + sums, m2, mask=inside)


class Norm(NamedTuple):
    """A norm over the last dimension.

    Attributes:
        weight: ``[h]``.
        bias: ``[h]`` or None.
        eps: Added to the mean square.
        centred: The mean is taken off first: LayerNorm; else RMSNorm.
        zero_centred: The gain is ``1 + weight`` (``config.layernorm_zero_centered_gamma``).
    """

    weight: Tensor
    bias: Tensor | None
    eps: float
    centred: bool = False
    zero_centred: bool = False


class _Launch(NamedTuple):
    """The arguments of a kernel that are no tensors."""

    eps: float
    centred: bool
    zero_centred: bool
    batch: int = 1
    first: int = 0
    run: int = 0
    second: int = 0
    stream: int = 0
    threshold: int = 0
    p: float = 0.0
    mode: str = "none"

    @property
    def scalars(self) -> tuple[int | float, ...]:
        """What varies from call to call."""
        return self.batch, self.first, self.run, self.second, self.stream, self.threshold, self.p

    def constants(self, hidden: int) -> dict[str, Any]:
        """What a kernel is compiled for."""
        return {"mode": self.mode, "centred": self.centred, "zero_centred": self.zero_centred, **_tile(hidden)}


class _NormDropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        key: Tensor | None,
        mean: Tensor | None,
        variance: Tensor | None,
        launch: _Launch,
    ) -> Tensor:
        rows, hidden = _rows(x)
        x = x.contiguous()
        y = torch.empty_like(x)
        row_scale = torch.empty(rows, dtype=torch.float32, device=x.device)
        row_mean = torch.empty_like(row_scale) if launch.centred else None
        ctx.launch = launch
        ctx.save_for_backward(x, weight, bias, key, mean, variance, row_mean, row_scale)
        if x.numel():
            with torch.cuda.device_of(x):
                _forward_kernel[_grid(rows, hidden, x.device)](
                    x, weight, bias, mean, variance, key, y, row_mean, row_scale,
                    rows, hidden, *launch.scalars, launch.eps, **launch.constants(hidden),
                )  # fmt: skip
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, key, mean, variance, row_mean, row_scale = ctx.saved_tensors
        launch = ctx.launch
        rows, hidden = _rows(x)
        dy = grads[0].contiguous()
        dx = torch.empty_like(x)
        grid = _grid(rows, hidden, x.device)
        sums = torch.zeros if x.numel() == 0 else torch.empty
        dgain = sums(grid[0], hidden, dtype=torch.float32, device=x.device)
        dbias = None if bias is None else sums(grid[0], hidden, dtype=torch.float32, device=x.device)
        if x.numel():
            with torch.cuda.device_of(x):
                _backward_kernel[grid](
                    dy, x, weight, bias, mean, variance, key, row_mean, row_scale, dx, dgain, dbias,
                    rows, hidden, *launch.scalars, **launch.constants(hidden),
                )  # fmt: skip
        bias_grad = None if dbias is None else dbias.sum(0).to(bias.dtype)
        return dx, dgain.sum(0).to(weight.dtype), bias_grad, None, None, None, None


def _rows(x: Tensor) -> tuple[int, int]:
    hidden = x.shape[-1]
    return x.numel() // hidden if hidden else 0, hidden


def _tile(hidden: int) -> dict[str, int]:
    """A whole row in the registers of one program; more than 16,384 channels do not fit, and spill."""
    groups = max(triton.next_power_of_2(triton.cdiv(hidden, 8)), 1)
    return {"groups": groups, "num_warps": min(max(groups * 8 // (32 * ELEMENTS_PER_THREAD), 1), 32)}


def _grid(rows: int, hidden: int, device: torch.device) -> tuple[int]:
    """Programs that the device holds at once, for each keeps sums of its rows; no more than there are rows."""
    if IS_INTERPRETED:
        programs = _INTERPRETED_PROGRAMS
    else:
        # 24 warps a multiprocessor leave each thread 80 registers, which most modes need.
        per_processor = max(24 // _tile(hidden)["num_warps"], 1)
        programs = torch.cuda.get_device_properties(device).multi_processor_count * per_processor
    return (max(min(programs, rows), 1),)


def key_tensor(key: int, sample: int, device: torch.device) -> Tensor:
    """What the kernels read of :class:`~megatron_lengthgen.dropout.masks.MaskCoordinates` at run time.

    The device writes it by itself: a copy from the host would wait.

    Args:
        key: 64-bit key of the training step.
        sample: Number of the first sample.
        device: Of the activations.

    Returns:
        int64 ``[2]``: key (its two's complement) and sample. Writing other values there changes the masks of all
        kernels that are launched, or replayed by a CUDA graph, afterwards.
    """
    values = torch.empty(2, dtype=torch.int64, device=device)
    values[0].fill_(key - (key >> 63 << 64))
    values[1].fill_(sample)
    return values


#: The sites of a microbatch share one, which nobody else gets hold of.
_shared_key_tensor = functools.lru_cache(maxsize=16)(key_tensor)


@torch.compiler.disable
def norm_dropout(
    x: Tensor,
    norm: Norm,
    p: float = 0.0,
    where: MaskCoordinates | None = None,
    *,
    placement: Literal["pre_linear", "vpad"] = "pre_linear",
    fill: Literal["zero", "mean"] = "zero",
    moments: tuple[Tensor, Tensor] | None = None,
    key: Tensor | None = None,
) -> Tensor:
    """Norm, then dropout: :func:`~megatron_lengthgen.dropout.functional.pre_linear_dropout` or
    :func:`~megatron_lengthgen.dropout.functional.vpad` on its output, which is never stored.

    ``torch.compile`` breaks its graph around it.

    Args:
        x: Activations ``[s, b, h]``, any strides (``[..., h]`` where p is 0), of a dtype in :data:`DTYPES`.
        norm: Which norm; its parameters are of a dtype in :data:`DTYPES`, not necessarily that of ``x``.
        p: Drop probability in [0, 1); it is rounded to 1/65536. ``p = 0`` is the norm alone.
        where: Coordinates of ``x``, from which the mask is computed, in at most two runs of positions and from channel
            0 on, as a norm sees all of a token's. None only where p is 0.
        placement: Plain or variance-preserving.
        fill: For ``vpad``.
        moments: For ``vpad``: mean and variance of each channel of the norm's output, ``[h]`` each in float32, constant
            in backward (:func:`norm_moments`). None takes those that gain and bias imply if the normalised coordinates
            have mean 0 and variance 1.
        key: In place of ``where.key`` and ``where.sample``: a tensor as :func:`key_tensor` makes it, read when the
            kernels run.

    Returns:
        ``y`` in the shape and dtype of ``x``, contiguous, computed in float32 and rounded once.

    Raises:
        ValueError: p, a dtype, a shape or coordinates other than these.

    Source: arXiv 2610.04518.
    """
    _check(x, norm)
    launch = _launch(x, norm, check_probability(p), where, placement, fill, moments is not None)
    mean = variance = None
    if launch.mode == "none":
        key = None
    else:
        assert where is not None
        if key is None:
            key = _shared_key_tensor(where.key, where.sample, x.device)
        if moments is not None and placement == "vpad":
            mean, variance = (value.detach().float().contiguous() for value in moments)
    weight = norm.weight.contiguous()
    bias = None if norm.bias is None else norm.bias.contiguous()
    return _NormDropout.apply(x, weight, bias, key, mean, variance, launch)


def _check(x: Tensor, norm: Norm) -> None:
    for what, tensor in (("x", x), ("weight", norm.weight), ("bias", norm.bias)):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise ValueError(f"{what} must be float32, bfloat16 or float16, got {tensor.dtype}")
        if what != "x" and tensor is not None and tensor.shape != x.shape[-1:]:
            raise ValueError(f"{what} must have shape {tuple(x.shape[-1:])}, got {tuple(tensor.shape)}")


def _launch(
    x: Tensor, norm: Norm, p: float, where: MaskCoordinates | None, placement: str, fill: str, has_moments: bool
) -> _Launch:
    if placement not in ("pre_linear", "vpad"):
        raise ValueError(f"placement must be 'pre_linear' or 'vpad', got {placement!r}")
    if fill not in ("zero", "mean"):
        raise ValueError(f"fill must be 'zero' or 'mean', got {fill!r}")
    launch = _Launch(norm.eps, norm.centred, norm.zero_centred)
    if p == 0.0:
        return launch
    if where is None or x.dim() != 3:
        raise ValueError(f"dropout needs coordinates and activations [s, b, h], got {where} and {tuple(x.shape)}")
    runs = where.positions
    if sum(count for _, count in runs) != x.shape[0] or len(runs) > 2 or where.channel != 0:
        raise ValueError(
            f"positions must be at most two runs of {x.shape[0]} in all, and the first channel 0: got {runs} and "
            f"channel {where.channel}"
        )
    mode = fill if placement == "vpad" else placement
    if mode == "zero" and norm.bias is None and not has_moments:
        mode = "mean"  # equal where the mean is 0, and one constant instead of a root per channel
    p = quantize(p)
    (first, run), (second, _) = [*runs, (0, 0), (0, 0)][:2]
    return launch._replace(
        batch=max(x.shape[1], 1),
        first=first,
        run=run,
        second=second - run,
        stream=where.stream,
        threshold=(round(p * 65536) - 32768) << 16,
        p=p,
        mode=mode,
    )


@torch.no_grad()
@torch.compiler.disable
def norm_moments(x: Tensor, norm: Norm) -> Moments:
    """:func:`~megatron_lengthgen.dropout.moments.moments` of the norm's output, which is not stored: one pass over x.

    Args:
        x: Activations ``[..., h]``, any strides, of a dtype in :data:`DTYPES`.
        norm: Which norm.

    Returns:
        Moments over all tokens of ``x``; of the output before it is rounded to the dtype of ``x``.

    Source: Welford, "Note on a method for calculating corrected sums of squares and products" (1962); merged as in
    :func:`~megatron_lengthgen.dropout.moments.merge_moments`.
    """
    _check(x, norm)
    rows, hidden = _rows(x)
    x = x.contiguous()
    programs = _grid(rows, hidden, x.device)[0]
    means, m2s = torch.zeros(2, programs, hidden, dtype=torch.float32, device=x.device)
    if x.numel():
        with torch.cuda.device_of(x):
            _moments_kernel[(programs,)](
                x, norm.weight.contiguous(), None if norm.bias is None else norm.bias.contiguous(), means, m2s,
                rows, hidden, norm.eps, centred=norm.centred, zero_centred=norm.zero_centred, **_tile(hidden),
            )  # fmt: skip
    # Program i had every row whose number is i modulo their count.
    counts = (torch.arange(rows + programs - 1, rows - 1, -1, device=x.device) // programs).float().unsqueeze(1)
    tokens = counts.sum()
    # Around the first mean: equal values have exactly their value as mean, and no variance.
    mean = means[0] + ((means - means[0]) * counts).sum(0) / tokens.clamp(min=1)
    m2 = m2s.sum(0) + ((means - mean).square_() * counts).sum(0)
    return Moments(tokens, mean, m2)
