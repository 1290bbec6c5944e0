"""From a Megatron spec to the same spec with dropout between its norms and their linears."""

import copy
import functools
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoESubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec, get_module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Fill, Placement, Regularization, Statistics
from megatron_lengthgen.specs import transformer_engine
from megatron_lengthgen.specs.builders import (
    LinearWithDropout,
    NormWithDropout,
    RefusedLayer,
    SiteBuilder,
    bias_add_with_dropout,
    experts_with_dropout,
)
from megatron_lengthgen.specs.hybrid_stack import FinalNormHybridStack, FinalNormHybridStackSubmodules

__all__ = ["apply", "substitute"]


def substitute[Spec: (ModuleSpec, TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules)](
    spec: Spec,
    placement: Placement,
    *,
    p: float | None = None,
    fill: Fill = "zero",
    statistics: Statistics = "batch",
    sites: tuple[str, ...] = ("attention", "mlp", "mamba"),
) -> Spec:
    """A copy of ``spec`` whose model is regularised as asked; everything else, checkpoint keys included, is kept.

    Args:
        spec: ``ModuleSpec`` of a ``TransformerLayer`` (local or Transformer Engine; dense, mixture of experts,
            multi-latent attention), of a ``MambaLayer`` or of a ``HybridStack``; or ``TransformerBlockSubmodules``, or
            the ``MultiTokenPredictionBlockSubmodules`` that were made from the stock layer. Never changed.
        placement, p, fill, statistics, sites: See :class:`~megatron_lengthgen.regularization.Regularization`. ``p`` is
            bound in the spec; None reads ``config.hidden_dropout`` when the model is built.

    Returns:
        A new spec of the same type. Megatron's residual dropout is off in its layers, except for ``pre_norm``, which
        *is* that dropout. Norms of queries, keys and latents are left alone. Where a mixture-of-experts layer follows
        its norm, the experts' input is dropped and the router's is not. What a stack spec has and cannot be substituted
        is refused when it is built, since a pattern need not use it.

    Raises:
        UserError: an invalid choice, or a spec for which the substitution would be incomplete.

    Source: arXiv 2610.04518; ``megatron/core/models/gpt/gpt_layer_specs.py``,
    ``megatron/core/models/hybrid/hybrid_layer_specs.py``.
    """
    return apply(spec, Regularization(placement=placement, p=p, fill=fill, statistics=statistics, sites=tuple(sites)))


def apply[Spec: (ModuleSpec, TransformerBlockSubmodules, MultiTokenPredictionBlockSubmodules)](
    spec: Spec, regularization: Regularization
) -> Spec:
    """:func:`substitute` with its choices in one value."""
    if not isinstance(spec, MultiTokenPredictionBlockSubmodules) and _has_dropout(spec):
        raise UserError("this spec has dropout already: substitute into the stock spec")
    if regularization.is_active and any(map(transformer_engine.is_for_inference, _parts(spec))):
        raise UserError(
            "this spec is one of Megatron's for inference (transformer_impl 'inference_optimized'), which fuse norms, "
            "communication and linears: substitute into the Transformer Engine spec, or choose placement 'none'"
        )
    if isinstance(spec, TransformerBlockSubmodules):
        return _block(spec, regularization)
    if isinstance(spec, MultiTokenPredictionBlockSubmodules):
        return _mtp_block(spec, regularization)
    if not isinstance(spec, ModuleSpec):
        raise UserError(
            f"cannot substitute into {type(spec).__name__}: give the ModuleSpec of a layer or of a HybridStack, or "
            "TransformerBlockSubmodules"
        )
    if _is_a(spec, HybridStack):
        return _stack(spec, regularization)
    if regularization.is_active:
        for site, what in (("output", "the final norm"), ("mtp", "norms of multi-token prediction")):
            if site in regularization.sites:
                raise UserError(
                    f"site {site!r} follows {what}, which a layer spec does not reach: substitute into the block's "
                    "spec, for instance through megatron_lengthgen.specs.gpt.block_spec"
                )
    return _layer(spec, regularization)


