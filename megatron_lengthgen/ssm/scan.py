r"""Mamba-2's selective state space model: chunk by chunk with gradients, and token by token in place.

Shapes: b batch, l length, g groups, h heads (r of them to a group), p head size, n state size, q tokens of a chunk. A
head's state S is p x n and starts at ``initial_states``, or at zero:

.. math::
    S_t = e^{\Delta_t A}\, S_{t-1} + \Delta_t x_t B_t^\top, \qquad y_t = S_t C_t + D x_t.

Over a chunk this is attention without a softmax plus what the chunk finds in the state, all of it matrix products (the
state-space dual form, Dao and Gu 2024, arXiv:2405.21060). With :math:`c_t = \sum_{s \le t} \Delta_s A` and
:math:`u_s = \Delta_s x_s`:

.. math::
    y_t = \sum_{s \le t} (C_t \cdot B_s)\, e^{c_t - c_s} u_s + e^{c_t} S_0 C_t + D x_t, \qquad
    S_q = e^{c_q} S_0 + \sum_s e^{c_q - c_s} u_s B_s^\top.

All of it is computed in float32 (exponents, and float64 inputs, in float64); results have the dtype of ``x``, states
that of the computation. Nothing of size q x q outlives its chunk: the backward pass keeps the inputs alone and computes
the rest again, so memory is linear in length. Arguments are those of ``mamba_ssm``'s ``mamba_chunk_scan_combined`` and
of Megatron's ``selective_state_update`` (``megatron/core/ssm/ops/mamba_ssm.py``).
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengthgen.errors import UserError

__all__ = ["chunk_scan", "refuse_packed", "selective_state_update", "wide_dtype"]

_LONGEST = 64
"""Tokens of a chunk. Kernels for GPUs want more; on a CPU the work on pairs of tokens then outweighs what is saved."""


def chunk_scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    state_dtype: torch.dtype | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The state space model over a sequence, differentiable in every tensor.

    Args:
        x: [b, l, h, p], any length from 1.
        dt: [b, l, h], time steps before ``dt_bias`` and ``dt_softplus``.
        A: [h], negative.
        B: [b, l, g, n].
        C: [b, l, g, n].
        chunk_size: tokens that are processed together, 64 at most; it moves results by rounding alone.
        D: [h] or [h, p], the skip connection's factor.
        z: [b, l, h, p], the gate: the result is multiplied by ``silu(z)``.
        dt_bias: [h], added to ``dt``.
        initial_states: [b, h, p, n]; zeros if None.
        seq_idx: not supported.
        dt_softplus: whether softplus is applied to the time steps.
        dt_limit: what the time steps are clamped to at last.
        return_final_states: whether to return the state behind the last token too.
        state_dtype: taken for the signature's sake; states are never narrower than float32 here.

    Returns:
        [b, l, h, p] in the dtype of ``x``; with ``return_final_states`` also [b, h, p, n], at least in float32.

    Raises:
        UserError: ``seq_idx`` given, a chunk size below 1, or heads that the groups do not divide.
    """
    refuse_packed(seq_idx)
    heads, groups = x.size(2), B.size(2)
    if chunk_size < 1:
        raise UserError(f"chunk_size is {chunk_size}: a chunk of the state space model needs at least one token")
    if heads % groups:
        raise UserError(f"{heads} Mamba heads cannot be shared out among {groups} groups: choose ngroups that divides")
    wide = wide_dtype(x)
    step = _time_step(dt, dt_bias, dt_softplus, dt_limit, wide)
    if initial_states is None:
        initial_states = x.new_zeros(x.size(0), heads, x.size(3), B.size(3), dtype=wide)
    by_group = (groups, heads // groups)
    factor = x.new_zeros(heads, 1, dtype=wide) if D is None else D.to(wide).reshape(heads, -1)
    y, state = _Scan.apply(
        x.unflatten(2, by_group),
        step.unflatten(2, by_group),
        A.to(wide).view(by_group),
        B,
        C,
        factor.unflatten(0, by_group),
        initial_states.to(wide).unflatten(1, by_group),
        min(chunk_size, _LONGEST),
    )
    y = y.flatten(2, 3)
    if z is not None:
        y = (y * F.silu(z.to(wide))).to(x.dtype)
    return (y, state.flatten(1, 2)) if return_final_states else y


@torch.no_grad()
def selective_state_update(
    state: Tensor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    state_batch_indices: Tensor | None = None,
    intermediate_ssm_states: Tensor | None = None,
) -> Tensor:
    """The state space model over a few new tokens, one after another; for decoding, without gradients.

    Args:
        state: [b, h, p, n], overwritten by the state behind the last token.
        x: [b, s, h, p], or [b, h, p] for a single token; then so are ``dt`` and ``z``, and ``B`` and ``C`` [b, g, n].
        dt: [b, s, h, p].
        A: [h, p, n]. Cheapest where it and ``dt`` are expanded views of one number to a head.
        B: [b, s, g, n].
        C: [b, s, g, n].
        D: [h, p].
        z: [b, s, h, p].
        dt_bias: [h, p].
        dt_softplus: whether softplus is applied to the time steps.
        state_batch_indices: not supported.
        intermediate_ssm_states: not supported.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        UserError: ``state_batch_indices`` or ``intermediate_ssm_states`` given.
    """
    if state_batch_indices is not None or intermediate_ssm_states is not None:
        raise UserError("dynamic batching needs mamba_ssm, which is not installed: use a static inference context")
    if x.dim() == 3:
        x, dt, B, C = (tensor.unsqueeze(1) for tensor in (x, dt, B, C))
        z = None if z is None else z.unsqueeze(1)
        return selective_state_update(state, x, dt, A, B, C, D, z, dt_bias, dt_softplus).squeeze(1)
    wide = wide_dtype(x)
    groups = B.size(2)
    step = _time_step(_narrow(dt, -1), None if dt_bias is None else _narrow(dt_bias, -1), dt_softplus, None, wide)
    decay = torch.exp(step.unsqueeze(-1) * _narrow(A, -1, -2).to(wide))  # [b, s, h, p or 1, n or 1]
    update = step * x.to(wide)
    decay, update = (tensor.unflatten(2, (groups, -1)) for tensor in (decay, update))
    B, C = B.to(wide), C.to(wide)
    now = state.to(wide)  # the state itself where it is wide already
    by_group = now.unflatten(1, (groups, -1))
    outputs = []
    for token in range(x.size(1)):
        by_group.mul_(decay[:, token]).addcmul_(update[:, token].unsqueeze(-1), B[:, token, :, None, None])
        outputs.append((by_group.flatten(2, 3) @ C[:, token].unsqueeze(-1)).view(x.size(0), *x.shape[2:]))
    state.copy_(now)
    y = torch.stack(outputs, 1)
    if D is not None:
        y = y + x * D.to(wide)
    if z is not None:
        y = y * F.silu(z.to(wide))
    return y.to(x.dtype)


def refuse_packed(seq_idx: Tensor | None) -> None:
    """Raise a :class:`UserError` where several documents share a row: their states would have to be kept apart."""
    if seq_idx is not None:
        raise UserError("Mamba layers take packed sequences only with mamba_ssm, which is not installed: do not pack")


def wide_dtype(x: Tensor) -> torch.dtype:
    """What is computed in: float32, or float64 for a float64 ``x``."""
    return torch.promote_types(x.dtype, torch.float32)


def _time_step(
    dt: Tensor, bias: Tensor | None, softplus: bool, limit: tuple[float, float] | None, dtype: torch.dtype
) -> Tensor:
    dt = dt.to(dtype)
    if bias is not None:
        dt = dt + bias
    if softplus:
        dt = F.softplus(dt)
    return dt if limit in (None, (0.0, math.inf)) else dt.clamp(*limit)


def _narrow(x: Tensor, *dims: int) -> Tensor:
    """``x`` with size 1 where an expanded view repeats itself."""
    for dim in dims:
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    return x


class _Scan(torch.autograd.Function):
    """``forward(x, dt, A, B, C, D, state, chunk_size)`` with heads by group; y and the state behind the last token.

    Args:
        x: [b, l, g, r, p]
        dt: [b, l, g, r]
        A: [g, r]
        B: [b, l, g, n]
        C: [b, l, g, n]
        D: [g, r, p or 1]
        state: [b, g, r, p, n]
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, state: Tensor, chunk_size: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, dt, A, B, C, D, state)
        ctx.chunk_size = chunk_size
        y = torch.empty_like(x, memory_format=torch.contiguous_format)
        for span in _spans(x.size(1), chunk_size):
            chunk = _Chunk(x, dt, A, B, C, span)
            y[:, span] = (chunk.output(state) + chunk.x * D[:, None]).transpose(1, 2)
            state = chunk.next_state(state)
        return y, state

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, A, B, C, D, state = ctx.saved_tensors
        dy, dstate = grads
        chunks, states = [], []
        for span in _spans(x.size(1), ctx.chunk_size):
            chunks.append(span)
            states.append(state)
            state = _Chunk(x, dt, A, B, C, span).next_state(state)
        dx, ddt, dB, dC = (torch.empty_like(t, memory_format=torch.contiguous_format) for t in (x, dt, B, C))
        dA, dD = torch.zeros_like(A), torch.zeros_like(D)
        while chunks:
            span = chunks.pop()
            chunk = _Chunk(x, dt, A, B, C, span)
            dy_chunk = dy[:, span].transpose(1, 2).to(A.dtype)
            dD += (dy_chunk * chunk.x).sum((0, 2)).sum_to_size(D.shape)
            dx_chunk, ddt_chunk, dA_chunk, dB_chunk, dC_chunk, dstate = chunk.gradients(states.pop(), dy_chunk, dstate)
            dx[:, span] = (dx_chunk + dy_chunk * D[:, None]).transpose(1, 2)
            ddt[:, span] = ddt_chunk.transpose(1, 2)
            dB[:, span] = dB_chunk.transpose(1, 2)
            dC[:, span] = dC_chunk.transpose(1, 2)
            dA += dA_chunk
        return dx, ddt, dA, dB, dC, dD, dstate, None


def _spans(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


class _Chunk:
    """A chunk of :class:`_Scan`'s arguments, by group: x, u [b, g, q, r, p]; dt [b, g, q, r]; B, C [b, g, q, n]."""

    def __init__(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, span: slice):
        self.x, self.dt, self.B, self.C = (t[:, span].transpose(1, 2).to(A.dtype) for t in (x, dt, B, C))
        self.A = A[:, None]
        self.u = self.x * self.dt.unsqueeze(-1)
        # In float64, since small differences of large sums count; in bits, since exp2 takes a third of exp's time.
        self.bits = (self.dt.double() * self.A * math.log2(math.e)).cumsum(2)
        self.from_start = self.bits.to(A.dtype).exp2().unsqueeze(-1)
        self.to_end = (self.bits[:, :, -1:] - self.bits).to(A.dtype).exp2().unsqueeze(-1)
        self.total = self.from_start[:, :, -1].unsqueeze(-1)  # [b, g, r, 1, 1]

    def next_state(self, state: Tensor) -> Tensor:
        """The state behind the chunk, [b, g, r, p, n], from that before it."""
        return torch.addcmul(_outer(self.u * self.to_end, self.B), self.total, state)

    def output(self, state: Tensor) -> Tensor:
        """y without D, [b, g, q, r, p]."""
        scores = self._decay().mul_((self.C @ self.B.mT).unsqueeze(2))
        inside = scores @ self.u.transpose(2, 3)
        return torch.addcmul(inside.transpose(2, 3), self.from_start, _apply(self.C, state))

    def _decay(self) -> Tensor:
        """exp(c_t - c_s), 0 for s > t, where it may be infinite at first: [b, g, r, q, q]."""
        bits = self.bits.transpose(2, 3)
        return (bits.unsqueeze(-1) - bits.unsqueeze(-2)).to(self.u.dtype).exp2_().tril_()

    def gradients(self, state: Tensor, dy: Tensor, dstate: Tensor) -> tuple[Tensor, ...]:
        """Of x, dt, A, B, C and the state before the chunk.

        Args:
            state: the state before the chunk.
            dy: [b, g, q, r, p], the gradient of :meth:`output`.
            dstate: [b, g, r, p, n], the gradient of :meth:`next_state`.
        """
        products = self.C @ self.B.mT
        decay = self._decay()
        # Inside the chunk.
        dy_by_head = dy.transpose(2, 3)
        du = ((decay * products.unsqueeze(2)).mT @ dy_by_head).transpose(2, 3)
        dscores = (dy_by_head @ self.u.transpose(2, 3).mT).mul_(decay)
        dproducts = dscores.sum(2)
        pairs = dscores.mul_(products.unsqueeze(2))
        # A token's share in itself does not decay. Left in, it cancels but for rounding, which may be all that is left.
        pairs.diagonal(dim1=-2, dim2=-1).zero_()
        dexponent = (pairs.sum(-1) - pairs.sum(-2)).transpose(2, 3)
        # Through the state before the chunk.
        dseen = dy * self.from_start
        dexponent = dexponent + (dseen * _apply(self.C, state)).sum(-1)
        dC = dproducts @ self.B + dseen.flatten(3) @ state.flatten(2, 3)
        # Through the state behind it.
        du_end = self.to_end * _apply(self.B, dstate)
        left = (self.u * du_end).sum(-1)
        left[:, :, -1] = 0.0  # the last token has not decayed at the end
        dexponent -= left
        dexponent[:, :, -1] += left.sum(2) + (self.total * state * dstate).sum((-2, -1))
        dB = dproducts.mT @ self.C + (self.u * self.to_end).flatten(3) @ dstate.flatten(2, 3)
        du = du + du_end
        # A token's exponent counts in its own sum and in all later ones.
        decayed = dexponent.flip(2).cumsum(2).flip(2)
        ddt = decayed * self.A + (self.x * du).sum(-1)
        dA = (decayed * self.dt).sum((0, 2))
        dstate_before = torch.addcmul(_outer(dseen, self.C), self.total, dstate)
        return du * self.dt.unsqueeze(-1), ddt, dA, dB, dC, dstate_before


def _outer(rows: Tensor, columns: Tensor) -> Tensor:
    """[b, g, q, r, p] and [b, g, q, n] -> [b, g, r, p, n], summed over q; the heads of a group in one product."""
    return (rows.flatten(3).mT @ columns).unflatten(2, rows.shape[3:])


def _apply(columns: Tensor, state: Tensor) -> Tensor:
    """[b, g, q, n] and [b, g, r, p, n] -> [b, g, q, r, p], summed over n; the heads of a group in one product."""
    return (columns @ state.flatten(2, 3).mT).unflatten(3, state.shape[2:4])
