"""Norms of Megatron's local backend where Apex is absent, with sequence parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lengthgen.errors import UserError

__all__ = ["CLASSES", "RMSNorm", "TorchNorm"]


def _scale(wide: Tensor, eps: float) -> Tensor:
    return wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()


def _normalise(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """PyTorch's RMSNorm bit for bit, and the scale of each token."""
    wide = x.float()
    scale = _scale(wide, eps)
    return (wide * scale).mul_(weight).to(x.dtype), scale


def _normalise_in_place(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As :func:`_normalise`, to the bit, in one buffer: fresh memory is most of a norm's time."""
    wide = x.clone() if x.dtype is torch.float32 else x.float()
    return wide.mul_(_scale(wide, eps)).mul_(weight).type_as(x)


class _RMSNorm(torch.autograd.Function):
    """At half of PyTorch's time: backward works from ``x`` and one scale per token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, scale = _normalise(x, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = ctx.saved_tensors
        normed = x.float() * scale
        grad = grads[0].float()
        product = grad * normed
        inner = (product @ weight.float()).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight).sub_(normed.mul_(inner)).mul_(scale)
        grad_weight = product.flatten(0, -2).sum(0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None


class RMSNorm(torch.nn.RMSNorm):
    """``torch.nn.RMSNorm`` over the last dimension; on a CPU with a leaner forward and backward, same output bits."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise ``x``, ``[..., h]``."""
        # CUDA has a fused kernel. Other dtypes than these are left to PyTorch too.
        if x.device.type != "cpu" or x.dtype not in (torch.bfloat16, torch.float32) or x.dtype != self.weight.dtype:
            return super().forward(x)
        assert self.eps is not None
        if not torch.is_grad_enabled():
            return _normalise_in_place(x, self.weight, self.eps)
        return _RMSNorm.apply(x, self.weight, self.eps)


class _ZeroCentredRMSNorm(torch.nn.RMSNorm):
    """Gain ``1 + weight`` with ``weight`` 0 at first; in float32 and cast once, as Transformer Engine computes it."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        gain = 1.0 + self.weight.float()
        return F.rms_norm(x.float(), self.normalized_shape, gain, self.eps).to(x.dtype)


class _ZeroCentredLayerNorm(torch.nn.LayerNorm):
    """The same with mean and bias."""

    def reset_parameters(self) -> None:
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        gain = 1.0 + self.weight.float()
        return F.layer_norm(x.float(), self.normalized_shape, gain, self.bias.float(), self.eps).to(x.dtype)


_NORMS: dict[tuple[str, bool], type[torch.nn.Module]] = {
    ("RMSNorm", False): RMSNorm,
    ("RMSNorm", True): _ZeroCentredRMSNorm,
    ("LayerNorm", False): torch.nn.LayerNorm,
    ("LayerNorm", True): _ZeroCentredLayerNorm,
}


#: What :class:`TorchNorm` and Megatron's ``WrappedTorchNorm`` build.
CLASSES: tuple[type[torch.nn.Module], ...] = (torch.nn.RMSNorm, *_NORMS.values())


class TorchNorm:
    """Builder like Megatron's ``WrappedTorchNorm``, also with zero-centred gain and under sequence parallelism.

    There each rank sees a part of the tokens, so that a parameter's gradient is summed over the tensor-parallel ranks:
    Megatron does so for parameters marked ``sequence_parallel`` (``finalize_model_grads``). ``persist_layer_norm`` and
    ``memory_efficient_layer_norm`` choose among Apex kernels, which are not used here, and change no result.

    Source: ``megatron/core/transformer/torch_norm.py``, ``megatron/core/fusions/fused_layer_norm.py``.
    """

    def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:  # type: ignore[misc]
        """The norm of ``config.normalization`` over ``hidden_size`` channels.

        Raises:
            UserError: ``config.normalization`` is another than RMSNorm and LayerNorm.
        """
        norm_class = _NORMS.get((config.normalization, bool(config.layernorm_zero_centered_gamma)))
        if norm_class is None:
            raise UserError(f"normalization must be RMSNorm or LayerNorm, got {config.normalization!r}")
        norm = norm_class(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return norm
