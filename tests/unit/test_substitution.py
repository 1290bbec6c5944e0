"""The substitution against the stock spec: what changes, and above all what does not."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, import_module
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.training.models.gpt import GPTModelConfig
from spec_models import (
    assert_same,
    batch,
    build,
    make_config,
    sharded_keys,
    snapshot,
    stock_block,
    stock_layer,
    train_step,
)

from megatron_lengthgen.dropout.functional import moments, pre_linear_dropout, vpad
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs import gpt, site
from megatron_lengthgen.specs.statistics import norm_statistics
from megatron_lengthgen.specs.substitution import substitute
from megatron_lengthgen.specs.torch_norm import RMSNorm, TorchNorm

pytestmark = pytest.mark.usefixtures("megatron_single")
PLACEMENTS = ("none", "pre_norm", "pre_linear", "vpad")
NORMS = ("RMSNorm", "LayerNorm")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16])
def test_evaluation_and_p_zero_equal_the_stock_spec(megatron_single, placement, normalization, params_dtype):
    config = make_config(normalization=normalization, params_dtype=params_dtype, bf16=params_dtype == torch.bfloat16)
    stock = build(stock_layer(config), config)
    dropped = build(substitute(stock_layer(config), placement, p=0.3), config)
    idle = build(substitute(stock_layer(config), placement, p=0.0), config)
    tokens, positions, _ = batch()
    with torch.no_grad():
        expected = stock.eval()(tokens, positions, None)
        assert torch.equal(dropped.eval()(tokens, positions, None), expected)
    assert_same(train_step(idle, megatron_single), train_step(stock, megatron_single))


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("params_dtype", [torch.float32, torch.bfloat16])
def test_our_norm_gives_the_stock_norms_output(normalization, params_dtype):
    config = make_config(normalization=normalization, params_dtype=params_dtype, bf16=params_dtype == torch.bfloat16)
    tokens, positions, _ = batch()
    ours = build(gpt.block_spec(config, Regularization("none"), core_attention="megatron"), config)
    stock = build(stock_layer(config), config)
    assert torch.equal(ours(tokens, positions, None), stock(tokens, positions, None))


@pytest.mark.parametrize("sites", [("attention", "mlp"), ("attention", "mlp", "output")])
@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
def test_checkpoint_keys_equal_the_stock_specs(placement, sites):
    config = make_config(qk_layernorm=True)
    stock = build(stock_block(config), config)
    ours = build(substitute(stock_block(config), placement, p=0.1, sites=sites), config)

    assert sharded_keys(ours) == sharded_keys(stock)
    assert ours.state_dict().keys() == stock.state_dict().keys()
    assert [type(m) for m in ours.modules()] == [type(m) for m in stock.modules()]
    assert len(list(site.sites(ours))) == 2 * 3 + ("output" in sites)


@pytest.mark.parametrize("direction", ["stock to ours", "ours to stock"])
def test_a_checkpoint_of_one_loads_into_the_other(tmp_path, direction):
    config = make_config()
    regularization = Regularization("vpad", p=0.1, sites=("attention", "mlp", "output"))
    models = [build(stock_block(config), config), build(gpt.block_spec(config, regularization), config)]
    source, target = models if direction == "stock to ours" else reversed(models)
    with torch.no_grad():
        for parameter in target.parameters():
            parameter.fill_(7)
    dist_checkpointing.save(source.sharded_state_dict(prefix=""), str(tmp_path))
    target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(prefix=""), str(tmp_path)))
    for name, parameter in target.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name)), name


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_given_spec_is_not_changed(placement):
    config = make_config()
    layer, block = stock_layer(config), stock_block(config)
    before = snapshot(layer), snapshot(block)
    new_layer = substitute(layer, placement, p=0.2)
    new_block = substitute(block, placement, p=0.2)
    build(new_layer, config)
    assert (snapshot(layer), snapshot(block)) == before
    assert new_layer.submodules is not layer.submodules
    assert new_layer.submodules.self_attention is not layer.submodules.self_attention
    # One object for all layers stays one object for all layers.
    assert len({id(spec) for spec in new_block.layer_specs}) == 1


def test_everything_but_the_norms_and_the_residual_dropout_is_kept():
    config = make_config()
    layer = stock_layer(config)
    layer.params["layer_number"] = 7
    new = substitute(layer, "vpad", p=0.2)
    assert new.params == {"layer_number": 7, "hidden_dropout": 0.0}
    for field in ("input_layernorm", "pre_mlp_layernorm"):
        assert getattr(new.submodules, field).builder is getattr(layer.submodules, field)
        setattr(new.submodules, field, getattr(layer.submodules, field))
    assert snapshot(new.submodules) == snapshot(layer.submodules)


def test_models_of_one_spec_share_nothing():
    config = make_config()
    spec = substitute(stock_block(config), "vpad", p=0.2)
    first, second = build(spec, config), build(spec, config)
    assert not {id(m) for m in first.modules()} & {id(m) for m in second.modules()}
    assert not {id(hook) for *_, hook in site.sites(first)} & {id(hook) for *_, hook in site.sites(second)}


def test_a_deep_copy_of_a_norm_drops_out_as_the_original(megatron_single):
    """The whole model cannot be copied, with or without dropout: it holds process groups."""
    config = make_config()
    original = build(substitute(stock_layer(config), "vpad", p=0.2), config).decoder.layers[0].input_layernorm
    copied = copy.deepcopy(original)
    (hook,), (copied_hook,) = original._forward_hooks.values(), copied._forward_hooks.values()
    assert copied_hook is not hook and copied_hook.dropout is not hook.dropout
    x = torch.randn(8, 2, 48)
    outputs = []
    for module in (original, copied):
        megatron_single(3)
        outputs.append(module(x))
    assert torch.equal(*outputs)
    assert not torch.equal(outputs[0], original.eval()(x))


@pytest.mark.parametrize("placement", ["pre_norm", "pre_linear", "vpad"])
@pytest.mark.parametrize("method", ["uniform", "block"])
def test_full_recompute_gives_the_same_gradients(megatron_single, placement, method):
    plain = make_config()
    recompute = make_config(recompute_granularity="full", recompute_method=method, recompute_num_layers=1)
    expected = train_step(build(substitute(stock_layer(plain), placement, p=0.3), plain), megatron_single)
    found = train_step(build(substitute(stock_layer(recompute), placement, p=0.3), recompute), megatron_single)
    assert_same(found, expected)


def test_selective_recompute_of_attention_gives_the_same_gradients(megatron_single):
    plain, selective = make_config(), make_config(recompute_granularity="selective")
    expected = train_step(build(substitute(stock_layer(plain), "vpad", p=0.3), plain), megatron_single)
    found = train_step(build(substitute(stock_layer(selective), "vpad", p=0.3), selective), megatron_single)
    assert_same(found, expected)


@pytest.mark.parametrize("bound", [True, False])
def test_pre_norm_is_megatrons_residual_dropout(megatron_single, bound):
    stock_config = make_config(hidden_dropout=0.3)
    expected = train_step(build(stock_layer(stock_config), stock_config), megatron_single)
    ours = build(substitute(stock_layer(stock_config), "pre_norm", p=0.3 if bound else None), stock_config)
    assert_same(train_step(ours, megatron_single), expected)


@pytest.mark.parametrize("placement", ["none", "pre_linear", "vpad"])
def test_residual_dropout_is_off_although_the_config_has_it(megatron_single, placement):
    config = make_config(hidden_dropout=0.5)
    model = build(substitute(stock_layer(config), placement, p=0.0), config)
    model.embedding.embedding_dropout.p = 0.0
    stock = make_config()
    assert_same(train_step(model, megatron_single), train_step(build(stock_layer(stock), stock), megatron_single))


def test_p_defaults_to_hidden_dropout_when_the_model_is_built():
    spec = substitute(stock_layer(make_config()), "vpad")
    config = make_config(hidden_dropout=0.25)
    assert {hook.p for *_, hook in site.sites(build(spec, config))} == {0.25}
    assert not list(site.sites(build(spec, make_config())))


@pytest.mark.parametrize("placement", ["pre_linear", "vpad"])
@pytest.mark.parametrize("statistics", ["batch", "norm"])
@pytest.mark.parametrize("fill", ["zero", "mean"])
@pytest.mark.parametrize("normalization", NORMS)
def test_dropout_sits_between_norm_and_linear(megatron_single, placement, statistics, fill, normalization):
    """QKV's input is the dropout of what the stock norm gives; the residual is untouched."""
    config = make_config(num_layers=1, normalization=normalization)
    spec = substitute(stock_layer(config), placement, p=0.3, fill=fill, statistics=statistics)
    layer = build(spec, config).decoder.layers[0].train()
    seen: dict[str, torch.Tensor] = {}
    layer.self_attention.linear_qkv.register_forward_pre_hook(lambda module, args: seen.update(qkv=args[0]))
    layer.self_attention.register_forward_hook(lambda module, args, output: (torch.zeros_like(output[0]), None))
    layer.pre_mlp_layernorm.register_forward_pre_hook(lambda module, args: seen.update(residual=args[0]))
    x = torch.randn(16, 2, 48)
    megatron_single(9)
    layer(x, attention_mask=None)

    normed = layer.input_layernorm.eval()(x)
    mean, variance = moments(normed).mean, moments(normed).variance
    if statistics == "norm":
        mean, variance = norm_statistics(layer.input_layernorm, zero_centered=False)
    megatron_single(9)
    expected = (
        pre_linear_dropout(normed, 0.3) if placement == "pre_linear" else vpad(normed, 0.3, mean, variance, fill=fill)
    )
    assert torch.equal(seen["qkv"], expected)
    assert not torch.equal(seen["qkv"], normed)
    assert torch.equal(seen["residual"], x)


