"""The substitution over all kinds of specs: mixtures of experts, latent attention, multi-token prediction, hybrids."""

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer.attention import CrossAttention
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.models.gpt import GPTModelConfig
from spec_models import (
    assert_same,
    build,
    build_hybrid,
    hybrid_stack,
    logits,
    losses,
    make_config,
    sharded_keys,
    snapshot,
    stock_block,
    stock_layer,
    train_step,
)
from torch import Tensor

from megatron_lengthgen.dropout.functional import moments, pre_linear_dropout, vpad
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import gpt, hybrid
from megatron_lengthgen.specs.binding import bind
from megatron_lengthgen.specs.site import sites
from megatron_lengthgen.specs.substitution import apply, substitute

pytestmark = pytest.mark.usefixtures("megatron_single")
PLACEMENTS = ("none", "pre_norm", "pre_linear", "vpad")
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "none",
    "add_bias_linear": False,
}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 32}
LATENT = {
    "config_class": MLATransformerConfig,
    "num_query_groups": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}


class LatentCore(torch.nn.Module):
    """Core attention for keys and values of two widths: Megatron's local one does not take multi-latent attention."""

    def __init__(self, *_: Any, softmax_scale: float, **__: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        heads = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        context = torch.nn.functional.scaled_dot_product_attention(*heads, is_causal=True, scale=self.scale)
        return context.permute(2, 0, 1, 3).flatten(2)


def latent_block(config: Any) -> Any:
    block = stock_block(config)
    block.layer_specs[0].submodules.self_attention.submodules.core_attention = LatentCore
    return block


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of model.

    Attributes:
        fields: Of its config.
        stock: Its spec, given the config.
        build: The model, given spec and config.
        sites: Modules with a default site, by layer of the pattern.
    """

    fields: dict[str, Any]
    stock: Callable[[Any], Any]
    build: Callable[..., Any]
    sites: tuple[tuple[str, ...], ...]

    def config(self, **fields: Any) -> Any:
        return make_config(**{**self.fields, **fields})

    def model(self, spec: Any = None, **fields: Any) -> Any:
        config = self.config(**fields)
        return self.build(self.stock(config) if spec is None else spec, config)

    def dropped(self, placement: str, **choices: Any) -> Any:
        return self.model(substitute(self.stock(self.config()), placement, **{"p": 0.3, **choices}))

    @property
    def site_names(self) -> list[str]:
        return [f"decoder.layers.{i}.{name}" for i, names in enumerate(self.sites) for name in names]


def gpt_kind(*names: str, **fields: Any) -> Kind:
    block = latent_block if "kv_lora_rank" in fields else stock_block
    return Kind({"num_layers": 2, **fields}, block, build, (names, names))


def hybrid_kind(pattern: str, **fields: Any) -> Kind:
    names = {"*": ("input_layernorm",), "-": ("pre_mlp_layernorm",), "E": ("mlp",), "M": ("norm",)}
    return Kind(
        {"num_layers": len(pattern), "add_bias_linear": False, **fields},
        lambda config: hybrid_stack(),
        functools.partial(build_hybrid, pattern=pattern),
        tuple(names[symbol] for symbol in pattern),
    )


KINDS = {
    "dense": gpt_kind("input_layernorm", "pre_mlp_layernorm"),
    "dense, LayerNorm, QK norm": gpt_kind(
        "input_layernorm", "pre_mlp_layernorm", qk_layernorm=True, normalization="LayerNorm"
    ),
    "experts": gpt_kind("input_layernorm", "mlp", **EXPERTS),
    "experts, some shared": gpt_kind("input_layernorm", "mlp", **SHARED),
    "latent attention": gpt_kind("input_layernorm", "pre_mlp_layernorm", **LATENT),
    "latent attention, QK norm": gpt_kind("input_layernorm", "pre_mlp_layernorm", qk_layernorm=True, **LATENT),
    "hybrid": hybrid_kind("*-*-"),
    "hybrid, experts": hybrid_kind("*E*-", **SHARED),
    "hybrid, Mamba": hybrid_kind("M*-M"),
}
over_kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
EXPERT_KINDS = ["experts", "experts, some shared", "hybrid, experts"]


@over_kinds
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_evaluation_p_zero_and_checkpoint_equal_the_stock_specs(megatron_single, kind, placement):
    stock, ours, idle = kind.model(), kind.dropped(placement), kind.dropped(placement, p=0.0)
    assert sharded_keys(ours) == sharded_keys(stock)
    assert torch.equal(logits(ours.eval()), logits(stock.eval()))
    expected = train_step(stock, megatron_single)
    assert_same(train_step(idle, megatron_single), expected)
    if placement == "none":
        assert_same(train_step(ours, megatron_single), expected)
        return
    loss, gradients = train_step(ours, megatron_single)
    assert not torch.equal(loss, expected[0])
    assert gradients.keys() == expected[1].keys()
    assert all(grad.isfinite().all() and grad.any() for grad in gradients.values())


@over_kinds
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_given_spec_is_not_changed(kind, placement):
    spec = kind.stock(kind.config())
    before = snapshot(spec)
    kind.model(substitute(spec, placement, p=0.3))
    assert snapshot(spec) == before


@over_kinds
def test_every_norm_that_feeds_a_linear_has_a_site_and_no_other(kind):
    model = kind.dropped("pre_linear", sites=("attention", "mlp", "mamba", "output"))
    final = [name for name, _ in model.named_modules() if name in ("decoder.final_layernorm", "decoder.final_norm")]
    assert [name for name, *_ in sites(model)] == kind.site_names + final
    assert len(final) == 1
    # What is left: norms of queries, keys and latents, and those before experts, whose dropout is at the layer.
    norms = {
        name for name, module in model.named_modules() if isinstance(module, torch.nn.RMSNorm | torch.nn.LayerNorm)
    }
    without = norms - {name for name, *_ in sites(model)}
    assert {name.rpartition(".")[2] for name in without} <= {
        "q_layernorm",
        "k_layernorm",
        "kv_layernorm",
        "pre_mlp_layernorm",
    }
    assert len([name for name in without if name.endswith("pre_mlp_layernorm")]) == sum(
        isinstance(module, MoELayer) for module in model.modules()
    )


@over_kinds
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
def test_full_recompute_gives_the_same_gradients(megatron_single, kind, placement, bound):
    found = []
    for fields in ({}, FULL):
        config = kind.config(**fields)
        choices = ("attention", "mlp", "mamba", "output", "linear_proj", "out_proj")
        model = kind.build(substitute(kind.stock(config), placement, p=0.3, sites=choices), config)
        if bound:
            bind([model], seed=1, step=lambda: 0, microbatches=lambda: 1)
        found.append(train_step(model, megatron_single))
    assert_same(*found)


def test_a_hybrid_of_attention_and_mlp_is_the_gpt_model_of_half_as_many_layers(megatron_single):
    """The stock ``HybridStack`` needs Transformer Engine's norm: here ours is held against Megatron's ``GPTModel``."""
    config = make_config(num_layers=2, add_bias_linear=False)
    dense = build(gpt.block_spec(config, Regularization("none")), config)
    double = make_config(num_layers=4, add_bias_linear=False)
    model = build_hybrid(hybrid.stack_spec("local", Regularization("none")), double, "*-*-")
    weights = {}
    for name, value in dense.state_dict().items():
        parts = name.split(".")
        if parts[1] == "layers":
            parts[2] = str(2 * int(parts[2]) + (parts[3] in ("pre_mlp_layernorm", "mlp")))
        weights[".".join(parts).replace("final_layernorm", "final_norm")] = value
    model.load_state_dict(weights)
    assert torch.equal(logits(model.eval()), logits(dense.eval()))
    loss, gradients = train_step(model, megatron_single)
    expected, expected_gradients = train_step(dense, megatron_single)
    assert torch.equal(loss, expected)
    assert len(gradients) == len(expected_gradients)
    assert torch.equal(
        gradients["decoder.layers.3.mlp.linear_fc1.weight"],
        expected_gradients["decoder.layers.1.mlp.linear_fc1.weight"],
    )


def input_of(module: torch.nn.Module, seen: dict[str, Tensor], name: str, *, prepend: bool = False) -> None:
    """Note the first argument of ``module``: what reaches its forward, or with ``prepend`` what its hooks get."""

    def note(_: torch.nn.Module, args: tuple[Any, ...]) -> None:
        seen[name] = args[0].detach().clone()

    module.register_forward_pre_hook(note, prepend=prepend)


@pytest.mark.parametrize("name", EXPERT_KINDS)
@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
def test_experts_get_the_dropped_input_and_the_router_the_undropped(name, placement):
    model = KINDS[name].dropped(placement, sites=("mlp",))
    index = next(i for i, layer in enumerate(model.decoder.layers) if isinstance(getattr(layer, "mlp", None), MoELayer))
    layer = model.decoder.layers[index]
    seen: dict[str, Tensor] = {}
    layer.pre_mlp_layernorm.register_forward_hook(lambda _, __, output: seen.update(norm=output.detach().clone()))
    for part in ("router", "experts", "shared_experts"):
        if getattr(layer.mlp, part, None) is not None:
            input_of(getattr(layer.mlp, part), seen, part)
    input_of(layer.mlp, seen, "dropped")
    layer.mlp.register_forward_pre_hook(lambda *_: seen.update(state=torch.get_rng_state()), prepend=True)
    losses(model.train())
    normed, dropped = seen["norm"], seen["dropped"]
    assert torch.equal(seen["router"], normed)
    torch.set_rng_state(seen["state"])
    if placement == "pre_linear":
        expected = pre_linear_dropout(normed, 0.3)
    else:
        expected = vpad(normed, 0.3, moments(normed).mean, moments(normed).variance)
    assert torch.equal(dropped, expected)
    assert not torch.equal(dropped, normed)
    if "shared_experts" in seen:
        assert torch.equal(seen["shared_experts"], dropped)
    # Each token comes to its two experts, as it was dropped once.
    rows = {tuple(row) for row in dropped.flatten(0, 1).tolist()}
    assert {tuple(row) for row in seen["experts"].tolist()} == rows
    assert len(seen["experts"]) == 2 * len(rows)


@pytest.mark.parametrize("name", EXPERT_KINDS)
def test_the_router_learns_from_the_undropped_input(megatron_single, name):
    """With the loss of the router alone, the input's gradient is that of the stock layer."""
    kind = KINDS[name]
    x = torch.randn(8, 2, 48, generator=torch.Generator().manual_seed(3))
    gradients = []
    for model in (kind.model(), kind.dropped("pre_linear")):
        layer = next(m for m in model.modules() if isinstance(m, MoELayer)).train()
        probabilities: list[Tensor] = []
        layer.router.register_forward_hook(lambda _, __, output, into=probabilities: into.append(output[0]))
        megatron_single(3)
        given = x.clone().requires_grad_()
        layer(given)
        (probabilities[0] ** 2).sum().backward()
        gradients.append((given.grad, layer.router.weight.grad))
    for mine, stock in zip(*gradients, strict=True):
        assert torch.equal(mine, stock)


@pytest.mark.parametrize("site", ["linear_proj", "linear_fc2"])
@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
@pytest.mark.parametrize("name", ["dense", "latent attention", "hybrid"])
def test_a_linears_input_is_the_dropout_of_the_stock_one(megatron_single, name, placement, site):
    kind = KINDS[name]
    model = kind.dropped(placement, sites=(site,))
    assert {hooked.rpartition(".")[2] for hooked, *_ in sites(model)} == {site}
    # The first of its sites draws first: from the tracked stream, since ranks hold other features.
    linear = model.get_submodule(next(iter(sites(model)))[0])
    seen: dict[str, Tensor] = {}
    input_of(linear, seen, "stock", prepend=True)
    input_of(linear, seen, "dropped")
    with torch.no_grad():
        stock = kind.model().eval()
        stock_seen: dict[str, Tensor] = {}
        input_of(stock.get_submodule(next(iter(sites(model)))[0]), stock_seen, "stock")
        losses(stock)
        megatron_single(7)
        losses(model.train())
    assert torch.equal(seen["stock"], stock_seen["stock"])
    megatron_single(7)
    x = seen["stock"]
    with get_cuda_rng_tracker().fork():
        if placement == "pre_linear":
            expected = pre_linear_dropout(x, 0.3)
        else:
            expected = vpad(x, 0.3, moments(x).mean, moments(x).variance)
    assert torch.equal(seen["dropped"], expected)
    assert not torch.equal(expected, x)


# Multi-token prediction


def mtp_model(block: Any, config: Any, mtp: Any) -> Any:
    return build(block, config, mtp_block_spec=mtp)


def mtp_spec(config: Any, block: Any) -> Any:
    return get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)


