"""Small models of Transformer Engine's parts, stock and with dropout, and what a distributed checkpoint holds of them.

The stock specs are Megatron's own, and the oracle of the tests.
"""

import copy
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedObject, apply_factories
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_decoder_block_spec,
    get_gpt_layer_with_transformer_engine_spec,
    get_gpt_mtp_block_spec,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.substitution import apply

Specs = dict[str, Any]
"""Arguments of ``GPTModel`` or ``HybridModel`` that are specs."""

_MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 8, "mamba_state_dim": 8, "mamba_num_groups": 2}
_MOE = {"num_moe_experts": 4, "moe_ffn_hidden_size": 32}
_MLA = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
}
_GATED_DELTA_NET = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
}
BEHIND_NORMS = ("attention", "mlp", "mamba")
DENSE = (*BEHIND_NORMS, "linear_proj", "linear_fc2")


def make_config(**fields: Any) -> TransformerConfig:
    config_class = MLATransformerConfig if fields.get("multi_latent_attention") else TransformerConfig
    swiglu = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu}
    return config_class(
        **{
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 96,
            "num_attention_heads": 4,
            "transformer_impl": "transformer_engine",
            "normalization": "RMSNorm",
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "bias_dropout_fusion": False,
            **swiglu,
            **fields,
        }
    )


class LinearsOfMixer(MegatronModule):
    """In the place of ``GatedDeltaNet``, which needs packages with CUDA: the linears that Transformer Engine gives it,
    built as it builds them."""

    def __init__(self, config: Any, submodules: Any, pg_collection: Any, **more: Any) -> None:
        super().__init__(config)
        width = config.hidden_size
        common = {"config": config, "init_method": config.init_method, "bias": config.add_bias_linear}
        common |= {"skip_bias_add": False, "is_expert": False, "tp_group": pg_collection.tp}
        self.in_proj = build_module(
            submodules.in_proj, width, 2 * width, gather_output=False, tp_comm_buffer_name="fc1", **common
        )
        self.out_proj = build_module(
            submodules.out_proj, 2 * width, width, input_is_parallel=True, tp_comm_buffer_name="fc2", **common
        )


def _layer(**fields: Any) -> Callable[[TransformerConfig], Specs]:
    return lambda config: {"transformer_layer_spec": get_gpt_layer_with_transformer_engine_spec(**fields)}


def _block(config: TransformerConfig) -> Specs:
    return {"transformer_layer_spec": get_gpt_decoder_block_spec(config, use_transformer_engine=True)}


def _with_mtp(config: TransformerConfig) -> Specs:
    block = _block(config)["transformer_layer_spec"]
    mtp = get_gpt_mtp_block_spec(config, block, use_transformer_engine=True)
    return {"transformer_layer_spec": block, "mtp_block_spec": mtp}


def _hybrid(config: TransformerConfig) -> Specs:
    spec = copy.deepcopy(hybrid_stack_spec)
    spec.submodules.gdn_layer.submodules.self_attention.module = LinearsOfMixer
    return {"hybrid_stack_spec": spec}


@dataclasses.dataclass(frozen=True)
class Case:
    """A stock model: fields of its config, its specs, the sites to regularise, and a hybrid's layers."""

    fields: dict[str, Any]
    specs: Callable[[TransformerConfig], Specs]
    sites: tuple[str, ...] = DENSE
    pattern: str | None = None

    def config(self, **fields: Any) -> TransformerConfig:
        layers = {"num_layers": len(self.pattern), "is_hybrid_model": True} if self.pattern else {}
        return make_config(**layers, **self.fields, **fields)


CASES = {
    "dense": Case({}, _layer()),
    "layer_norm": Case({"normalization": "LayerNorm"}, _layer()),
    "bias": Case({"normalization": "LayerNorm", "add_bias_linear": True}, _layer()),
    "qkv_bias": Case({"add_qkv_bias": True, "num_query_groups": 2}, _layer()),
    "zero_centred": Case({"layernorm_zero_centered_gamma": True}, _layer()),
    "qk_norm": Case({"qk_layernorm": True}, _layer(qk_layernorm=True)),
    "moe": Case(_MOE, _layer(num_experts=4), BEHIND_NORMS),
    "moe_grouped": Case(
        {**_MOE, "moe_grouped_gemm": True, "moe_shared_expert_intermediate_size": 32},
        _layer(num_experts=4, moe_grouped_gemm=True),
        BEHIND_NORMS,
    ),
    "mla": Case(_MLA, _layer(multi_latent_attention=True)),
    "mla_qk_norm": Case({**_MLA, "qk_layernorm": True}, _layer(multi_latent_attention=True, qk_layernorm=True)),
    "block": Case({**_MOE, "moe_layer_freq": [0, 1]}, _block, (*BEHIND_NORMS, "output")),
    "mtp": Case({"mtp_num_layers": 1}, _with_mtp, (*DENSE, "output", "mtp")),
    "hybrid": Case(
        {**_MOE, **_MAMBA, "moe_grouped_gemm": True}, _hybrid, (*BEHIND_NORMS, "output", "out_proj"), "M*-E"
    ),
    "hybrid_mla": Case(_MLA, _hybrid, (*BEHIND_NORMS, "output"), "+-"),
    "hybrid_gated_delta_net": Case(_GATED_DELTA_NET, _hybrid, (*BEHIND_NORMS, "out_proj"), "G-"),
}


def regularized(specs: Specs, regularization: Regularization) -> Specs:
    return {name: apply(spec, regularization) for name, spec in specs.items()}


def build(case: Case, specs: Specs, config: TransformerConfig, *, seed: int = 1) -> Any:
    """A model of ``specs``, weights from ``seed``."""
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    more: dict[str, Any] = {"vocab_size": 96, "max_sequence_length": 64, "position_embedding_type": "rope"}
    more["pg_collection"] = ProcessGroupCollection.use_mpu_process_groups()
    if case.pattern is None:
        return GPTModel(config, **specs, **more)
    return HybridModel(config, **specs, **more, hybrid_layer_pattern=case.pattern)


def disturb(model: torch.nn.Module) -> None:
    """Bring all norms far from their initial values; and all biases, which begin at zero."""
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=0.8, std=0.3)


def checkpoint_content(model: Any) -> list[tuple[Any, ...]]:
    """All that a distributed checkpoint says of every piece of ``model`` that this rank saves, but for the values."""
    state = model.sharded_state_dict()
    apply_factories(state)
    content = []
    for piece in nested_values(state):
        if isinstance(piece, ShardedBase):
            known = {field.name: getattr(piece, field.name) for field in dataclasses.fields(piece)}
            content.append((type(piece).__name__, *((name, known[name]) for name in known if name != "data")))
    return sorted(content, key=repr)


def parameters(model: Any) -> dict[tuple[str, ...], torch.nn.Parameter]:
    """The parameters by their keys in a checkpoint, and the numbers of layer and expert, which some keys leave out."""
    found = {
        (piece.key, *re.findall(r"\.(?:weight|bias)?(\d+)", name)): piece.data
        for name, piece in model.sharded_state_dict().items()
        if not isinstance(piece, ShardedObject)
    }
    assert {id(parameter) for parameter in found.values()} == {id(parameter) for parameter in model.parameters()}
    return found


def values(model: Any) -> dict[tuple[str, ...], torch.Tensor]:
    """Copies of :func:`parameters`."""
    return {name: parameter.detach().clone() for name, parameter in parameters(model).items()}


def assert_equal(found: dict[Any, torch.Tensor], expected: dict[Any, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