@pytest.mark.parametrize("sites", [("attention",), ("mlp",), ("output",), ("mlp", "output")])
def test_only_the_named_sites_get_dropout(sites):
    config = make_config()
    model = build(substitute(stock_block(config), "pre_linear", p=0.3, sites=sites), config)
    names = {name.split(".")[-1] for name, *_ in site.sites(model)}
    of_site = {"attention": "input_layernorm", "mlp": "pre_mlp_layernorm", "output": "final_layernorm"}
    assert names == {of_site[site] for site in sites}


def test_statistics_of_a_norm():
    torch.manual_seed(3)
    layer_norm = torch.nn.LayerNorm(8)
    torch.nn.init.normal_(layer_norm.weight)
    torch.nn.init.normal_(layer_norm.bias)
    mean, variance = norm_statistics(layer_norm, zero_centered=False)
    assert torch.equal(mean, layer_norm.bias)
    assert torch.equal(variance, layer_norm.weight.square())
    mean, variance = norm_statistics(torch.nn.RMSNorm(8), zero_centered=True)
    assert torch.equal(mean, torch.zeros(8))
    assert torch.equal(variance, torch.full((8,), 4.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(5, 3, 48), (7, 129), (2, 4, 3, 16)])
def test_rms_norm_equals_pytorchs(dtype, shape):
    torch.manual_seed(4)
    stock, ours = torch.nn.RMSNorm(shape[-1], eps=1e-5), RMSNorm(shape[-1], eps=1e-5)
    torch.nn.init.normal_(stock.weight)
    ours.load_state_dict(stock.state_dict())
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    wide = [x.double().requires_grad_(), stock.weight.detach().double().requires_grad_()]
    grad = torch.randn(shape).to(dtype)
    F.rms_norm(wide[0], shape[-1:], wide[1], 1e-5).backward(grad.double())
    outputs, inputs = [], []
    for module in (stock.to(dtype), ours.to(dtype)):
        inputs.append(x.to(dtype, copy=True).requires_grad_())
        outputs.append(module(inputs[-1]))
        outputs[-1].backward(grad)
    assert torch.equal(outputs[0], outputs[1])
    before = inputs[1].detach().clone()
    with torch.no_grad():
        assert torch.equal(ours(inputs[1]), outputs[0])  # as when activations are recomputed
    assert torch.equal(inputs[1], before)
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 3e-2}[dtype]
    for mine, reference in ((inputs[1].grad, inputs[0].grad), (ours.weight.grad, stock.weight.grad)):
        torch.testing.assert_close(mine, reference, rtol=tolerance, atol=tolerance)
    if dtype is torch.float32:
        for mine, exact in ((inputs[1].grad, wide[0].grad), (ours.weight.grad, wide[1].grad)):
            torch.testing.assert_close(mine, exact, rtol=1e-4, atol=1e-4, check_dtype=False)