MTP_LAYER = ["mtp_model_layer.input_layernorm", "mtp_model_layer.pre_mlp_layernorm"]


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("order", ["block first", "block spec of its own"])
def test_multi_token_prediction(megatron_single, placement, order):
    """Its spec may be made from the substituted block, or from the stock one and substituted then."""
    config = make_config(num_layers=2, mtp_num_layers=1)
    block = stock_block(config)
    active = placement in ("pre_linear", "vpad")
    choices = {"sites": ("attention", "mlp", "output")} if active else {}

    def model(p: float) -> Any:
        ours = substitute(block, placement, p=p, **choices)
        mtp = mtp_spec(config, ours if order == "block first" else block)
        before = snapshot(mtp)
        more = {"sites": ("attention", "mlp", "output", "mtp")} if active else {}
        built = mtp_model(ours, config, substitute(mtp, placement, p=p, **more))
        assert snapshot(mtp) == before
        return built

    stock = mtp_model(block, config, mtp_spec(config, block))
    ours = model(0.3)
    names = [name for name, *_ in sites(ours) if name.startswith("mtp.")]
    expected = ["enorm", "hnorm", *MTP_LAYER, "final_layernorm"] if active else []
    assert names == [f"mtp.layers.0.{name}" for name in expected]
    assert sharded_keys(ours) == sharded_keys(stock)
    assert torch.equal(losses(ours.eval()), losses(stock.eval()))
    expected_step = train_step(stock, megatron_single)
    assert_same(train_step(model(0.0), megatron_single), expected_step)
    changes = not torch.equal(train_step(ours, megatron_single)[0], expected_step[0])
    assert changes == (placement != "none")


