"""Megatron's Mamba-2 mixer, which can also go on from where a sequence's earlier chunks left it."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.ssm import mamba_mixer
from torch import Tensor

from megatron_lengthgen.attention.cache import SequenceCache
from megatron_lengthgen.ssm.convolution import causal_conv1d, causal_conv1d_update
from megatron_lengthgen.ssm.scan import selective_state_update

__all__ = ["CachedMambaMixer"]


class CachedMambaMixer(mamba_mixer.MambaMixer):
    """``MambaMixer`` that a generation engine can run chunk by chunk, with the same parameters and checkpoint keys.

    Megatron's static inference starts every prompt from an empty state and so takes it in one piece; its dynamic
    inference needs kernels of CUDA. While :attr:`caches` is set, this mixer starts from the states in there and leaves
    the new ones: per sequence the last ``d_conv - 1`` inputs of the convolution ``[1, channels, d_conv - 1]`` and the
    state-space state ``[1, heads, headdim, d_state]``, whatever the length.

    Source: ``megatron/core/ssm/mamba_mixer.py``; Dao and Gu, arXiv 2405.21060.
    """

    #: Caches, one per row of the batch, while a generation engine runs this layer; else None.
    caches: Sequence[SequenceCache] | None = None

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As ``MambaMixer.forward``: ``[s, b, h]`` in and out, and the bias of ``out_proj``."""
        if self.caches is None:
            return super().forward(hidden_states, inference_context, **kwargs)
        projected, _ = self.in_proj(hidden_states)
        return self.out_proj(self._continue(projected, self.caches))

    def _continue(self, projected: Tensor, caches: Sequence[SequenceCache]) -> Tensor:
        """[s, b, z x B C dt] -> [s, b, d_inner]; the states in ``caches`` move on by s tokens."""
        inner, group, heads = self.d_inner_local_tp, self.ngroups_local_tp * self.d_state, self.nheads_local_tp
        z, xBC, dt = projected.transpose(0, 1).split([inner, inner + 2 * group, heads], dim=-1)
        convolution, state = self._states(caches)
        weight = self.conv1d_weight.squeeze(1)
        if xBC.size(1) == 1:
            xBC = causal_conv1d_update(xBC, convolution, weight, self.conv1d_bias, self.activation)
        else:
            xBC, convolution = causal_conv1d(
                xBC.mT,
                weight,
                self.conv1d_bias,
                None,
                convolution,
                return_final_states=True,
                activation=self.activation,
            )
            xBC = xBC.mT
        x, B, C = xBC.split([inner, group, group], dim=-1)
        x, gate = (part.unflatten(-1, (heads, self.headdim)).contiguous() for part in (x, z))
        B, C = (part.unflatten(-1, (self.ngroups_local_tp, self.d_state)).contiguous() for part in (B, C))
        y, state = self._scan(x, dt, B, C, None if self.rmsnorm else gate, state)
        for row, cache in enumerate(caches):
            cache.states[self.layer_number] = (convolution[row : row + 1], state[row : row + 1])
        y = y.flatten(2).transpose(0, 1).contiguous()
        return self.norm(y, z.transpose(0, 1).contiguous()) if self.rmsnorm else y

    def _states(self, caches: Sequence[SequenceCache]) -> tuple[Tensor, Tensor]:
        """The states of all rows, side by side and free to be written to; zeros where a sequence starts."""
        weight = self.conv1d_weight
        empty = (
            weight.new_zeros(1, weight.size(0), self.d_conv - 1),
            weight.new_zeros(1, self.nheads_local_tp, self.headdim, self.d_state, dtype=torch.float32),
        )
        states = [cache.states.get(self.layer_number, empty) for cache in caches]
        convolution, state = (torch.cat(parts) for parts in zip(*states, strict=True))
        return convolution, state

    def _scan(
        self, x: Tensor, dt: Tensor, B: Tensor, C: Tensor, gate: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x [b, s, h, p], dt [b, s, h], B and C [b, s, g, n] -> y [b, s, h, p] and the state behind it."""
        A, D, dt_bias = -torch.exp(self.A_log.float()), self.D.float(), self.dt_bias.float()
        if x.size(1) > 1:
            return mamba_mixer.mamba_chunk_scan_combined(
                *(x, dt.contiguous(), A, B, C, self.chunk_size),
                D=D,
                z=gate,
                dt_bias=dt_bias,
                dt_softplus=True,
                initial_states=state,
                return_final_states=True,
            )
        y = selective_state_update(
            *(state, x, dt.unsqueeze(-1).expand_as(x), A.view(-1, 1, 1).expand(state.shape[1:]), B, C),
            D=D.unsqueeze(-1).expand(x.shape[2:]),
            z=gate,
            dt_bias=dt_bias.unsqueeze(-1).expand(x.shape[2:]),
            dt_softplus=True,
        )
        return y, state
