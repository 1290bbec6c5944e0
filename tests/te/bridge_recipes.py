"""Small Megatron Bridge providers, and a container with Bridge's own reader and writer of ``run_config.yaml``."""

import dataclasses
from typing import Any

import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider
from megatron.bridge.models.hybrid.hybrid_provider import HybridModelProvider
from megatron.bridge.training.utils.config_utils import _ConfigContainerBase
from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnBackend
from megatron.training.config import DistributedInitConfig, RNGConfig

from megatron_lengthgen.specs.site import sites

SIZES = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 128,
    "seq_length": 32,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_dropout_fusion": False,
}
register_allowed_target_prefix("bridge_recipes.")


@dataclasses.dataclass(kw_only=True)
class Recipe(_ConfigContainerBase):
    """What is left of Bridge's ``ConfigContainer`` without its dataset section, whose import needs energon."""

    model: Any
    rng: RNGConfig = dataclasses.field(default_factory=RNGConfig)
    dist: DistributedInitConfig = dataclasses.field(default_factory=DistributedInitConfig)


def gpt(**fields: Any) -> Recipe:
    return Recipe(model=GPTModelProvider(**{"num_layers": 2, **SIZES, **fields}))


def hybrid(pattern: str = "*-*-", **fields: Any) -> Recipe:
    # Flash attention, the default, sets environment variables that a GPT model of the same process refuses.
    fields = {"params_dtype": torch.float32, "bf16": False, "attention_backend": AttnBackend.auto, **SIZES, **fields}
    return Recipe(model=HybridModelProvider(hybrid_layer_pattern=pattern, **fields))


def build(recipe: Recipe) -> torch.nn.Module:
    """The model, by the calls with which Bridge's training builds it."""
    recipe.model.finalize()
    (model,) = recipe.model.provide_distributed_model(
        wrap_with_ddp=False,
        use_cpu_initialization=True,
        mixed_precision_wrapper=None,
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    recipe.model._pg_collection = None
    return model


def dropped(model: torch.nn.Module) -> list[tuple[str, float]]:
    """Hooked module and p of every dropout site."""
    return [(name, dropout.p) for name, _, dropout in sites(model)]