def test_what_enters_eh_proj_is_dropped(megatron_single):
    config = make_config(num_layers=2, mtp_num_layers=1)
    block = stock_block(config)
    mtp = substitute(mtp_spec(config, block), "pre_linear", p=0.3, sites=("mtp",))
    model = mtp_model(block, config, mtp).train()
    seen: dict[str, Tensor] = {}
    layer = model.mtp.layers[0]
    input_of(layer.eh_proj, seen, "eh_proj")
    input_of(layer.enorm, seen, "enorm")
    input_of(layer.hnorm, seen, "hnorm")
    losses(model)
    with torch.no_grad():
        undropped = torch.cat([getattr(layer, name).eval()(seen[name]) for name in ("enorm", "hnorm")], -1)
    kept = seen["eh_proj"] != 0
    torch.testing.assert_close(seen["eh_proj"], torch.where(kept, undropped / 0.7, 0), rtol=1e-4, atol=1e-6)
    share = kept.float().mean((0, 1)).view(2, -1).mean(1)
    assert ((share - 0.7).abs() < 0.05).all()


def test_megatrons_trainer_builds_multi_token_prediction_from_the_stock_spec():
    """The reason why it is refused there: the spec that is given does not reach these layers."""
    regularization = Regularization("vpad", p=0.3, sites=("attention", "mlp", "output"))
    config = GPTModelConfig(
        transformer=make_config(num_layers=2, mtp_num_layers=1),
        transformer_layer_spec=functools.partial(gpt.block_spec, regularization=regularization, vp_stage=None),
        vocab_size=96,
        position_embedding_type="rope",
    )
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    names = [name for name, *_ in sites(model)]
    assert len(names) == 2 * 2 + 1
    assert not any(name.startswith("mtp") for name in names)


