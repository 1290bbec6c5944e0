"""A norm builder that builds the stock norm and lets dropout follow it."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_lengthgen.dropout.functional import pre_linear_dropout, vpad
from megatron_lengthgen.dropout.masks import check_probability
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.statistics import batch_statistics, norm_statistics, token_group
from megatron_lengthgen.specs.streams import Place, stream

__all__ = ["NormWithDropout", "SiteDropout", "resolve_probability", "sites"]


def resolve_probability(p: float | None, config: Any) -> float:
    """The drop probability that a spec gives a model: ``p``, or ``config.hidden_dropout`` where ``p`` is None."""
    try:
        return check_probability(config.hidden_dropout if p is None else p)
    except ValueError as error:
        raise UserError(f"{error} (from hidden_dropout)" if p is None else str(error)) from None


class SiteDropout:
    """Forward hook of a norm: in training, its output goes through dropout. Has no parameters, buffers or state.

    A hook, and not a module around the norm: module names, parameter names, checkpoint keys and the norm's class
    (which Megatron and its converters look at) stay the stock model's.
    """

    def __init__(self, site: str, regularization: Regularization, p: float, config: Any) -> None:
        self.site = site
        self.place: Place = "after_block" if site == "output" else "block"
        self.regularization = regularization
        self.p = p
        # Not the config itself: a deepcopy of the model would copy it once per site.
        self.sequence_parallel = bool(config.sequence_parallel)
        self.context_parallel = config.context_parallel_size > 1
        self.zero_centered = bool(config.layernorm_zero_centered_gamma)

    def __call__(self, norm: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if not norm.training:
            return None
        if isinstance(output, tuple):  # (normalised, residual), see TransformerLayer._forward_attention
            return self.apply(norm, output[0]), *output[1:]
        return self.apply(norm, output)

    def apply(self, norm: torch.nn.Module, x: Tensor) -> Tensor:
        """Dropout on ``x``, ``[s, b, h]``, the output of ``norm``."""
        if self.regularization.placement == "pre_linear":
            with self._stream():
                return pre_linear_dropout(x, self.p)
        if self.regularization.statistics == "norm":
            mean, variance = norm_statistics(norm, zero_centered=self.zero_centered)
        else:
            group = token_group(sequence_parallel=self.sequence_parallel, context_parallel=self.context_parallel)
            mean, variance = batch_statistics(x, group)
        with self._stream():
            return vpad(x, self.p, mean, variance, fill=self.regularization.fill)

    def _stream(self) -> Any:
        return stream(self.place, sequence_parallel=self.sequence_parallel)

    def __repr__(self) -> str:
        return f"SiteDropout({self.site}, p={self.p}, {self.regularization})"


@dataclasses.dataclass(frozen=True)
class NormWithDropout:
    """Megatron ``LayerNormBuilder`` (``megatron/core/transformer/torch_norm.py``) around another one.

    Attributes:
        builder: The stock builder, called as ``builder(config=, hidden_size=, eps=)``.
        site: Which linear the norm feeds: ``attention``, ``mlp`` or ``output``.
        regularization: Placement ``pre_linear`` or ``vpad``, and its details.
    """

    builder: Callable[..., torch.nn.Module]
    site: str
    regularization: Regularization

    def __call__(self, *, config: Any, hidden_size: int, eps: float) -> torch.nn.Module:
        """Build the stock norm and hook dropout to it; the bare stock norm where p is 0."""
        norm = self.builder(config=config, hidden_size=hidden_size, eps=eps)
        p = resolve_probability(self.regularization.p, config)
        if p > 0.0:
            norm.register_forward_hook(SiteDropout(self.site, self.regularization, p, config))
        return norm


def sites(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, SiteDropout]]:
    """Every dropout site of a built model: name of its norm, the norm, the hook."""
    for name, module in model.named_modules():
        for hook in module._forward_hooks.values():
            if isinstance(hook, SiteDropout):
                yield name, module, hook
