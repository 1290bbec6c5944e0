"""Dropout in Megatron Bridge, through Bridge's own providers, configuration files, overrides and ``pretrain``."""

import functools
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.training.config.instantiate_utils import InstantiationException, target_allowlist

from megatron_lengthgen import bridge, specs
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.gpt import stock_block

pytestmark = pytest.mark.usefixtures("megatron_single")
NORMS = ("input_layernorm", "pre_mlp_layernorm")
GPT_SITES = [f"decoder.layers.{layer}.{norm}" for layer in range(2) for norm in NORMS]
HYBRID_SITES = [f"decoder.layers.{layer}.{NORMS[layer % 2]}" for layer in range(4)]
VPAD = Regularization("vpad", p=0.25)


@pytest.fixture(scope="module")
def recipes() -> types.ModuleType:
    pytest.importorskip("megatron.bridge", reason="no Megatron Bridge: run setup_env.sh with 'bridge'")
    import bridge_recipes

    return bridge_recipes


def written_and_read(recipe: Any, folder: Path) -> Any:
    path = str(folder / "run_config.yaml")
    recipe.to_yaml(path)
    return type(recipe).from_yaml(path)


@pytest.mark.parametrize("name", ["gpt_none", "gpt_pre_norm", "gpt_pre_linear", "gpt_vpad", "gpt_vpad_mean_fill"])
def test_a_provider_takes_a_named_spec(recipes, tmp_path, name):
    bridge.allow_targets()
    recipe = recipes.gpt(transformer_layer_spec=getattr(specs, name), hidden_dropout=0.25)
    sites = [] if name in ("gpt_none", "gpt_pre_norm") else [(site, 0.25) for site in GPT_SITES]
    assert recipes.dropped(recipes.build(recipe)) == sites
    assert written_and_read(recipe, tmp_path).model.transformer_layer_spec is getattr(specs, name)


def test_a_hybrid_provider_takes_a_named_spec_and_cannot_read_any_stack_spec_back(recipes, tmp_path):
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

    bridge.allow_targets()
    recipe = recipes.hybrid(hybrid_stack_spec=specs.hybrid_vpad, hidden_dropout=0.25)
    assert recipes.dropped(recipes.build(recipe)) == [(site, 0.25) for site in HYBRID_SITES]
    for spec in (specs.hybrid_vpad, hybrid_stack_spec):
        with pytest.raises(InstantiationException, match="hybrid_stack_spec"):
            written_and_read(recipes.hybrid(hybrid_stack_spec=spec), tmp_path)


def default_spec() -> Any:
    from megatron.bridge.models.gpt_provider import default_layer_spec

    return default_layer_spec


BASES = {
    "layer": default_spec,
    "block": lambda: stock_block,
    "partial": lambda: functools.partial(get_gpt_decoder_block_spec, use_transformer_engine=True),
}


@pytest.mark.parametrize("base", BASES)
def test_apply_substitutes_into_the_providers_spec(recipes, tmp_path, base):
    recipe = recipes.gpt(transformer_layer_spec=BASES[base](), hidden_dropout=0.3, attention_dropout=0.2)
    choice = Regularization("vpad", p=0.25, fill="mean", sites=("attention", "mlp", "linear_fc2"), ramp_steps=10)
    bridge.apply(recipe, choice)
    assert (recipe.model.hidden_dropout, recipe.model.attention_dropout) == (0.0, 0.0)
    model = recipes.build(recipe)
    hooked = [(f"decoder.layers.{n}.{site}", 0.25) for n in range(2) for site in (*NORMS, "mlp.linear_fc2")]
    assert recipes.dropped(model) == hooked
    assert all(layer.hidden_dropout == 0.0 for layer in model.decoder.layers)

    read = written_and_read(recipe, tmp_path)
    assert read.model.transformer_layer_spec.regularization == choice
    assert recipes.dropped(recipes.build(read)) == hooked
    # A resumed run starts from there.
    bridge.apply(read, choice)
    assert recipes.dropped(recipes.build(read)) == hooked


def test_apply_keeps_what_a_model_has_of_its_own(recipes):
    from megatron.bridge.models.gemma.gemma2_provider import Gemma2ModelProvider

    def gemma() -> Any:
        sizes = recipes.gpt(kv_channels=16, num_query_groups=2).model
        fields = {name: getattr(sizes, name) for name in (*recipes.SIZES, "kv_channels", "num_query_groups")}
        return recipes.Recipe(model=Gemma2ModelProvider(num_layers=2, **fields))

    recipe = gemma()
    bridge.apply(recipe, VPAD)
    stock, ours = recipes.build(gemma()), recipes.build(recipe)
    assert recipes.dropped(ours) == [(site, 0.25) for site in GPT_SITES]
    names = {type(module).__name__ for module in stock.modules()}
    assert {"TERowParallelLinearLayerNorm", "Gemma2FlexDotProductAttention"} <= names
    for name, module in stock.named_modules():
        if not name.endswith((*NORMS, "linear_qkv", "linear_fc1")):
            # By name: Bridge makes a class per model for its embedding.
            assert type(ours.get_submodule(name)).__name__ == type(module).__name__, name