# Mamba layers, around a mixer that runs on a CPU


def mamba_layer(spec: ModuleSpec, **fields: Any) -> MambaLayer:
    torch.manual_seed(1)
    layer = build_module(
        spec, make_config(**fields), layer_number=1, pg_collection=ProcessGroupCollection.use_mpu_process_groups()
    )
    torch.nn.init.normal_(layer.norm.weight, mean=0.8, std=0.3)
    return layer.train()


def mamba_spec(placement: str | None = None, **choices: Any) -> ModuleSpec:
    spec = hybrid_stack().submodules.mamba_layer
    return spec if placement is None else substitute(spec, placement, **{"p": 0.3, **choices})


X = torch.randn(16, 2, 48, generator=torch.Generator().manual_seed(4))


def test_the_slots_of_a_mamba_layer():
    spec = hybrid_stack().submodules.mamba_layer
    ours = substitute(spec, "vpad", p=0.3, sites=("mamba", "out_proj"))
    assert ours.submodules.norm.builder is spec.submodules.norm
    assert ours.submodules.norm.site == "mamba"
    assert ours.submodules.mixer.submodules.in_proj is spec.submodules.mixer.submodules.in_proj
    assert ours.submodules.mixer.submodules.out_proj.params["site"].builder is spec.submodules.mixer.submodules.out_proj
    # A function, or Megatron's build_module would call it.
    assert build_module(ours.submodules.mamba_bda).hidden_dropout == 0.0
    keys = {"norm.": "mixer.in_proj.layer_norm_"}
    assert ours.submodules.sharded_state_dict_keys_map == spec.submodules.sharded_state_dict_keys_map == keys
    assert mamba_layer(ours).sharded_state_dict().keys() == mamba_layer(spec).sharded_state_dict().keys()
    assert {t.key for t in mamba_layer(ours).sharded_state_dict().values()} >= {"mixer.in_proj.layer_norm_weight"}