@pytest.mark.parametrize("normalization", NORMS)
def test_norm_parameters_are_marked_for_sequence_parallelism(normalization):
    config = make_config(normalization=normalization)
    config.sequence_parallel = True
    config.persist_layer_norm = True
    built = TorchNorm(config=config, hidden_size=8, eps=1e-5)
    assert [getattr(p, "sequence_parallel", None) for p in built.parameters()] == [True] * (
        1 + (normalization == "LayerNorm")
    )


@pytest.mark.parametrize("normalization", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zero_centred_gamma_is_a_gain_of_one_plus_weight(megatron_single, normalization, dtype):
    """In float32 and rounded once; and vpad with statistics 'norm' takes it as such."""
    config = make_config(normalization=normalization, layernorm_zero_centered_gamma=True, num_layers=1)
    fresh = TorchNorm(config=config, hidden_size=48, eps=1e-5).to(dtype)
    plain = TorchNorm(config=make_config(normalization=normalization), hidden_size=48, eps=1e-5)
    torch.manual_seed(6)
    x = (torch.randn(8, 2, 48) * torch.logspace(-1, 1, 48)).to(dtype)
    assert not fresh.weight.any()
    assert torch.equal(fresh(x), plain(x.float()).to(dtype))

    regularization = Regularization("vpad", p=0.3, statistics="norm", sites=("attention",))
    model = build(gpt.block_spec(config, regularization), config).to(dtype)
    norm = model.decoder.layers[0].input_layernorm
    torch.nn.init.normal_(norm.weight, std=0.02)
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True) if normalization == "LayerNorm" else wide
    bias = norm.bias.double() if normalization == "LayerNorm" else torch.zeros(48, dtype=torch.float64)
    gain = 1 + norm.weight.double()
    expected = centred * (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * gain + bias
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8}[dtype]
    normed = norm.eval()(x)
    torch.testing.assert_close(normed.double(), expected, rtol=tolerance, atol=1e-5)
    megatron_single(9)
    dropped = norm.train()(x)
    megatron_single(9)
    gain = 1 + norm.weight.float()
    assert torch.equal(dropped, vpad(normed, 0.3, bias.float(), gain.square()))