def _is_a(spec: Any, cls: type) -> bool:
    module = get_module(spec)
    return isinstance(module, type) and issubclass(module, cls)


def _has(site: str, regularization: Regularization) -> bool:
    return regularization.is_active and site in regularization.sites


def _block(block: TransformerBlockSubmodules, regularization: Regularization) -> TransformerBlockSubmodules:
    # Layers that share one spec object share the new one too.
    new = {id(spec): _layer(spec, regularization) for spec in block.layer_specs or []}
    layer_norm = copy.deepcopy(block.layer_norm)
    if _has("output", regularization):
        if layer_norm is None:
            raise UserError("site 'output' needs a final norm, and this block spec has none: leave the site out")
        layer_norm = NormWithDropout(layer_norm, "output", regularization)
    return replace(block, layer_specs=[new[id(spec)] for spec in block.layer_specs or []], layer_norm=layer_norm)


def _mtp_block(
    block: MultiTokenPredictionBlockSubmodules, regularization: Regularization
) -> MultiTokenPredictionBlockSubmodules:
    new = {id(spec): _mtp_layer(spec, regularization) for spec in block.layer_specs}
    return replace(block, layer_specs=[new[id(spec)] for spec in block.layer_specs])


def _mtp_layer(spec: ModuleSpec, regularization: Regularization) -> ModuleSpec:
    """A layer of multi-token prediction; a model layer that has dropout already is kept."""
    spec = copy.deepcopy(spec)
    parts = spec.submodules
    if not isinstance(parts, MultiTokenPredictionLayerSubmodules) or parts.mtp_model_layer is None:
        raise UserError(
            "this multi-token-prediction spec builds its layers from a hybrid pattern, in a stock HybridStack that "
            "dropout does not reach: leave mtp_num_layers out, or set placement 'none'"
        )
    if not _has_dropout(parts.mtp_model_layer):
        parts.mtp_model_layer = _layer(parts.mtp_model_layer, regularization)
    for site, field in (("mtp", "enorm"), ("mtp", "hnorm"), ("output", "layer_norm")):
        if _has(site, regularization):
            setattr(parts, field, NormWithDropout(getattr(parts, field), site, regularization))
    return spec


def _has_dropout(spec: Any) -> bool:
    """Has ``spec``, or any part of it, been through a substitution that put dropout there?"""
    return any(isinstance(part, SiteBuilder) for part in _parts(spec))


def _parts(spec: Any) -> Iterator[Any]:
    """``spec`` and all that it is made of."""
    yield spec
    parts: Any = ()
    if isinstance(spec, functools.partial):
        parts = spec.keywords.values()
    elif isinstance(spec, dict):
        parts = spec.values()
    elif isinstance(spec, (list, tuple)):
        parts = spec
    elif is_dataclass(spec) and not isinstance(spec, type):
        parts = vars(spec).values()
    for part in parts:
        yield from _parts(part)


def _stack(spec: ModuleSpec, regularization: Regularization) -> ModuleSpec:
    spec = copy.deepcopy(spec)
    parts = spec.submodules
    if get_module(spec) not in (HybridStack, FinalNormHybridStack) or not isinstance(parts, HybridStackSubmodules):
        raise UserError(f"cannot substitute into a spec of {_name(spec)}: give one of megatron.core's HybridStack")
    if _has("mtp", regularization):
        raise UserError(
            "site 'mtp' is in multi-token prediction, whose layers a hybrid model builds past its spec's stack: leave "
            "the site out"
        )
    for name, layer in vars(parts).items():
        if name.endswith("_layer") and layer is not IdentityOp:
            setattr(parts, name, _layer_of_stack(layer, regularization))
    if not regularization.is_active:
        return spec
    final_norm = getattr(parts, "final_norm", TENorm)
    if _has("output", regularization):
        final_norm = NormWithDropout(final_norm, "output", regularization)
    known = {field.name: getattr(parts, field.name) for field in fields(HybridStackSubmodules)}
    spec.module = FinalNormHybridStack
    spec.submodules = FinalNormHybridStackSubmodules(**known, final_norm=final_norm)
    return spec