@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_mamba_layer_drops_before_in_proj_and_not_on_the_residual(megatron_single, placement, fused):
    layer = mamba_layer(mamba_spec(placement), hidden_dropout=0.5, bias_dropout_fusion=fused)
    seen: dict[str, Tensor] = {}
    input_of(layer.mixer.in_proj, seen, "in_proj")
    megatron_single(6)
    output = layer(X)
    normed = layer.norm.eval()(X)
    megatron_single(6)
    if placement == "pre_linear":
        expected = pre_linear_dropout(normed, 0.3)
    else:
        expected = vpad(normed, 0.3, moments(normed).mean, moments(normed).variance)
    assert torch.equal(seen["in_proj"], expected)
    assert torch.equal(output, X + layer.mixer(expected)[0])


def test_out_proj_is_dropped_on_request(megatron_single):
    layer = mamba_layer(mamba_spec("pre_linear", sites=("out_proj",)))
    seen: dict[str, Tensor] = {}
    input_of(layer.mixer.out_proj, seen, "stock", prepend=True)
    input_of(layer.mixer.out_proj, seen, "dropped")
    layer(X)
    kept = seen["dropped"] != 0
    assert abs(kept.float().mean().item() - 0.7) < 0.03
    torch.testing.assert_close(seen["dropped"], torch.where(kept, seen["stock"] / 0.7, 0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True])
def test_pre_norm_binds_p_in_a_mamba_layer(megatron_single, fused):
    """As if the config had it."""
    outputs = []
    for spec, hidden_dropout in ((mamba_spec(), 0.3), (mamba_spec("pre_norm"), 0.0), (mamba_spec("none"), 0.3)):
        layer = mamba_layer(spec, hidden_dropout=hidden_dropout, bias_dropout_fusion=fused)
        megatron_single(6)
        outputs.append(layer(X))
        last = layer.eval()(X)
    stock, ours, without = outputs
    assert torch.equal(ours, stock)
    assert torch.equal(without, last)
    assert not torch.equal(ours, without)


# What is refused


def _cross_attention() -> ModuleSpec:
    spec = stock_layer(make_config())
    spec.submodules.cross_attention = ModuleSpec(module=CrossAttention)
    return spec


def _opaque(part: str) -> ModuleSpec:
    spec = stock_layer(make_config())
    setattr(spec.submodules, part, ModuleSpec(module=torch.nn.Linear))
    return spec


def _opaque_mixer() -> ModuleSpec:
    spec = mamba_spec()
    spec.submodules.mixer = ModuleSpec(module=torch.nn.Linear)
    return spec


def _hybrid_mtp() -> Any:
    config = make_config(mtp_num_layers=1)
    spec = mtp_spec(config, stock_block(config))
    spec.layer_specs[0].submodules.mtp_model_layer = None
    return spec