@pytest.mark.parametrize("name", ["gpt_none", "gpt_pre_norm", "gpt_pre_linear", "gpt_vpad", "gpt_vpad_mean_fill"])
@pytest.mark.filterwarnings("ignore:gpt_")
def test_named_specs_build_through_megatrons_builder(name):
    transformer = make_config(hidden_dropout=0.1, attention_backend="local" if name == "gpt_vpad" else "auto")
    config = GPTModelConfig(
        transformer=transformer,
        transformer_layer_spec=import_module(("megatron_lengthgen.specs.gpt", name)),
        vocab_size=96,
        position_embedding_type="rope",
    )
    model = config.get_builder_cls()(config).build_model(ProcessGroupCollection.use_mpu_process_groups())
    hooks = [hook for *_, hook in site.sites(model)]
    assert len(hooks) == (0 if name in ("gpt_none", "gpt_pre_norm") else 6)
    assert {layer.hidden_dropout for layer in model.decoder.layers} == {0.1 if name == "gpt_pre_norm" else 0.0}
    assert all(hook.p == 0.1 and hook.regularization.fill == ("mean" if "mean" in name else "zero") for hook in hooks)


def test_named_specs_warn_of_dropouts_that_a_layer_spec_cannot_switch_off():
    with pytest.warns(UserWarning, match=r"hidden_dropout=0.1 acts on the embedding.* attention_dropout=0.2"):
        gpt.gpt_vpad(make_config(hidden_dropout=0.1, attention_dropout=0.2))
    with pytest.warns(UserWarning, match="hidden_dropout is 0, so that no activation is dropped"):
        gpt.gpt_pre_linear(make_config())
    stock, idle = make_config(hidden_dropout=0.1, attention_dropout=0.1), make_config()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gpt.gpt_pre_norm(stock)
        gpt.gpt_none(idle)


