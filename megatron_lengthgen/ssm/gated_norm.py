"""RMSNorm with a gate, by groups of channels: what stands between a Mamba-2 scan and its output projection."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lengthgen.ssm.scan import wide_dtype

__all__ = ["GatedRMSNorm", "gated_rms_norm"]


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    z: Tensor | None = None,
    eps: float = 1e-5,
    group_size: int | None = None,
    norm_before_gate: bool = True,
) -> Tensor:
    """``norm(x) * silu(z)``, or ``norm(x * silu(z))``; in float32 at least, as ``mamba_ssm``'s ``rms_norm_ref``.

    Args:
        x: [..., d].
        weight: [d], the gain.
        z: [..., d], the gate; None for none.
        eps: added to the mean square.
        group_size: channels that are normalised together; None for all.
        norm_before_gate: which of the two.

    Returns:
        [..., d] in the dtype of ``x``.
    """
    wide = wide_dtype(x)
    y = x.to(wide)
    gate = None if z is None else F.silu(z.to(wide))
    if gate is not None and not norm_before_gate:
        y = y * gate
    size = x.size(-1) if group_size is None else group_size
    y = F.rms_norm(y.unflatten(-1, (-1, size)), (size,), None, eps).flatten(-2) * weight.to(wide)
    if gate is not None and norm_before_gate:
        y = y * gate
    return y.to(x.dtype)


class GatedRMSNorm(nn.Module):
    """:func:`gated_rms_norm` with its gain, ``weight`` [hidden_size]; arguments are those of ``mamba_ssm``'s class."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        group_size: int | None = None,
        norm_before_gate: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.eps, self.group_size, self.norm_before_gate = eps, group_size, norm_before_gate
        self.weight = nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, x: Tensor, z: Tensor | None = None) -> Tensor:
        """Normalise ``x`` [..., hidden_size], gated by ``z``."""
        return gated_rms_norm(x, self.weight, z, self.eps, self.group_size, self.norm_before_gate)
