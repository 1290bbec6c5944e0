"""A Mamba-2 mixer between its two projections: convolution, scan and gate in one call, as in training."""

import math

import torch
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.ssm.convolution import causal_conv1d
from megatron_lengthgen.ssm.gated_norm import gated_rms_norm
from megatron_lengthgen.ssm.scan import chunk_scan, refuse_packed

__all__ = ["split_conv1d_scan"]


def split_conv1d_scan(
    zxbcdt: Tensor,
    conv1d_weight: Tensor,
    conv1d_bias: Tensor | None,
    dt_bias: Tensor,
    A: Tensor,
    D: Tensor,
    chunk_size: int,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    activation: str | None = "silu",
    rmsnorm_weight: Tensor | None = None,
    rmsnorm_eps: float = 1e-6,
    headdim: int | None = None,
    ngroups: int = 1,
    norm_before_gate: bool = True,
    state_dtype: torch.dtype | None = None,
    initial_conv_states: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``mamba_ssm``'s ``mamba_split_conv1d_scan_combined`` without its output projection.

    Without ``rmsnorm_weight`` the result is gated by ``silu(z)`` and left as it is. Megatron's ``MambaMixer`` then
    applies its norm without a gate, which is the norm behind the gate (``norm_before_gate=False``).

    Args:
        zxbcdt: [b, l, 2 * h * p + 2 * g * n + h], what ``in_proj`` returns: z, x, B, C and dt side by side.
        conv1d_weight: [h * p + 2 * g * n, w].
        conv1d_bias: [h * p + 2 * g * n].
        dt_bias: [h].
        A: [h], negative.
        D: [h], or [h, p].
        chunk_size: as in :func:`.scan.chunk_scan`.
        initial_states: [b, h, p, n], the state of the scan; zeros if None.
        seq_idx: not supported.
        dt_limit: what the time steps are clamped to.
        return_final_states: whether to return both states behind the last token too.
        activation: as in :func:`.convolution.causal_conv1d`.
        rmsnorm_weight: [h * p], the gain of a gated norm by group; None for the gate alone.
        rmsnorm_eps: that norm's.
        headdim: p, needed where ``D`` is [h].
        ngroups: g.
        norm_before_gate: that norm's.
        state_dtype: as in :func:`.scan.chunk_scan`.
        initial_conv_states: [b, h * p + 2 * g * n, w - 1], the state of the convolution; zeros if None.

    Returns:
        [b, l, h * p]; with ``return_final_states`` also the states of the scan and of the convolution.

    Raises:
        UserError: ``seq_idx`` given, no head size, or widths that do not fit each other.
    """
    refuse_packed(seq_idx)
    if D.dim() == 2:
        headdim = D.size(1)
    if headdim is None:
        raise UserError(f"headdim is missing, and D of shape {list(D.shape)} does not tell it: give headdim")
    heads, channels = D.size(0), conv1d_weight.size(0)
    dim = heads * headdim
    state, rest = divmod(channels - dim, 2 * ngroups)
    if rest or state < 1 or zxbcdt.size(-1) != dim + channels + heads:
        raise UserError(
            f"{heads} Mamba heads of size {headdim} in {ngroups} groups do not fit a convolution of {channels} "
            f"channels and a projection of {zxbcdt.size(-1)}: check headdim, ngroups and the sizes of the weights"
        )
    z, xBC, dt = zxbcdt.split([dim, channels, heads], dim=-1)
    xBC, conv_states = causal_conv1d(
        xBC.mT,
        conv1d_weight,
        conv1d_bias,
        initial_states=initial_conv_states,
        return_final_states=True,
        activation=activation,
    )
    x, B, C = xBC.mT.split([dim, ngroups * state, ngroups * state], dim=-1)
    y, states = chunk_scan(
        x.unflatten(-1, (heads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, state)),
        C.unflatten(-1, (ngroups, state)),
        chunk_size,
        D,
        z.unflatten(-1, (heads, headdim)) if rmsnorm_weight is None else None,
        dt_bias,
        initial_states,
        dt_softplus=True,
        dt_limit=dt_limit,
        return_final_states=True,
        state_dtype=state_dtype,
    )
    y = y.flatten(2)
    if rmsnorm_weight is not None:
        y = gated_rms_norm(y, rmsnorm_weight, z, rmsnorm_eps, dim // ngroups, norm_before_gate)
    return (y, states, conv_states) if return_final_states else y
