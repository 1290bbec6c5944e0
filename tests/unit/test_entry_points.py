"""The named specs through other projects' own ways to choose a layer spec."""

import ast
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
from megatron.training.config.container import PretrainConfigContainer
from megatron.training.config.instantiate_utils import InstantiationException, target_allowlist
from megatron.training.models.gpt import GPTModelConfig
from spec_models import make_config

from megatron_lengthgen import megatron_args, specs
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.site import sites

pytestmark = pytest.mark.usefixtures("megatron_single")
CONF = Path(__file__).parents[2] / "conf"
NAMES = [name for name in specs.__all__ if name != "substitute"]
CHOICES = {
    "none": Regularization("none"),
    "pre_norm": Regularization("pre_norm"),
    "pre_linear": Regularization("pre_linear"),
    "vpad": Regularization("vpad"),
    "vpad_mean_fill": Regularization("vpad", fill="mean"),
}
ARGUMENTS: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 16,
    "max_position_embeddings": 16,
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 64,
    "micro_batch_size": 1,
    "train_iters": 1,
    "lr": 1e-3,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "hidden_dropout": 0.25,
    "attention_dropout": 0.0,
}
BEHIND_NORMS = ["input_layernorm", "pre_mlp_layernorm"]


def build(config: Any) -> torch.nn.Module:
    """By the call with which ``megatron.training`` builds a model, its warnings aside."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (model,) = config.get_builder_cls()(config).build_distributed_models(
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            wrap_with_ddp=False,
            data_parallel_random_init=False,
        )
    return model


def dropped(model: torch.nn.Module) -> dict[str, float]:
    return {name: dropout.p for name, _, dropout in sites(model)}


def test_every_choice_has_a_gpt_and_a_hybrid_name() -> None:
    assert sorted(NAMES) == sorted(f"{kind}_{choice}" for kind in ("gpt", "hybrid") for choice in CHOICES)


@pytest.mark.parametrize("name", NAMES)
def test_spec_argument(name: str) -> None:
    kind, _, choice = name.partition("_")
    wanted = CHOICES[choice]
    size = {"hybrid_layer_pattern": "*-*-"} if kind == "hybrid" else {"num_layers": 2}
    args = megatron_args.parse({**ARGUMENTS, **size, "spec": ["megatron_lengthgen.specs", name]})
    model = build((hybrid_config_from_args if kind == "hybrid" else gpt_config_from_args)(args))

    if kind == "hybrid":
        hooked = [f"decoder.layers.{layer}.{BEHIND_NORMS[layer % 2]}" for layer in range(4)]
    else:
        hooked = [f"decoder.layers.{layer}.{norm}" for layer in range(2) for norm in BEHIND_NORMS]
    assert dropped(model) == (dict.fromkeys(hooked, 0.25) if wanted.is_active else {})
    assert {dropout.regularization for _, _, dropout in sites(model)} <= {wanted}
    residual = 0.25 if choice == "pre_norm" else 0.0
    assert [layer.hidden_dropout for layer in model.decoder.layers] == [residual] * len(model.decoder.layers)


def test_gpt_model_config_takes_a_named_spec() -> None:
    config = make_config(hidden_dropout=0.25)
    model = build(GPTModelConfig(transformer=config, vocab_size=64, transformer_layer_spec=specs.gpt_vpad))
    assert dropped(model) == {f"decoder.layers.{layer}.{norm}": 0.25 for layer in range(3) for norm in BEHIND_NORMS}


@pytest.fixture
def allowlist() -> Any:
    """Megatron's list of what a YAML file may name, as it is before this package's prefix is added."""
    before = target_allowlist.allowed_prefixes
    if "megatron_lengthgen." in before:
        target_allowlist.remove_prefix("megatron_lengthgen.")
    yield target_allowlist
    for prefix in target_allowlist.allowed_prefixes:
        target_allowlist.remove_prefix(prefix)
    for prefix in before:
        target_allowlist.add_prefix(prefix)


def container(path: Path, **spec: Any) -> Path:
    training = "megatron.training.config.training_config"
    transformer = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "hidden_dropout": 0.25,
        "attention_dropout": 0.0,
        "transformer_impl": "local",
        "normalization": "RMSNorm",
        "use_cpu_initialization": True,
        "bias_dropout_fusion": False,
    }
    tree = {
        "_target_": "megatron.training.config.container.PretrainConfigContainer",
        "train": {"_target_": f"{training}.TrainingConfig", "micro_batch_size": 1, "global_batch_size": 1},
        "optimizer": {"_target_": "megatron.core.optimizer.OptimizerConfig", "lr": 1e-3},
        "scheduler": {"_target_": f"{training}.SchedulerConfig"},
        "logger": {"_target_": f"{training}.LoggerConfig"},
        "checkpoint": {"_target_": f"{training}.CheckpointConfig"},
        "model": {
            "_target_": "megatron.training.models.gpt.GPTModelConfig",
            "vocab_size": 64,
            "transformer_layer_spec": {"_target_": "megatron_lengthgen.specs.gpt_vpad", **spec},
            "transformer": {
                "_target_": "megatron.core.transformer.transformer_config.TransformerConfig",
                **transformer,
            },
        },
    }
    path.write_text(yaml.safe_dump(tree))
    return path


def test_container_yaml(tmp_path: Path, allowlist: Any) -> None:
    path = container(tmp_path / "run.yaml", _call_=False)
    with pytest.raises(InstantiationException, match=r"megatron_lengthgen\.specs\.gpt_vpad.*not in the allowlist"):
        PretrainConfigContainer.from_yaml(str(path))
    allowlist.add_prefix("megatron_lengthgen.")
    config = PretrainConfigContainer.from_yaml(str(path)).model
    assert config.transformer_layer_spec is specs.gpt_vpad
    assert dropped(build(config)) == {f"decoder.layers.{n}.{norm}": 0.25 for n in range(2) for norm in BEHIND_NORMS}


def test_container_yaml_without_call_false_calls_the_function(tmp_path: Path, allowlist: Any) -> None:
    allowlist.add_prefix("megatron_lengthgen.")
    with pytest.raises(InstantiationException, match=r"gpt_vpad\(\) missing 1 required positional argument: 'config'"):
        PretrainConfigContainer.from_yaml(str(container(tmp_path / "run.yaml")))


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.py")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_to_copy_name_what_exists(path: Path) -> None:
    """Of this package; ``tests/te/test_bridge.py`` runs the one for Megatron Bridge."""
    ours = [
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_lengthgen")
    ]
    assert ours
    for node in ours:
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            assert hasattr(module, alias.name), alias.name
