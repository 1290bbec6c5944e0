"""Mamba's short causal convolution, one filter per channel, with its past as an argument.

Shapes: b batch, d channels, l length, w filter width. The state is the last inputs: w - 1 suffice to go on. Arguments
are those of ``causal_conv1d``'s ``causal_conv1d_fn`` and Megatron's ``causal_conv1d_update``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.ssm.scan import refuse_packed, wide_dtype

__all__ = ["causal_conv1d", "causal_conv1d_update"]


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    seq_idx: Tensor | None = None,
    initial_states: Tensor | None = None,
    return_final_states: bool = False,
    activation: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Convolve a sequence; differentiable in every tensor, computed in float32 at least.

    Args:
        x: [b, d, l], any length from 1.
        weight: [d, w]; the last column belongs to the current token.
        bias: [d].
        seq_idx: not supported.
        initial_states: [b, d, w - 1], the inputs before the first; zeros if None.
        return_final_states: whether to return the last w - 1 inputs too.
        activation: None, or ``"silu"`` (``"swish"``), applied to the result.

    Returns:
        [b, d, l] in the dtype of ``x``; with ``return_final_states`` also [b, d, w - 1].

    Raises:
        UserError: ``seq_idx`` given, or another activation.
    """
    refuse_packed(seq_idx)
    past = weight.size(1) - 1
    inputs = F.pad(x, (past, 0)) if initial_states is None else torch.cat([initial_states.to(x.dtype), x], dim=-1)
    wide = wide_dtype(x)
    y = F.conv1d(
        inputs.to(wide), weight.to(wide).unsqueeze(1), None if bias is None else bias.to(wide), groups=x.size(1)
    )
    y = _activate(y, activation).to(x.dtype)
    return (y, inputs[..., inputs.size(-1) - past :]) if return_final_states else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: Tensor | None = None,
    intermediate_conv_states: Tensor | None = None,
) -> Tensor:
    """Convolve a few new tokens; for decoding.

    Args:
        x: [b, s, d], or [b, d] for a single token.
        conv_state: [b, d, at least w - 1], the last inputs; overwritten by those that are last now.
        weight: [d, w].
        bias: [d].
        activation: None, or ``"silu"`` (``"swish"``).
        conv_state_indices: not supported.
        intermediate_conv_states: not supported.

    Returns:
        The shape and dtype of ``x``.

    Raises:
        UserError: ``conv_state_indices`` or ``intermediate_conv_states`` given, or another activation.
    """
    if conv_state_indices is not None or intermediate_conv_states is not None:
        raise UserError("dynamic batching needs causal_conv1d's kernels on CUDA: use a static inference context")
    if x.dim() == 2:
        return causal_conv1d_update(x.unsqueeze(1), conv_state, weight, bias, activation).squeeze(1)
    width = weight.size(1)
    inputs = torch.cat([conv_state, x.mT.to(conv_state.dtype)], dim=-1)
    conv_state.copy_(inputs[..., x.size(1) :])
    wide = wide_dtype(x)
    # [b, d, s, w]; for so few tokens a convolution costs more to set up than to compute
    windows = inputs[..., inputs.size(-1) - x.size(1) - width + 1 :].unfold(-1, width, 1)
    y = (windows.to(wide) * weight.to(wide).unsqueeze(1)).sum(-1)
    if bias is not None:
        y = y + bias.to(wide).unsqueeze(-1)
    return _activate(y, activation).mT.to(x.dtype)


def _activate(y: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return y
    if activation in ("silu", "swish"):
        return F.silu(y)
    raise UserError(f"activation {activation!r} is not one of Mamba's convolution: choose silu, or none")
