"""Small models from specs, on one process, and how to compare them."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lengthgen.specs import hybrid

Step = tuple[Tensor, dict[str, Tensor]]


def make_config(config_class: type[TransformerConfig] = TransformerConfig, **fields: Any) -> TransformerConfig:
    return config_class(
        **{
            "num_layers": 3,
            "hidden_size": 48,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "transformer_impl": "local",
            "normalization": "RMSNorm",
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "bias_dropout_fusion": False,
            "persist_layer_norm": False,
            **fields,
        }
    )


def stock_layer(config: TransformerConfig) -> ModuleSpec:
    return get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
        multi_latent_attention=config.multi_latent_attention,
    )


def stock_block(config: TransformerConfig) -> TransformerBlockSubmodules:
    return TransformerBlockSubmodules(
        layer_specs=[stock_layer(config)] * config.num_layers, layer_norm=WrappedTorchNorm
    )


def _finish(model: Any) -> Any:
    model.to(model.config.params_dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.3)
    return model


def build(spec: Any, config: TransformerConfig, **fields: Any) -> GPTModel:
    """A model with weights from seed 1 and norms that are not at their initial values."""
    torch.manual_seed(1)
    fields = {"vocab_size": 96, "max_sequence_length": 64, "position_embedding_type": "rope", **fields}
    return _finish(GPTModel(config, spec, **fields))


def build_hybrid(spec: Any, config: TransformerConfig, pattern: str) -> HybridModel:
    """The same of a hybrid model."""
    torch.manual_seed(1)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return _finish(HybridModel(config, spec, 96, 64, pattern, position_embedding_type="rope", pg_collection=groups))


class Mixer(torch.nn.Module):
    """In the place of ``MambaMixer``, which needs a CUDA extension: between its real linears, a causal mean."""

    def __init__(self, config: TransformerConfig, submodules: Any, d_model: int, **_: Any) -> None:
        super().__init__()
        linear = {"config": config, "init_method": config.init_method, "bias": False, "skip_bias_add": False}
        linear["is_expert"] = False
        self.in_proj = build_module(submodules.in_proj, d_model, 2 * d_model, gather_output=False, **linear)
        self.out_proj = build_module(submodules.out_proj, 2 * d_model, d_model, input_is_parallel=True, **linear)

    def forward(self, x: Tensor, **_: Any) -> tuple[Tensor, Tensor | None]:
        hidden, _ = self.in_proj(x)
        steps = torch.arange(1, len(x) + 1).view(-1, 1, 1)
        return self.out_proj(torch.nn.functional.silu(hidden.cumsum(0) / steps))


def hybrid_stack() -> ModuleSpec:
    """The stock local stack, with a mixer that a CPU runs."""
    spec = hybrid.stock_stack("local")
    spec.submodules.mamba_layer.submodules.mixer.module = Mixer
    return spec


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, 96, (2, 33), generator=generator)
    return tokens[:, :-1], torch.arange(32).expand(2, -1), tokens[:, 1:]


def logits(model: Any) -> Tensor:
    """Of :func:`batch`, as the model stands."""
    tokens, positions, _ = batch()
    with torch.no_grad():
        return model(tokens, positions, None)


def losses(model: Any) -> Tensor:
    """Of :func:`batch`, per token."""
    tokens, positions, labels = batch()
    return model(tokens, positions, None, labels=labels)


def train_step(model: Any, seed: Callable[[int], None]) -> Step:
    """Loss and gradients of one step in training mode, random streams from seed 5."""
    model.train().zero_grad()
    seed(5)
    loss = losses(model).mean()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(a: Step, b: Step) -> None:
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    for name, grad in a[1].items():
        assert torch.equal(grad, b[1][name]), name


def sharded_keys(model: Any) -> dict[str, tuple[Any, ...]]:
    """What a distributed checkpoint of ``model`` consists of."""
    return {
        name: (getattr(t, "key", None), getattr(t, "global_shape", None), getattr(t, "replica_id", None))
        for name, t in model.sharded_state_dict().items()
    }


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