def _without_norm() -> ModuleSpec:
    spec = stock_layer(make_config())
    spec.submodules.input_layernorm = IdentityOp
    return spec


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            _without_norm,
            "input_layernorm of this spec is IdentityOp, and linear_qkv, ColumnParallelLinear, has no norm",
        ),
        (lambda: ModuleSpec(module=TransformerBlock), "spec of TransformerBlock with submodules of type NoneType"),
        (lambda: substitute(stock_layer(make_config()), "vpad"), "has dropout already"),
        (lambda: GPTModel, "cannot substitute into type"),
    ],
)
def test_unsupported_specs_are_refused(make, message):
    with pytest.raises(UserError, match=message):
        substitute(make(), "vpad", p=0.1)


def test_output_site_needs_a_block_spec():
    with pytest.raises(UserError, match=r"site 'output' follows the final norm.*gpt.block_spec"):
        substitute(stock_layer(make_config()), "vpad", sites=("output",))
    with pytest.raises(UserError, match="this block spec has none"):
        substitute(TransformerBlockSubmodules(layer_specs=[]), "vpad", sites=("output",))


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"placement": "vpda"}, r"unknown placement 'vpda' \(did you mean 'vpad'"),
        ({"fill": "average"}, r"unknown fill 'average' \(known: zero, mean\)"),
        ({"statistics": "batches"}, "did you mean 'batch'"),
        ({"sites": ["atention"]}, r"unknown site 'atention' \(did you mean 'attention'"),
        ({"sites": "attention"}, "sites must be a list"),
        ({"sites": ["mlp", "mlp"]}, "names a site twice"),
        ({"sites": []}, "has no sites"),
        ({"placement": "pre_norm", "sites": ["mlp"]}, "acts on all residual branches together"),
        ({"placement": "pre_norm", "start_step": 5}, "the same in all steps"),
        ({"sites": ["linear_fc2"], "statistics": "norm"}, "site 'linear_fc2' follows no norm"),
        ({"ramp_steps": -1}, "ramp_steps must be a number of training steps, got -1"),
        ({"p": 1.0}, r"in \[0, 1\), got 1.0"),
        ({"p": "0.1"}, r"got '0.1'"),
        ({"plcement": "vpad"}, r"unknown regularization key 'plcement' \(did you mean 'placement'"),
        (None, "must be a mapping"),
    ],
)
def test_bad_options_are_refused(mapping, message):
    with pytest.raises(UserError, match=message):
        Regularization.from_mapping(mapping)


def test_options_survive_a_round_trip():
    options = Regularization("pre_linear", p=0.2, sites=("mlp", "output"))
    assert Regularization.from_mapping(options.to_dict()) == options
    assert Regularization.from_mapping({}) == Regularization()


def test_hidden_dropout_out_of_range_is_named():
    config = make_config()
    config.hidden_dropout = 1.0
    with pytest.raises(UserError, match=r"got 1.0 \(from hidden_dropout\)"):
        build(substitute(stock_layer(config), "vpad"), config)