def _layer_of_stack(spec: ModuleSpec, regularization: Regularization) -> ModuleSpec:
    """A stack has slots for kinds of layers that its pattern may lack: what is refused is refused when it is built."""
    try:
        return _layer(spec, regularization)
    except UserError as error:
        return ModuleSpec(module=RefusedLayer, params={"reason": str(error)})


def _layer(spec: ModuleSpec, regularization: Regularization) -> ModuleSpec:
    spec = copy.deepcopy(spec)
    if _is_a(spec, TransformerLayer) and isinstance(spec.submodules, TransformerLayerSubmodules):
        return _transformer_layer(spec, regularization)
    if _is_a(spec, MambaLayer) and isinstance(spec.submodules, MambaLayerSubmodules):
        return _mamba_layer(spec, regularization)
    raise UserError(
        f"cannot substitute into a spec of {_name(spec)} with submodules of type "
        f"{type(spec.submodules).__name__}: only layers of type TransformerLayer and MambaLayer are supported"
    )


def _transformer_layer(spec: ModuleSpec, regularization: Regularization) -> ModuleSpec:
    p = regularization.p if regularization.placement == "pre_norm" else 0.0
    if p is not None:
        spec.params["hidden_dropout"] = p
    if regularization.is_active:
        _attention(spec.submodules, regularization)
        _mlp(spec.submodules, regularization)
    return spec


def _attention(parts: TransformerLayerSubmodules, regularization: Regularization) -> None:
    if parts.cross_attention is not IdentityOp:
        raise UserError(f"this spec has cross-attention, {_name(parts.cross_attention)}, which is not supported")
    if parts.self_attention is IdentityOp:
        return
    attention = getattr(parts.self_attention, "submodules", None)
    if attention is None:
        raise UserError(
            f"self_attention of this spec, {_name(parts.self_attention)}, shows no linears to put dropout at"
        )
    if _has("attention", regularization):
        # Of gated delta net, of attention, of multi-latent attention with its norm fused; else the norm is separate.
        known = ("in_proj", "linear_qkv", "linear_qkv_down_proj")
        linear = next((name for name in known if hasattr(attention, name)), "linear_qkv")
        site = NormWithDropout(None, "attention", regularization)
        _after_norm(parts, "input_layernorm", attention, linear, "self_attention", site)
    for linear in ("linear_proj", "out_proj"):
        if hasattr(attention, linear) and _has(linear, regularization):
            _before_linear(attention, linear, regularization)


def _mlp(parts: TransformerLayerSubmodules, regularization: Regularization) -> None:
    if parts.mlp is IdentityOp:
        return
    mlp = _submodules(parts.mlp)
    if isinstance(mlp, MoESubmodules):
        _experts(parts, regularization)
        return
    if not isinstance(mlp, MLPSubmodules):
        raise UserError(f"mlp of this spec is {_name(parts.mlp)}, neither an MLP nor a mixture of experts")
    inside = [site for site in ("mlp", "linear_fc2") if _has(site, regularization)]
    if inside and transformer_engine.is_op_fused(parts.mlp):
        raise UserError(
            f"site {inside[0]!r} is inside an MLP that Transformer Engine fuses as a whole (use_te_op_fuser): switch "
            "use_te_op_fuser off, or leave the site out"
        )
    if _has("mlp", regularization):
        site = NormWithDropout(None, "mlp", regularization)
        _after_norm(parts, "pre_mlp_layernorm", mlp, "linear_fc1", "mlp", site)
    if _has("linear_fc2", regularization):
        _before_linear(mlp, "linear_fc2", regularization)


