"""Combinations that Megatron would run wrongly: each is refused, and its harmless neighbour is not."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.tensor_parallel import random
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.training.models.gpt import GPTModelConfig

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.checks import check, check_arguments, check_tracker

SMALL = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
VPAD = Regularization("vpad", p=0.1)
NORM = Regularization("vpad", p=0.1, statistics="norm")
PLAIN = Regularization("pre_linear", p=0.1)
NONE = Regularization("none")
OFF = Regularization("vpad", p=0.0)


def on(*sites: str, placement: Any = "pre_linear") -> Regularization:
    return Regularization(placement, p=0.1, sites=sites)


WINDOW = {"window_size": (7, 0)}
LOCAL = {"transformer_impl": "local"}
TWO = {**WINDOW, "window_attn_skip_freq": [1, 0, 1, 0], "context_parallel_size": 2}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
MOE = {"num_moe_experts": 4, "add_bias_linear": False}
TE_RNG = {"use_te_rng_tracker": True}
FUSED = {**LOCAL, **WINDOW, "masked_softmax_fusion": True, "bf16": True}
MLA = {"mla": True}
INFERENCE = {"transformer_impl": "inference_optimized", "normalization": "RMSNorm", "add_bias_linear": False}
OVERLAP = {
    **MOE,
    "overlap_moe_expert_parallel_comm": True,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
    "bf16": True,
}
PACKED = {"hybrid_context_parallel": True}
CHUNKS = {"mlp_chunks_for_training": 2}
MTP = {"mtp_num_layers": 1}
#: Not a TransformerConfig: its own validation would ask for parts that are not installed.
BARE = {"bare": True}


def recompute(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def graphs(*modules: str, implementation: str = "transformer_engine") -> dict[str, Any]:
    return {"cuda_graph_impl": implementation, "cuda_graph_modules": list(modules)}


def make(fields: dict[str, Any]) -> Any:
    fields = {**SMALL, **fields}
    if fields.pop("bare", False):
        return SimpleNamespace(**fields)
    cls = MLATransformerConfig if fields.pop("mla", False) else TransformerConfig
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls(**fields)


# words of the sentence, configuration, dropout, keywords
REFUSED: list[tuple[str, dict[str, Any], Regularization, dict[str, Any]]] = [
    ("window_attn_skip_freq lists 3 layers", {**WINDOW, "window_attn_skip_freq": [1, 1, 0]}, NONE, {}),
    ("cp_comm_type is 'p2p' for layer 1", TWO, NONE, {}),
    ("cp_comm_type is 'p2p' for layer 3", {**TWO, "cp_comm_type": ["a2a", "p2p", "p2p", "p2p"]}, NONE, {}),
    ("cp_comm_type is 'a2a+p2p'", {**TWO, "cp_comm_type": "a2a+p2p"}, VPAD, {}),
    ("recomputation never ends", recompute("mlp"), NONE, {}),
    (
        "mtp_use_repeated_layer runs one layer at 2 depths",
        {**BARE, "mtp_num_layers": 2, "mtp_use_repeated_layer": True},
        VPAD,
        {"keyed": True, "mtp_follows_spec": True},
    ),
    ("flash_decode ignores window_size", {**WINDOW, "flash_decode": True}, NONE, {}),
    ("'dsa' ignores window_size", {**WINDOW, **BARE, "experimental_attention_variant": "dsa"}, NONE, {}),
    ("masked_softmax_fusion ignores window_size", FUSED, NONE, {}),
    (
        "masked_softmax_fusion",
        {**FUSED, "transformer_impl": "transformer_engine", "attention_backend": AttnBackend.local},
        VPAD,
        {},
    ),
    ("masked_softmax_fusion", {**FUSED, **MLA}, NONE, {"core_attention": "sdpa"}),
    ("fused_single_qkv_rope needs", {"no_rope_freq": 4, "fused_single_qkv_rope": True}, NONE, {}),
    ("multi_latent_attention ignores no_rope_freq", {**MLA, "no_rope_freq": [0, 0, 0, 1]}, NONE, {}),
    ("heterogeneous_block_specs", {"heterogeneous_block_specs": True}, NONE, {}),
    ("'inference_optimized'", INFERENCE, OFF, {}),
    ("use_kitchen", {"use_kitchen": True}, VPAD, {}),
    ("site 'mlp' is inside", {"use_transformer_engine_op_fuser": True}, OFF, {}),
    ("site 'linear_fc2' is inside", {"use_transformer_engine_op_fuser": True}, on("linear_fc2"), {}),
    ("mla_down_proj_fusion", {**MLA, "mla_down_proj_fusion": True}, VPAD, {"kind": "hybrid"}),
    ("fused_residual_rmsnorm", {**MLA, "fused_residual_rmsnorm": True}, VPAD, {}),
    ("variant 'dsa' chooses", {**BARE, "experimental_attention_variant": "dsa"}, VPAD, {}),
    ("crashes without Transformer Engine", {**LOCAL, **recompute("layernorm")}, NONE, {}),
    ("megatron.training builds these layers from the stock spec", MTP, VPAD, {}),
    ("Megatron's own HybridStack", MTP, VPAD, {"kind": "hybrid", "mtp_follows_spec": True}),
    (
        "a stage without decoder layers",
        {**MTP, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Etttt|mL", **LOCAL}
        | {"pipeline_dtype": torch.float32},
        VPAD,
        {"mtp_follows_spec": True},
    ),
    ("recompute_granularity is 'full'", {**TE_RNG, **FULL}, PLAIN, {}),
    ("recompute_modules has 'layernorm'", {**TE_RNG, **recompute("layernorm")}, VPAD, {}),
    ("recompute_modules has 'mlp'", {**TE_RNG, **recompute("mlp"), "add_bias_linear": False}, on("linear_fc2"), {}),
    ("inference_rng_tracker", {"inference_rng_tracker": True, "tensor_model_parallel_size": 2}, PLAIN, {}),
    ("inference_rng_tracker", {"inference_rng_tracker": True}, PLAIN, {"keyed": True}),
    ("start_step 5 and ramp_steps 0", {}, Regularization("vpad", p=0.1, start_step=5), {}),
    ("start_step 0 and ramp_steps 9", {}, Regularization("vpad", p=0.1, ramp_steps=9), {}),
    ("captures site 'attention'", graphs(), VPAD, {"keyed": True}),
    ("captures site 'attention'", graphs("attn", implementation="local"), VPAD, {"keyed": True}),
    ("captures site 'output'", graphs(implementation="full_iteration"), on("output"), {"keyed": True}),
    ("overlap_moe_expert_parallel_comm", OVERLAP, on("attention"), {"keyed": True}),
    ("overlap_moe_expert_parallel_comm", OVERLAP, on("mlp"), {}),
    (
        "overlap_moe_expert_parallel_comm",
        {**OVERLAP, "sequence_parallel": True, "tensor_model_parallel_size": 2},
        on("attention"),
        {},
    ),
    ("hybrid_context_parallel splits every sample over other ranks, and masks", PACKED, PLAIN, {"keyed": True}),
    ("hybrid_context_parallel splits every sample over other ranks, and statistics", PACKED, VPAD, {}),
    ("mlp_chunks_for_training is 2, and site 'linear_fc2'", CHUNKS, on("linear_fc2"), {"keyed": True}),
    ("mlp_chunks_for_training is 2", CHUNKS, on("linear_fc2", placement="vpad"), {}),
    ("mlp_chunks_for_training is 2, and site 'mlp'", {**MOE, **CHUNKS}, on("mlp"), {"keyed": True}),
    ("inside the experts", MOE, on("linear_fc2"), {}),
    ("recompute_modules has 'moe'", {**MOE, **recompute("moe")}, VPAD, {}),
    ("recompute_modules has 'moe'", {**MOE, "moe_layer_recompute": True}, VPAD, {"keyed": True}),
    ("cuda_graph_modules has 'moe_router'", {**MOE, **graphs("moe_router")}, VPAD, {}),
]

HARMLESS: list[tuple[dict[str, Any], Regularization, dict[str, Any]]] = [
    ({**TWO, "cp_comm_type": "a2a"}, VPAD, {}),
    ({**TWO, "cp_comm_type": "all_gather"}, NONE, {}),
    ({**TWO, "cp_comm_type": ["a2a", "p2p", "all_gather", "p2p"]}, VPAD, {}),
    ({**TWO, "context_parallel_size": 1, "cp_comm_type": "p2p"}, VPAD, {}),
    ({"context_parallel_size": 2, "cp_comm_type": "p2p"}, VPAD, {"keyed": True}),
    ({"context_parallel_size": 2, "window_size": (-1, 0)}, VPAD, {}),
    ({"flash_decode": True}, VPAD, {}),
    ({**FUSED, "masked_softmax_fusion": False}, VPAD, {}),
    ({**FUSED, "bf16": False}, VPAD, {}),
    ({**FUSED, "window_size": (4095, 0)}, VPAD, {}),
    ({**FUSED, "transformer_impl": "transformer_engine"}, VPAD, {}),
    ({**FUSED, "softmax_type": "off-by-one"}, VPAD, {}),
    ({**FUSED, "window_size": None}, VPAD, {}),
    (FUSED, VPAD, {"core_attention": "sdpa"}),
    ({"no_rope_freq": [0, 0, 0, 0], "fused_single_qkv_rope": True}, VPAD, {}),
    ({"fused_single_qkv_rope": True}, VPAD, {}),
    ({"no_rope_freq": 4}, VPAD, {}),
    (MLA, VPAD, {}),
    (INFERENCE, NONE, {}),
    ({"use_kitchen": True}, NONE, {}),
    ({"use_transformer_engine_op_fuser": True}, on("attention"), {}),
    ({"use_transformer_engine_op_fuser": True}, NONE, {}),
    ({"use_transformer_engine_op_fuser": True, **MOE}, VPAD, {}),
    ({"use_transformer_engine_op_fuser": True}, VPAD, {"kind": "hybrid"}),
    ({**MLA, "mla_down_proj_fusion": True}, on("mlp"), {}),
    ({**MLA, "fused_residual_rmsnorm": True}, on("mlp"), {}),
    ({"normalization": "RMSNorm", "fused_residual_rmsnorm": True}, VPAD, {}),
    ({**BARE, "experimental_attention_variant": "gated_delta_net"}, VPAD, {}),
    ({**BARE, "experimental_attention_variant": "dsa"}, on("mlp"), {}),
    ({**LOCAL, **recompute("core_attn")}, VPAD, {}),
    (recompute("layernorm"), VPAD, {"keyed": True}),
    (MTP, NONE, {}),
    (MTP, OFF, {}),
    (MTP, VPAD, {"mtp_follows_spec": True}),
    (
        {**MTP, "pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettt|tmL"}
        | {"pipeline_dtype": torch.float32},
        VPAD,
        {"mtp_follows_spec": True},
    ),
    ({**TE_RNG, **FULL}, VPAD, {"keyed": True}),
    ({**TE_RNG, **FULL}, OFF, {}),
    ({**TE_RNG, **FULL}, on("output"), {}),
    ({**TE_RNG, **recompute("core_attn")}, VPAD, {}),
    ({**TE_RNG, **recompute("mlp"), "add_bias_linear": False}, VPAD, {}),
    (TE_RNG, VPAD, {}),
    (FULL, VPAD, {}),
    ({"inference_rng_tracker": True}, VPAD, {}),
    ({}, Regularization("vpad", p=0.1, start_step=5), {"keyed": True}),
    ({}, Regularization("vpad", p=0.0, start_step=5), {}),
    (graphs(), VPAD, {}),
    (graphs(), on("output"), {"keyed": True}),
    (graphs("attn"), on("mlp"), {"keyed": True}),
    (OVERLAP, on("attention"), {}),
    (OVERLAP, NONE, {"keyed": True}),
    (PACKED, PLAIN, {}),
    (PACKED, NORM, {}),
    (CHUNKS, VPAD, {"keyed": True}),
    (CHUNKS, on("linear_fc2"), {}),
    ({**CHUNKS, **recompute("mlp"), "add_bias_linear": False}, on("linear_fc2"), {"keyed": True}),
    ({**recompute("mlp"), "add_bias_linear": False}, NONE, {}),
    ({**MOE, "moe_layer_freq": [0, 0, 0, 0]}, on("linear_fc2"), {}),
    ({**MOE, **recompute("moe")}, on("attention"), {}),
    ({**MOE, **recompute("layernorm", "shared_experts")}, VPAD, {}),
    ({**MOE, **FULL}, VPAD, {}),
    ({**MOE, **graphs("attn")}, VPAD, {}),
    ({**MOE, **graphs("moe_router")}, on("attention"), {}),
]


@pytest.mark.parametrize(("sentence", "fields", "regularization", "keywords"), REFUSED)
def test_refused(monkeypatch, sentence, fields, regularization, keywords):
    config = make(fields)  # before the fake: a real configuration asks the device for its capabilities
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(random, "HAVE_TE", False)
    with pytest.raises(UserError) as error:
        check(config, regularization, **keywords)
    assert sentence in str(error.value)
    assert ": " in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("fields", "regularization", "keywords"), HARMLESS)
def test_harmless_neighbour(monkeypatch, fields, regularization, keywords):
    config = make(fields)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check(config, regularization, **keywords)


@pytest.mark.parametrize("kind", ["gpt", "hybrid"])
@pytest.mark.parametrize("placement", ["none", "pre_norm", "pre_linear", "vpad"])
@pytest.mark.parametrize("p", [None, 0.0, 0.2])
def test_a_plain_model_passes(kind, placement, p):
    for config in (make({}), make(LOCAL), make({"hidden_dropout": 0.1}), SimpleNamespace()):
        for keyed in (False, True):
            check(config, Regularization(placement, p=p), kind=kind, keyed=keyed)


def test_the_fused_softmax_is_no_matter_without_cuda():
    check(make(FUSED), VPAD)


def test_layernorm_recompute_needs_transformer_engine_alone(monkeypatch):
    monkeypatch.setattr(random, "HAVE_TE", True)
    check(make({**LOCAL, **recompute("layernorm")}), VPAD)


def test_p_is_the_models_where_none_is_given():
    dropping = Regularization("vpad")
    check(make({**TE_RNG, **FULL}), dropping)
    with pytest.raises(UserError, match="use_te_rng_tracker"):
        check(make({**TE_RNG, **FULL, "hidden_dropout": 0.1}), dropping)


def test_megatrons_own_dropout_is_megatrons_affair():
    fields = {**TE_RNG, **FULL, "hidden_dropout": 0.1, **MTP}
    check(make(fields), Regularization("pre_norm"))
    check(make(fields), NONE)


def test_a_nested_config_is_read_through():
    config = GPTModelConfig(transformer=make({**TE_RNG, **FULL}), vocab_size=64)
    with pytest.raises(UserError, match="use_te_rng_tracker"):
        check(config, VPAD)


def test_graph_safe_tracker():
    tracker = CudaRNGStatesTracker()
    check_tracker(make(FULL), VPAD, tracker)
    tracker.use_cudagraphable_rng = True  # its constructor wants CUDA
    with pytest.raises(UserError, match="the random tracker is graph-safe"):
        check_tracker(make(FULL), VPAD, tracker)
    check_tracker(make(FULL), VPAD, tracker, keyed=True)
    check_tracker(make({}), VPAD, tracker)
    check_tracker(make(FULL), NONE, tracker)


def test_inference_tracker():
    tracker = CudaRNGStatesTracker(is_inference_rng_tracker=True)
    check_tracker(make({}), VPAD, tracker)
    with pytest.raises(UserError, match="inference_rng_tracker"):
        check_tracker(make({"tensor_model_parallel_size": 2}), VPAD, tracker)
    with pytest.raises(UserError, match="inference_rng_tracker"):
        check_tracker(make({}), VPAD, tracker, keyed=True)


def test_arguments():
    def arguments(**fields: Any) -> SimpleNamespace:
        return SimpleNamespace(**{**SMALL, "te_rng_tracker": False, "no_rope_freq": None, **fields})

    check_arguments(arguments(), VPAD)
    check_arguments(arguments(**FULL), VPAD)
    with pytest.raises(UserError, match="te_rng_tracker is on and recompute_granularity is 'full'"):
        check_arguments(arguments(**FULL, te_rng_tracker=True), VPAD)
    check_arguments(arguments(**FULL, te_rng_tracker=True), VPAD, keyed=True)
    with pytest.raises(UserError, match="use_flashinfer_fused_rope"):
        check_arguments(arguments(use_flashinfer_fused_rope=True, no_rope_freq=[1, 0, 0, 0]), NONE)
    check_arguments(arguments(use_flashinfer_fused_rope=True, no_rope_freq=[0, 0, 0, 0]), NONE)
    check_arguments(arguments(use_flashinfer_fused_rope=True), NONE)