def test_apply_reaches_hybrid_models(recipes, tmp_path):
    recipe = recipes.hybrid()
    bridge.apply(recipe, Regularization("vpad", p=0.25, sites=("attention", "mlp", "output")))
    hooked = [(site, 0.25) for site in (*HYBRID_SITES, "decoder.final_norm")]
    assert recipes.dropped(recipes.build(recipe)) == hooked
    read = written_and_read(recipe, tmp_path)
    assert read.model.hybrid_stack_spec == recipe.model.hybrid_stack_spec
    assert recipes.dropped(recipes.build(read)) == hooked


def test_multi_token_prediction_follows_the_spec(recipes):
    recipe = recipes.gpt(mtp_num_layers=1)
    bridge.apply(recipe, VPAD)
    mtp = [f"mtp.layers.0.mtp_model_layer.{norm}" for norm in NORMS]
    assert recipes.dropped(recipes.build(recipe)) == [(site, 0.25) for site in (*GPT_SITES, *mtp)]


def test_every_site_has_a_number_of_its_own(recipes):
    from megatron_lengthgen.specs.site import sites

    recipe = recipes.gpt(mtp_num_layers=1)
    bridge.apply(recipe, VPAD)
    numbers = [dropout.number for _, _, dropout in sites(recipes.build(recipe))]
    assert None not in numbers and len(set(numbers)) == 6


def test_p_is_the_recipes_hidden_dropout_where_none_is_given(recipes):
    recipe = recipes.gpt(hidden_dropout=0.125)
    bridge.apply(recipe, Regularization("pre_linear"))
    assert recipes.dropped(recipes.build(recipe)) == [(site, 0.125) for site in GPT_SITES]
    with pytest.raises(UserError, match=r"no p, and hidden_dropout of the recipe is 0: give Regularization\(p=...\)"):
        bridge.apply(recipes.gpt(hidden_dropout=0.0), Regularization("pre_linear"))


@pytest.mark.parametrize("placement", ["none", "pre_norm"])
def test_apply_takes_placements_without_sites(recipes, placement):
    recipe = recipes.gpt(hidden_dropout=0.125)
    bridge.apply(recipe, Regularization(placement))
    model = recipes.build(recipe)
    assert recipes.dropped(model) == [] and model.embedding.embedding_dropout.p == 0.0
    assert {layer.hidden_dropout for layer in model.decoder.layers} == {0.125 if placement == "pre_norm" else 0.0}


OVERRIDE = "model:\n  transformer_layer_spec:\n    _target_: megatron_lengthgen.specs.gpt_vpad\n    _call_: false\n"


def test_bridge_reverts_a_spec_from_a_file_and_apply_does_not_care(recipes, tmp_path):
    from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

    bridge.allow_targets()
    path = tmp_path / "override.yaml"
    path.write_text(OVERRIDE)
    recipe = process_config_with_overrides(recipes.gpt(), str(path), ["model.ffn_hidden_size=96"])
    assert recipe.model.ffn_hidden_size == 96
    assert recipe.model.transformer_layer_spec is default_spec()  # the trap
    bridge.apply(recipe, VPAD)
    assert recipes.dropped(recipes.build(recipe)) == [(site, 0.25) for site in GPT_SITES]
    # Overrides after apply leave the spec alone too.
    process_config_with_overrides(recipe, str(path), ["model.seq_length=16"])
    assert recipes.dropped(recipes.build(recipe)) == [(site, 0.25) for site in GPT_SITES]


def set_spec(recipes: Any, recipe: Any) -> None:
    recipe.model.transformer_layer_spec = default_spec()


def apply_again(recipes: Any, recipe: Any) -> None:
    bridge.apply(recipe, VPAD)


def override_dropout(recipes: Any, recipe: Any) -> None:
    recipe.model.hidden_dropout = 0.1


def ask_for_graphs(recipes: Any, recipe: Any) -> None:
    recipe.model.cuda_graph_impl, recipe.model.use_te_rng_tracker = "transformer_engine", True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_spec, "not built from the transformer_layer_spec .* call it last, and once"),
        (apply_again, "not built from the transformer_layer_spec .* call it last, and once"),
        (override_dropout, "hidden_dropout was set to 0.1 after .* call apply last"),
        (ask_for_graphs, "cuda_graph_impl"),
    ],
)
def test_changes_after_apply_stop_the_model(recipes, change, message):
    recipe = recipes.gpt()
    bridge.apply(recipe, VPAD)
    change(recipes, recipe)
    with pytest.raises(UserError, match=message):
        recipes.build(recipe)


def test_another_model_after_apply_stops_the_training(recipes):
    recipe = recipes.gpt()
    callback = bridge.apply(recipe, VPAD)
    recipe.model = recipes.gpt().model
    recipes.build(recipe)
    with pytest.raises(UserError, match="built from another configuration"):
        callback.on_train_start(types.SimpleNamespace(state=None))


