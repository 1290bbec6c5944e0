"""A norm and the dropout behind it as one kernel, where there is one for them.

``LENGTHGEN_KERNEL`` is the switch: ``auto`` (default) takes the kernel on CUDA devices with Triton, ``plain`` never
takes it, and ``fused`` insists on it. Masks are the same, results differ by rounding. The kernel computes masks from
coordinates, so a site that draws from Megatron's random streams (no :mod:`.binding`) stays on the plain path.
"""

import importlib.util
import os
from typing import Any

import torch
from torch import Tensor

from megatron_lengthgen.choices import check_choice
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.specs import torch_norm, transformer_engine
from megatron_lengthgen.specs.site import Hook, SiteDropout
from megatron_lengthgen.specs.statistics import merge_over_ranks

__all__ = ["SWITCH", "FusedNorm", "describe", "fuse"]

SWITCH = "LENGTHGEN_KERNEL"
_KERNELS = ("auto", "fused", "plain")


def fuse(norm: torch.nn.Module, dropout: SiteDropout, config: Any, eps: float) -> bool:
    """Let ``norm``, just built, compute its dropout in the same pass, if the switch and this machine say so.

    Module, class, parameters and checkpoint keys stay the stock ones; only this instance's ``forward`` is another.

    Args:
        norm: RMSNorm or LayerNorm of PyTorch, of this package or of Transformer Engine.
        dropout: That follows it.
        config: Megatron's, from which the norm was built: ``normalization`` and ``layernorm_zero_centered_gamma``.
        eps: That it was built with.

    Returns:
        Whether it does. If not, nothing was changed.

    Raises:
        UserError: an unknown value of the switch; or ``fused``, and there is no Triton, no CUDA, or no kernel for
            this class of norm.
    """
    chosen = _chosen()
    is_known = type(norm) in (*torch_norm.CLASSES, *transformer_engine.norm_classes())
    if chosen == "fused" and not is_known:
        raise UserError(
            f"{SWITCH} is 'fused', and there is no kernel for the norm {type(norm).__name__} in front of site "
            f"{dropout.site!r}: set it to 'auto'"
        )
    if not (is_known and _is_taken(chosen)):
        return False
    norm.forward = FusedNorm(norm, dropout, config, eps)
    return True


def describe() -> str:
    """What computes norm and dropout on this machine, in words.

    Raises:
        UserError: as :func:`fuse`.
    """
    chosen = _chosen()
    if _is_taken(chosen):
        import triton

        return f"norm and dropout in one Triton {triton.__version__} kernel ({SWITCH}={chosen})"
    return f"norm and dropout by PyTorch ({SWITCH}={chosen}{_lack() if chosen == 'auto' else ''})"


def _chosen() -> str:
    chosen = os.environ.get(SWITCH, "auto")
    check_choice(SWITCH, chosen, _KERNELS)
    return chosen


def _is_taken(chosen: str) -> bool:
    lack = _lack()
    if chosen == "fused" and lack and not _is_interpreted():
        raise UserError(f"{SWITCH} is 'fused'{lack}: set it to 'auto'")
    return chosen == "fused" or (chosen == "auto" and not lack)


def _lack() -> str:
    if importlib.util.find_spec("triton") is None:
        return ", and Triton cannot be imported here"
    return "" if torch.cuda.is_available() else ", and there is no CUDA device here"


def _is_interpreted() -> bool:
    """Triton's interpreter runs kernels on a CPU, very slowly: for tests."""
    if importlib.util.find_spec("triton") is None:
        return False
    from megatron_lengthgen.dropout import fused

    return fused.IS_INTERPRETED


class FusedNorm(Hook):
    """In place of the forward of one norm: in training norm and dropout in one pass, else the stock forward.

    A tensor that the kernel does not take (another dtype than the weight's, no coordinates, another device) goes
    through the stock norm and the plain dropout.
    """

    def __init__(self, norm: torch.nn.Module, dropout: SiteDropout, config: Any, eps: float) -> None:
        super().__init__(dropout)
        self.norm = norm
        self.eps = eps
        self.centred = config.normalization == "LayerNorm"
        self.zero_centred = bool(config.layernorm_zero_centered_gamma)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.norm.training:
            return self._stock(x)
        p, where = self.dropout.draw(x.shape)
        if where is None or p == 0.0 or not self._takes(x):
            return self.dropout(self._stock(x), self.norm)
        from megatron_lengthgen.dropout import fused

        parameters = dict(self.norm.named_parameters(recurse=False))
        norm = fused.Norm(parameters["weight"], parameters.get("bias"), self.eps, self.centred, self.zero_centred)
        chosen = self.dropout.regularization
        if chosen.placement == "pre_linear":
            return fused.norm_dropout(x, norm, p, where)
        moments = None
        if chosen.statistics == "batch":
            total = merge_over_ranks(fused.norm_moments(x, norm), self.dropout.token_group())
            moments = total.mean, total.variance
        return fused.norm_dropout(x, norm, p, where, placement="vpad", fill=chosen.fill, moments=moments)

    def _stock(self, x: Tensor) -> Tensor:
        return type(self.norm).forward(self.norm, x)

    def _takes(self, x: Tensor) -> bool:
        from megatron_lengthgen.dropout import fused

        weight: Any = self.norm.weight
        return (
            x.dtype in fused.DTYPES
            and x.dtype == weight.dtype
            and x.device == weight.device
            and (x.is_cuda or fused.IS_INTERPRETED)
        )
