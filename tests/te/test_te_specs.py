"""Substitution into specs of the real Transformer Engine, against Megatron's stock ones: what a model consists of."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from megatron.core.extensions import transformer_engine as extensions
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_with_inference_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_inference_stack_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import import_module
from megatron.training.models.gpt import GPTModelConfig
from megatron.training.models.hybrid import HybridModelConfig
from te_models import CASES, Case, assert_equal, build, checkpoint_content, make_config, parameters, regularized, values

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import site
from megatron_lengthgen.specs.substitution import substitute

pytestmark = pytest.mark.usefixtures("megatron_single")
PLACEMENTS = ("none", "pre_norm", "pre_linear", "vpad")

#: What a layer's dropout hooks to; of MoE layers the experts' layer and its router.
HOOKED = {
    "dense": ["input_layernorm", "self_attention.linear_proj", "pre_mlp_layernorm", "mlp.linear_fc2"],
    "mla": ["input_layernorm", "self_attention.linear_proj", "pre_mlp_layernorm", "mlp.linear_fc2"],
    "moe": ["input_layernorm", "mlp"],
}


def regularization(placement: Any, case: Case) -> Regularization:
    return Regularization(placement, p=0.1, **({} if placement == "pre_norm" else {"sites": case.sites}))


def pair(case: Case, placement: Any) -> tuple[Any, Any]:
    """The stock model and ours, of the same seed."""
    config = case.config()
    ours = regularized(case.specs(config), regularization(placement, case))
    return build(case, case.specs(config), config), build(case, ours, config)


def snapshot(value: Any) -> Any:
    """A spec as nested tuples that compare by content."""
    if isinstance(value, functools.partial):
        return ("partial", value.func, value.args, snapshot(value.keywords))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), [(f.name, snapshot(getattr(value, f.name))) for f in dataclasses.fields(value)])
    if isinstance(value, dict):
        return [(key, snapshot(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [snapshot(item) for item in value]
    return value


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_consists_of_what_the_stock_models_does(name: str, placement: str) -> None:
    """Keys, shapes, offsets, dtypes, replicas and kinds of objects, extra states included."""
    stock, ours = pair(CASES[name], placement)
    assert checkpoint_content(ours) == checkpoint_content(stock)
    assert bool(list(site.sites(ours))) == (placement in ("pre_linear", "vpad"))


@pytest.mark.parametrize("name", CASES)
def test_parameters_begin_with_the_stock_values_and_attributes(name: str) -> None:
    """Attributes tell Megatron how gradients are reduced, and what is a share of a tensor-parallel rank."""
    stock, ours = pair(CASES[name], "vpad")
    assert_equal(values(ours), values(stock))
    expected = parameters(stock)
    for key, parameter in parameters(ours).items():
        # Linear sets allreduce to its default, LayerNormLinear leaves it out.
        assert {"allreduce": True, **vars(parameter)} == {"allreduce": True, **vars(expected[key])}, key
        assert (parameter.dtype, parameter.device) == (expected[key].dtype, expected[key].device)


@pytest.mark.parametrize("name", CASES)
def test_a_state_dict_loads_into_its_own_model(name: str) -> None:
    """Strictly, and with the extra states that the stock model has, those alone."""
    stock, ours = pair(CASES[name], "vpad")
    state = ours.state_dict()
    ours.load_state_dict(state, strict=True)
    unfused = {f"{name}._extra_state" for name, *_ in site.sites(ours)} - stock.state_dict().keys()
    assert not unfused & state.keys()
    assert sum(key.endswith("_extra_state") for key in state) == sum(
        key.endswith("_extra_state") for key in stock.state_dict()
    )


def test_norms_that_stand_alone_in_the_stock_model_keep_their_extra_state() -> None:
    state = pair(CASES["qk_norm"], "vpad")[1].state_dict()
    assert "decoder.final_layernorm._extra_state" in state
    assert "decoder.layers.0.self_attention.q_layernorm._extra_state" in state
    assert "decoder.layers.0.input_layernorm._extra_state" not in state
    state = pair(CASES["moe"], "vpad")[1].state_dict()
    assert "decoder.layers.0.pre_mlp_layernorm._extra_state" in state


@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
@pytest.mark.parametrize("name", CASES)
def test_fused_linears_are_taken_apart_and_all_else_is_the_stock_models(name: str, placement: str) -> None:
    import transformer_engine.pytorch as te

    case = CASES[name]
    stock, ours = pair(case, placement)
    expected = {name: type(module) for name, module in stock.named_modules()}
    taken_apart = []
    for path, module in list(stock.named_modules()):
        # Multi-latent attention has norms of queries and keys, which feed no linear of ours: they stay fused.
        if type(module) is extensions.TELayerNormColumnParallelLinear and not path.endswith("_up_proj"):
            layer, part, linear = path.rsplit(".", 2)
            norm = {"linear_fc1": "pre_mlp_layernorm", "linear_qkv": "input_layernorm"}.get(linear)
            norm = norm or ("norm" if part == "mixer" else "input_layernorm")
            expected[path] = extensions.TEColumnParallelLinear
            expected[f"{layer}.{norm}"] = getattr(te, case.config().normalization)
            taken_apart.append((module, ours.get_submodule(path), ours.get_submodule(f"{layer}.{norm}")))
    if case.pattern is not None:
        expected["decoder"] = type(ours.decoder)
        assert type(ours.decoder).__mro__[1] is type(stock.decoder)
    assert {name: type(module) for name, module in ours.named_modules()} == expected
    assert taken_apart
    for fused, linear, norm in taken_apart:
        assert (norm.eps, norm.zero_centered_gamma) == (fused.eps, fused.zero_centered_gamma)
        for attribute in ("in_features", "out_features", "use_bias", "te_return_bias", "parallel_mode", "ub_name"):
            assert getattr(linear, attribute) == getattr(fused, attribute), attribute


@pytest.mark.parametrize("name", HOOKED)
def test_dropout_is_hooked_where_a_seam_is(name: str) -> None:
    case = CASES[name]
    _, ours = pair(case, "pre_linear")
    found = [(path, dropout.site) for path, _, dropout in site.sites(ours)]
    assert sorted(path for path, _ in found) == sorted(
        f"decoder.layers.{layer}.{part}" for layer in range(2) for part in HOOKED[name]
    )
    behind = {"input_layernorm": "attention", "pre_mlp_layernorm": "mlp", "mlp": "mlp"}
    for path, name_of_site in found:
        assert name_of_site == behind.get(path.rsplit(".", 1)[-1], path.rsplit(".", 1)[-1])
    for path, module, dropout in site.sites(ours):
        if path.endswith("norm"):  # one kernel for both: CUDA is there, as far as a norm can tell
            assert module.forward.dropout is dropout
            assert not module._forward_hooks
        else:
            hooks = module._forward_pre_hooks.values()
            assert [hook.dropout for hook in hooks if hasattr(hook, "dropout")] == [dropout]
    if name == "moe":
        (before,) = ours.decoder.layers[0].mlp._forward_pre_hooks.values()
        (for_router,) = ours.decoder.layers[0].mlp.router._forward_pre_hooks.values()
        assert for_router.__self__ is before


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", CASES)
def test_the_given_spec_is_not_changed(name: str, placement: str) -> None:
    case = CASES[name]
    config = case.config()
    specs = case.specs(config)
    before = snapshot(specs)
    build(case, regularized(specs, regularization(placement, case)), config)
    assert snapshot(specs) == before


def test_everything_else_in_a_layer_spec_is_kept() -> None:
    stock = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    ours = substitute(stock, "vpad", p=0.1)
    parts, old = ours.submodules, stock.submodules
    assert ours.params == {"hidden_dropout": 0.0}
    assert parts.self_attention.submodules.linear_qkv is extensions.TEColumnParallelLinear
    assert parts.mlp.keywords["submodules"].linear_fc1 is extensions.TEColumnParallelLinear
    assert parts.sharded_state_dict_keys_map == {
        **old.sharded_state_dict_keys_map,
        "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
        "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
    }
    parts.self_attention.submodules.linear_qkv = extensions.TELayerNormColumnParallelLinear
    parts.mlp.keywords["submodules"].linear_fc1 = extensions.TELayerNormColumnParallelLinear
    parts.sharded_state_dict_keys_map = old.sharded_state_dict_keys_map
    parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    assert snapshot(parts) == snapshot(old)


@pytest.mark.parametrize(
    ("spec", "sites", "message"),
    [
        (
            lambda: get_gpt_layer_with_transformer_engine_spec(multi_latent_attention=True, mla_down_proj_fusion=True),
            ("attention",),
            "the down-projection of multi-latent attention is fused with its norm .* switch mla_down_proj_fusion off",
        ),
        (get_gpt_layer_with_inference_spec, ("attention",), "one of Megatron's for inference .*or choose placement"),
        (
            lambda: get_gpt_layer_with_inference_spec(multi_latent_attention=True, num_experts=4),
            ("mlp",),
            "one of Megatron's for inference .*'inference_optimized'",
        ),
        (lambda: hybrid_inference_stack_spec, ("mlp",), "substitute into the Transformer Engine spec"),
        (
            lambda: get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True),
            ("attention", "mlp"),
            "site 'mlp' is inside an MLP that Transformer Engine fuses .* switch use_te_op_fuser off",
        ),
        (
            lambda: get_gpt_layer_with_transformer_engine_spec(
                use_te_op_fuser=True, use_grouped_gemm_for_dense_mlp=True
            ),
            ("linear_fc2",),
            "site 'linear_fc2' is inside an MLP",
        ),
    ],
)
def test_specs_without_a_seam_are_refused(spec: Any, sites: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        substitute(spec(), "vpad", p=0.1, sites=sites)
    substitute(spec(), "none")


def test_attention_of_a_layer_with_a_fused_mlp_can_be_dropped() -> None:
    spec = substitute(get_gpt_layer_with_transformer_engine_spec(use_te_op_fuser=True), "vpad", sites=("attention",))
    assert spec.submodules.mlp.keywords["submodules"].linear_fc1 is extensions.TELayerNormColumnParallelLinear


@pytest.mark.parametrize("name", ["gpt_none", "gpt_pre_norm", "gpt_pre_linear", "gpt_vpad", "gpt_vpad_mean_fill"])
@pytest.mark.filterwarnings("ignore:gpt_")
def test_named_gpt_specs_build_through_megatrons_builder(name: str) -> None:
    config = GPTModelConfig(
        transformer=make_config(hidden_dropout=0.1),
        transformer_layer_spec=import_module(("megatron_lengthgen.specs.gpt", name)),
        vocab_size=96,
        position_embedding_type="rope",
    )
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    active = name not in ("gpt_none", "gpt_pre_norm")
    assert len(list(site.sites(model))) == (4 if active else 0)
    check_attention(model.decoder.layers[1], active)


@pytest.mark.parametrize(
    "name", ["hybrid_none", "hybrid_pre_norm", "hybrid_pre_linear", "hybrid_vpad", "hybrid_vpad_mean_fill"]
)
def test_named_hybrid_specs_build_through_megatrons_builder(name: str) -> None:
    config = HybridModelConfig(
        transformer=make_config(hidden_dropout=0.1, is_hybrid_model=True),
        hybrid_stack_spec=import_module(("megatron_lengthgen.specs.hybrid", name)),
        hybrid_layer_pattern="*-",
        vocab_size=96,
        position_embedding_type="rope",
    )
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    active = name not in ("hybrid_none", "hybrid_pre_norm")
    assert len(list(site.sites(model))) == (2 if active else 0)
    check_attention(model.decoder.layers[0], active)


def check_attention(layer: torch.nn.Module, active: bool) -> None:
    """Of Transformer Engine, and fused where nothing is to go between norm and linear."""
    attention = layer.self_attention
    fused = extensions.TELayerNormColumnParallelLinear
    assert type(attention.linear_qkv) is (extensions.TEColumnParallelLinear if active else fused)
    assert type(attention.core_attention) is extensions.TEDotProductAttention
    assert type(attention.linear_proj) is extensions.TERowParallelLinear