def test_a_model_that_ignores_its_spec_is_noticed(recipes):
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    class OwnSpec(GPTModelProvider):
        def provide(self, *args: Any, **kwargs: Any) -> Any:
            given, self.transformer_layer_spec = self.transformer_layer_spec, default_spec()
            model = super().provide(*args, **kwargs)
            self.transformer_layer_spec = given
            return model

    recipe = recipes.Recipe(model=OwnSpec(num_layers=2, **recipes.SIZES))
    bridge.apply(recipe, VPAD)
    with pytest.raises(UserError, match="not built from the transformer_layer_spec"):
        recipes.build(recipe)


@pytest.mark.parametrize(
    ("fields", "choice", "message"),
    [
        ({"use_transformer_engine_op_fuser": True}, VPAD, "use_transformer_engine_op_fuser fuses the whole MLP"),
        ({"cuda_graph_impl": "local", "use_te_rng_tracker": True}, VPAD, "set cuda_graph_impl: none"),
        ({}, Regularization("vpad", p=0.1, sites=("attention", "mtp")), "site 'mtp' .* leave the site out"),
    ],
)
def test_apply_refuses_what_would_run_wrongly(recipes, fields, choice, message):
    with pytest.raises(UserError, match=message):
        bridge.apply(recipes.gpt(**fields), choice)


def test_apply_refuses_process_groups_and_models_that_it_does_not_know(recipes):
    from megatron.bridge.models.t5_provider import T5ModelProvider

    recipe = recipes.gpt()
    recipe.dist.use_decentralized_pg = True
    with pytest.raises(UserError, match=r"dist\.use_decentralized_pg"):
        bridge.apply(recipe, VPAD)
    t5 = recipes.Recipe(model=T5ModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4))
    with pytest.raises(UserError, match=r"cfg\.model is a T5ModelProvider"):
        bridge.apply(t5, VPAD)


def test_the_final_norm_needs_a_block_spec(recipes):
    with_output = Regularization("vpad", p=0.25, sites=("attention", "mlp", "output"))
    recipe = recipes.gpt()
    bridge.apply(recipe, with_output)
    with pytest.raises(UserError, match="site 'output' follows the final norm"):
        recipes.build(recipe)
    recipe = recipes.gpt(transformer_layer_spec=stock_block)
    bridge.apply(recipe, with_output)
    sites = [(site, 0.25) for site in (*GPT_SITES, "decoder.final_layernorm")]
    assert recipes.dropped(recipes.build(recipe)) == sites


def test_reading_needs_this_packages_prefix(recipes, tmp_path):
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix

    recipe = recipes.gpt()
    bridge.apply(recipe, VPAD)
    target_allowlist.remove_prefix("megatron_lengthgen.")
    with pytest.raises(InstantiationException, match="not in the allowlist"):
        written_and_read(recipe, tmp_path)
    register_allowed_target_prefix("megatron_lengthgen.")  # Bridge's name for what allow_targets does
    assert written_and_read(recipe, tmp_path).model.transformer_layer_spec == recipe.model.transformer_layer_spec


@pytest.fixture(scope="module")
def training(recipes, tmp_path_factory) -> dict[str, Any]:
    """What ``bridge_train.py`` reports."""
    try:
        energon = importlib.util.find_spec("megatron.energon")
    except ModuleNotFoundError:
        energon = None
    if energon is None:
        pytest.skip("megatron.bridge.training needs megatron-energon and multi-storage-client")
    script, folder = Path(__file__).parent / "bridge_train.py", tmp_path_factory.mktemp("bridge")
    result = subprocess.run([sys.executable, str(script), str(folder)], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]
    return json.loads(result.stdout.splitlines()[-1])


def test_pretrain_gives_every_microbatch_its_own_masks(training):
    run = training["whole"]
    assert run["error"] is None
    assert [(step, microbatch) for step, microbatch, _ in run["keys"]] == [(s, m) for s in range(4) for m in range(2)]
    assert len({key for _, _, key in run["keys"]}) == 4
    assert training["again"] == run
    assert training["no dropout"]["keys"] == []
    assert training["no dropout"]["losses"][0] != run["losses"][0]


def test_a_resumed_pretrain_goes_on_with_the_same_masks(training):
    first, second, whole = training["first half"], training["second half"], training["whole"]
    assert len(first["losses"]) == 2
    assert first["keys"] + second["keys"] == whole["keys"]
    assert first["losses"] + second["losses"] == whole["losses"]


def test_pretrain_without_the_callback_stops(training):
    run = training["without callback"]
    assert "give what megatron_lengthgen.bridge.apply returned to pretrain" in run["error"]
    assert run["losses"] == []


def test_bridge_reads_the_spec_from_its_checkpoint(training):
    assert training["written"]["base"] == "megatron_lengthgen.specs.gpt.stock_block"
    assert training["written"]["regularization"] == repr(Regularization("vpad", p=0.1))
    assert "not in the allowlist" in training["written"]["refused"]