@pytest.mark.parametrize(
    ("make", "choices", "message"),
    [
        (_cross_attention, {}, "this spec has cross-attention, CrossAttention"),
        (lambda: _opaque("self_attention"), {}, "self_attention of this spec, Linear, shows no linears"),
        (lambda: _opaque("mlp"), {}, "mlp of this spec is Linear, neither an MLP nor a mixture of experts"),
        (_opaque_mixer, {}, "mixer of this Mamba layer, Linear, shows no linears"),
        (
            lambda: KINDS["experts"].stock(KINDS["experts"].config()),
            {"sites": ("linear_fc2",)},
            "site 'linear_fc2' is inside the experts",
        ),
        (
            lambda: KINDS["experts"].stock(KINDS["experts"].config()),
            {"statistics": "norm"},
            "statistics 'norm' is not available before the experts",
        ),
        (hybrid_stack, {"sites": ("mtp",)}, "site 'mtp' is in multi-token prediction"),
        (_hybrid_mtp, {}, "builds its layers from a hybrid pattern"),
        (lambda: ModuleSpec(module=torch.nn.Linear), {}, "cannot substitute into a spec of Linear"),
    ],
)
def test_specs_that_would_be_substituted_in_part_are_refused(make, choices, message):
    with pytest.raises(UserError, match=message):
        substitute(make(), "vpad", p=0.3, **choices)


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"sites": ("mlp", "linear_fc2")}, "site 'linear_fc2' is inside the experts"),
        ({"statistics": "norm"}, "statistics 'norm' is not available before the experts"),
    ],
)
def test_a_hybrid_is_refused_for_the_layers_that_its_pattern_has(megatron_single, choices, message):
    """Every stack has a slot for experts."""
    spec = substitute(hybrid_stack(), "vpad", p=0.3, **choices)
    with pytest.raises(UserError, match=message):
        KINDS["hybrid, experts"].model(spec)
    model = KINDS["hybrid"].model(spec)
    expected = {(d.site, d.regularization.statistics) for *_, d in sites(model)}
    assert {site for site, _ in expected} == set(choices.get("sites", ("attention", "mlp")))
    loss, _ = train_step(model, megatron_single)
    assert not torch.equal(loss, train_step(KINDS["hybrid"].model(), megatron_single)[0])


def test_placement_none_takes_any_attention_and_mlp():
    for spec in (_cross_attention(), _opaque("self_attention"), _opaque("mlp"), _opaque_mixer()):
        assert substitute(spec, "none").submodules is not spec.submodules


@over_kinds
@pytest.mark.parametrize("first", [("attention",), ("mlp",), ("linear_proj",), ("output",)])
@pytest.mark.parametrize("second", PLACEMENTS)
def test_a_spec_that_drops_already_is_refused(kind, first, second):
    """Also by placements that add nothing: the dropout that is there would stay."""
    spec = substitute(kind.stock(kind.config()), "pre_linear", p=0.3, sites=first)
    with pytest.raises(UserError, match="has dropout already: substitute into the stock spec"):
        substitute(spec, second)


def test_a_layer_of_multi_token_prediction_that_drops_already_is_kept():
    """Whatever its sites; its own norms are added."""
    config = make_config(num_layers=2, mtp_num_layers=1)
    for site in ("attention", "mlp", "linear_proj", "linear_fc2"):
        block = substitute(stock_block(config), "pre_linear", p=0.3, sites=(site,))
        mtp = substitute(mtp_spec(config, block), "pre_linear", p=0.3, sites=("mtp",))
        names = [d.site for n, _, d in sites(mtp_model(block, config, mtp)) if n.startswith("mtp.")]
        assert sorted(names) == sorted(["mtp", "mtp", site])


def test_a_copy_of_a_substituted_spec_builds_the_same_model(megatron_single):
    for kind in KINDS.values():
        spec = substitute(kind.stock(kind.config()), "vpad", p=0.3)
        models = [kind.model(spec) for spec in (spec, copy.deepcopy(spec))]
        assert_same(*(train_step(model, megatron_single) for model in models))


def test_apply_and_substitute_are_one():
    config = make_config()
    choices = {"p": 0.2, "fill": "mean", "statistics": "norm", "sites": ("mlp",)}
    ours = apply(stock_block(config), Regularization("vpad", **choices))
    assert snapshot(ours) == snapshot(substitute(stock_block(config), "vpad", **choices))
