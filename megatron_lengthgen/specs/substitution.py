"""From a Megatron spec to the same spec with dropout between its norms and their linears."""

import copy
from dataclasses import replace
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import TransformerBlockSubmodules
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, get_module, get_submodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Fill, Placement, Regularization, Statistics
from megatron_lengthgen.specs.norm import NormWithDropout

__all__ = ["LAYER_NORMS", "apply", "substitute"]

#: Site -> the field of ``TransformerLayerSubmodules`` whose norm feeds it.
LAYER_NORMS = {"attention": "input_layernorm", "mlp": "pre_mlp_layernorm"}


def substitute[Spec: (ModuleSpec, TransformerBlockSubmodules)](
    spec: Spec,
    placement: Placement,
    *,
    p: float | None = None,
    fill: Fill = "zero",
    statistics: Statistics = "batch",
    sites: tuple[str, ...] = ("attention", "mlp"),
) -> Spec:
    """A copy of ``spec`` whose model is regularised as asked; everything else, checkpoint keys included, is kept.

    Args:
        spec: ``ModuleSpec`` of a dense ``TransformerLayer`` with separate norms (Megatron's local layer spec), or
            ``TransformerBlockSubmodules`` of such layers. Never changed.
        placement, p, fill, statistics, sites: See :class:`~megatron_lengthgen.regularization.Regularization`. ``p`` is
            bound in the spec; None reads ``config.hidden_dropout`` when the model is built.

    Returns:
        A new spec of the same type. Megatron's residual dropout is off in its layers, except for ``pre_norm``, which
        *is* that dropout.

    Raises:
        UserError: an invalid choice, or a spec for which the substitution would be incomplete.

    Source: arXiv 2610.04518; ``megatron/core/models/gpt/gpt_layer_specs.py``.
    """
    return apply(spec, Regularization(placement=placement, p=p, fill=fill, statistics=statistics, sites=tuple(sites)))


def apply[Spec: (ModuleSpec, TransformerBlockSubmodules)](spec: Spec, regularization: Regularization) -> Spec:
    """:func:`substitute` with its choices in one value."""
    if isinstance(spec, TransformerBlockSubmodules):
        return _block(spec, regularization)
    if not isinstance(spec, ModuleSpec):
        raise UserError(
            f"cannot substitute into {type(spec).__name__}: give the ModuleSpec of a TransformerLayer, or "
            "TransformerBlockSubmodules"
        )
    if "output" in regularization.sites and regularization.placement in ("pre_linear", "vpad"):
        raise UserError(
            "site 'output' follows the final norm, which a layer spec does not reach: substitute into "
            "TransformerBlockSubmodules, for instance through megatron_lengthgen.specs.gpt.block_spec"
        )
    return _layer(spec, regularization)


def _block(block: TransformerBlockSubmodules, regularization: Regularization) -> TransformerBlockSubmodules:
    layer_specs = block.layer_specs or []
    # Layers that share one spec object share the new one too.
    new = {id(spec): _layer(spec, regularization) for spec in layer_specs}
    layer_norm = copy.deepcopy(block.layer_norm)
    if "output" in regularization.sites and regularization.placement in ("pre_linear", "vpad"):
        if layer_norm is None:
            raise UserError("site 'output' needs a final norm, and this block spec has none: leave the site out")
        layer_norm = _with_dropout(layer_norm, "output", regularization)
    return replace(block, layer_specs=[new[id(spec)] for spec in layer_specs], layer_norm=layer_norm)


def _layer(spec: ModuleSpec, regularization: Regularization) -> ModuleSpec:
    _refuse_unsupported(spec)
    spec = copy.deepcopy(spec)
    if regularization.placement == "pre_norm":
        if regularization.p is not None:
            spec.params["hidden_dropout"] = regularization.p
        return spec
    spec.params["hidden_dropout"] = 0.0
    if regularization.placement == "none":
        return spec
    for site, field in LAYER_NORMS.items():
        if site in regularization.sites:
            setattr(spec.submodules, field, _with_dropout(getattr(spec.submodules, field), site, regularization))
    return spec


def _with_dropout(builder: Any, site: str, regularization: Regularization) -> NormWithDropout:
    return NormWithDropout(builder, site, regularization)


def _refuse_unsupported(spec: ModuleSpec) -> None:
    """Raise :class:`UserError` unless every site of the layer has the seam that the substitution needs."""
    module = get_module(spec)
    name = getattr(module, "__name__", repr(module))
    if not (isinstance(module, type) and issubclass(module, TransformerLayer)):
        raise UserError(f"cannot substitute into a spec of {name} yet: only TransformerLayer specs are supported")
    submodules = spec.submodules
    if not isinstance(submodules, TransformerLayerSubmodules):
        raise UserError(f"the spec of {name} has submodules of type {type(submodules).__name__}, not a layer's")
    for field in LAYER_NORMS.values():
        builder = getattr(submodules, field)
        if isinstance(builder, NormWithDropout):
            raise UserError(f"{field} of this spec has dropout already: substitute into the stock spec")
        if builder is IdentityOp:
            raise UserError(
                f"{field} of this spec is IdentityOp: its norm is fused into the linear (Transformer Engine), where "
                "no dropout fits between them yet; use the local layer spec (transformer_impl: local)"
            )
        if "transformer_engine" in getattr(builder, "__module__", ""):
            raise UserError(
                f"{field} of this spec is Transformer Engine's {getattr(builder, '__name__', builder)}, which is not "
                "supported yet: use the local layer spec (transformer_impl: local)"
            )
    attention = get_module(submodules.self_attention)
    if not (isinstance(attention, type) and issubclass(attention, SelfAttention)):
        raise UserError(
            f"self_attention of this spec is {getattr(attention, '__name__', attention)}: only SelfAttention is "
            "supported yet, not multi-latent attention or other variants"
        )
    try:
        dense = isinstance(get_submodules(submodules.mlp), MLPSubmodules)
    except (ValueError, KeyError):
        dense = False
    if not dense:
        raise UserError("mlp of this spec is not a dense MLP: mixture-of-experts layers are not supported yet")