def _mamba_layer(spec: ModuleSpec, regularization: Regularization) -> ModuleSpec:
    parts = spec.submodules
    p = regularization.p if regularization.placement == "pre_norm" else 0.0
    if p is not None:
        parts.mamba_bda = bias_add_with_dropout(p)
    if not regularization.is_active:
        return spec
    mixer = getattr(parts.mixer, "submodules", None)
    if mixer is None:
        raise UserError(f"mixer of this Mamba layer, {_name(parts.mixer)}, shows no linears to put dropout at")
    if _has("mamba", regularization):
        _after_norm(parts, "norm", mixer, "in_proj", "mixer", NormWithDropout(None, "mamba", regularization))
    if _has("out_proj", regularization):
        _before_linear(mixer, "out_proj", regularization)
    return spec


def _after_norm(parts: Any, norm: str, holder: Any, linear: str, path: str, site: NormWithDropout) -> None:
    """Put ``site`` into the slot ``parts.norm``; a norm that is fused into ``holder.linear`` is taken apart first.

    ``path`` is the name of the module that ``holder`` describes.
    """
    builder = getattr(parts, norm)
    if builder is IdentityOp:
        stock = getattr(holder, linear, None)
        if not transformer_engine.is_fused(stock):
            raise UserError(
                f"site {site.site!r}: {norm} of this spec is IdentityOp, and {linear}, {_name(stock)}, has no norm of "
                "its own: leave the site out"
            )
        if linear == "linear_qkv_down_proj":
            raise UserError(
                "the down-projection of multi-latent attention is fused with its norm (mla_down_proj_fusion), and "
                "dropout does not fit between them: switch mla_down_proj_fusion off"
            )
        setattr(holder, linear, transformer_engine.column_parallel_linear())
        builder = transformer_engine.unfused_norm
        keys = {f"{norm}.": f"{path}.{linear}.layer_norm_"}
        parts.sharded_state_dict_keys_map = {**parts.sharded_state_dict_keys_map, **keys}
    setattr(parts, norm, replace(site, builder=builder))


def _before_linear(holder: Any, linear: str, regularization: Regularization) -> None:
    site = SiteBuilder(getattr(holder, linear), linear, regularization)
    setattr(holder, linear, ModuleSpec(module=LinearWithDropout, params={"site": site}))


def _experts(parts: TransformerLayerSubmodules, regularization: Regularization) -> None:
    if _has("linear_fc2", regularization):
        raise UserError(
            "site 'linear_fc2' is inside the experts of a mixture-of-experts layer, where tokens have lost their "
            "places: leave the site out"
        )
    if not _has("mlp", regularization):
        return
    if regularization.placement == "vpad" and regularization.statistics == "norm":
        raise UserError(
            "statistics 'norm' is not available before the experts of a mixture of experts, which do not know their "
            "norm: choose statistics 'batch'"
        )
    if parts.pre_mlp_layernorm is IdentityOp:
        raise UserError("pre_mlp_layernorm of this mixture-of-experts layer is IdentityOp: no norm feeds its experts")
    stock = parts.mlp
    if not isinstance(stock, functools.partial):
        stock = functools.partial(get_module(stock), submodules=stock.submodules, **stock.params)
    keywords = {name: value for name, value in stock.keywords.items() if name != "submodules"}
    site = SiteBuilder(functools.partial(stock.func, *stock.args, **keywords), "mlp", regularization)
    parts.mlp = functools.partial(experts_with_dropout, site=site, submodules=stock.keywords["submodules"])


def _submodules(spec: Any) -> Any:
    if isinstance(spec, functools.partial):
        return spec.keywords.get("submodules")
    return getattr(spec, "submodules", None)


def _name(builder: Any) -> str:
    module = get_module(builder) if isinstance(builder, ModuleSpec) else builder
    return getattr(module, "__name__", None) or type(module).__name__
