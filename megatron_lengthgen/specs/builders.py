"""Builders in a spec's slots: each builds the stock module and lets dropout precede or follow it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.fused_norm import fuse
from megatron_lengthgen.specs.site import AfterNorm, BeforeExperts, BeforeLinear, SiteDropout, resolve_probability

__all__ = [
    "LinearWithDropout",
    "NormWithDropout",
    "RefusedLayer",
    "SiteBuilder",
    "bias_add_with_dropout",
    "experts_with_dropout",
]


@dataclasses.dataclass(frozen=True)
class SiteBuilder:
    """A stock builder, and the dropout that goes with what it builds.

    Attributes:
        builder: The stock builder: class, ``ModuleSpec`` or function.
        site: Name of the site, of :data:`megatron_lengthgen.regularization.SITES`.
        regularization: Placement ``pre_linear`` or ``vpad``, and its details.
    """

    builder: Any
    site: str
    regularization: Regularization

    def dropout(self, config: Any) -> SiteDropout | None:
        """The site's dropout under ``config``; None where p is 0, so that the module stays the bare stock one."""
        p = resolve_probability(self.regularization.p, config)
        return SiteDropout(self.site, self.regularization, p, config) if p > 0.0 else None


class NormWithDropout(SiteBuilder):
    """Megatron ``LayerNormBuilder`` (``megatron/core/transformer/torch_norm.py``) whose norm's output is dropped."""

    def __call__(self, *, config: Any, hidden_size: int, eps: float) -> torch.nn.Module:
        """Build the stock norm and hook dropout to it, or let one kernel do both."""
        norm = self.builder(config=config, hidden_size=hidden_size, eps=eps)
        if (dropout := self.dropout(config)) and not fuse(norm, dropout, config, eps):
            norm.register_forward_hook(AfterNorm(dropout))
        return norm


class LinearWithDropout:
    """Builds a linear whose input is dropped. A class, because Megatron fills some slots with ``build_module``, which
    calls classes and nothing else: use it as ``ModuleSpec(module=LinearWithDropout, params={"site": ...})``."""

    def __new__(cls, *args: Any, site: SiteBuilder, config: Any, **kwargs: Any) -> torch.nn.Module:  # type: ignore[misc]
        """Build the stock linear and hook dropout to it."""
        linear = site.builder(*args, config=config, **kwargs)
        if dropout := site.dropout(config):
            linear.register_forward_pre_hook(BeforeLinear(dropout))
        return linear


class RefusedLayer:
    """In the slot of a layer that cannot be substituted, and that a model may not use."""

    def __new__(cls, *args: Any, reason: str, **kwargs: Any) -> torch.nn.Module:  # type: ignore[misc]
        """Raise :class:`UserError` with ``reason``."""
        raise UserError(reason)


def experts_with_dropout(*, site: SiteBuilder, submodules: Any, **kwargs: Any) -> torch.nn.Module:
    """Build the stock ``MoELayer`` and hook dropout to its experts' input; its router sees the undropped one.

    Args:
        site: Around the stock layer's builder, without its submodules.
        submodules: ``MoESubmodules``, an argument of its own because Megatron reads it off a layer spec's partial
            (``megatron/core/transformer/spec_utils.py::get_submodules``).
        kwargs: What ``TransformerLayer`` gives its MLP.
    """
    layer = site.builder(submodules=submodules, **kwargs)
    if dropout := site.dropout(kwargs["config"]):
        hook = BeforeExperts(dropout)
        layer.register_forward_pre_hook(hook)
        layer.router.register_forward_pre_hook(hook.for_router)
    return layer


def bias_add_with_dropout(p: float) -> Callable[[bool, bool], Callable[..., Any]]:
    """Megatron's ``get_bias_dropout_add`` with a probability of its own, for layers that take theirs from the config.

    The function that is returned has ``p`` as its attribute ``hidden_dropout``.

    Source: ``megatron/core/fusions/fused_bias_dropout.py``.
    """

    def bias_dropout_add(training: bool, fused: bool) -> Callable[..., Any]:
        add = get_bias_dropout_add(training, fused)
        return lambda x_with_bias, residual, hidden_dropout: add(x_with_bias, residual, p)

    bias_dropout_add.hidden_dropout = p  # type: ignore[attr-defined]
    return bias_dropout_add
