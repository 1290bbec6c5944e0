"""Combinations that Megatron-Core 0.19.2 would run wrongly, or crash in late, refused before a model is built.

Every rule is a condition and the sentence that the user reads; the comment says what Megatron does, and where.
"""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.utils import is_layer_window_attention

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import SITES, Regularization

__all__ = ["check", "check_arguments", "check_tracker"]

Kind = Literal["gpt", "hybrid"]

#: Keys up to which Megatron's fused softmax kernel is used (``fused_softmax.py::is_kernel_available``).
_FUSED_SOFTMAX_KEYS = 4096

# The final norm is outside of all that is recomputed, and of what is captured layer by layer.
_IN_LAYERS = frozenset(SITES) - {"output"}
#: What is recomputed -> the sites that drop again when it is (``transformer_layer.py``, ``recompute.py``).
_RECOMPUTED = {"full": _IN_LAYERS, "layernorm": {"attention", "mlp"}, "mlp": {"linear_fc2"}}
#: Member of ``cuda_graph_modules`` -> the sites inside (``transformer_layer.py::_get_submodules_under_cudagraphs``).
_CAPTURED = {
    "attn": {"attention", "linear_proj", "out_proj"},
    "mlp": {"mlp", "linear_fc2"},
    "moe": {"mlp"},
    "moe_router": {"mlp"},
    "moe_preprocess": {"mlp"},
    "mamba": {"mamba", "out_proj"},
}


def check(
    config: Any,
    regularization: Regularization,
    *,
    kind: Kind = "gpt",
    keyed: bool = False,
    mtp_follows_spec: bool = False,
    core_attention: Literal["sdpa", "megatron"] = "megatron",
) -> None:
    """Raise :class:`UserError` where Megatron would run a model of ``config`` with this dropout or pattern wrongly.

    Args:
        config: Megatron's ``TransformerConfig``, a ``GPTModelConfig`` around one, or Megatron Bridge's provider. Fields
            that it lacks count as off.
        regularization: Which dropout. Rules about windows and rotary positions apply for every placement, those about
            dropout where it is this package's and p > 0, those about the seams of a spec for every p.
        kind: ``gpt``: layers in ``TransformerBlock``; ``hybrid``: in ``HybridStack``.
        keyed: Masks do not depend on the layout (:mod:`.binding`); else they are drawn from Megatron's random streams.
        mtp_follows_spec: Layers of multi-token prediction are made from the substituted spec, as Megatron Bridge does
            and ``megatron.training`` does not.
        core_attention: For local layers, as in :func:`megatron_lengthgen.specs.gpt.block_spec`.
    """
    run = _Run(config, regularization, kind, keyed, mtp_follows_spec, core_attention)
    for rules in (_window, _nope, _seams, _streams, _schedules, _experts):
        _refuse(rules(run))


def check_tracker(config: Any, regularization: Regularization, tracker: Any, *, keyed: bool = False) -> None:
    """Like :func:`check`, for what only Megatron's random tracker (``get_cuda_rng_tracker()``) knows."""
    run = _Run(config, regularization, keyed=keyed)
    if random.is_graph_safe_cuda_rng_tracker(tracker):
        _refuse(_graph_safe(run, "the random tracker is graph-safe (te_rng_tracker)"))
    if getattr(tracker, "is_inference_rng_tracker", False):
        _refuse(_inference_tracker(run))


def check_arguments(args: argparse.Namespace, regularization: Regularization, *, keyed: bool = False) -> None:
    """Like :func:`check`, for what Megatron's parsed arguments say and its ``TransformerConfig`` does not carry."""
    run = _Run(args, regularization, keyed=keyed)
    if run.get("te_rng_tracker"):
        _refuse(_graph_safe(run, "te_rng_tracker is on"))
    # Attention.forward forgets a layer's rotary positions before the key-value cache, which then rotates all the same.
    if run.get("use_flashinfer_fused_rope") and run.nope:
        raise UserError(
            "use_flashinfer_fused_rope is on, which rotates the layers too that no_rope_freq excepts: switch "
            "use_flashinfer_fused_rope off"
        )


def _refuse(sentences: Iterator[str]) -> None:
    for sentence in sentences:
        raise UserError(sentence)


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the rules ask about."""

    config: Any
    regularization: Regularization
    kind: Kind = "gpt"
    keyed: bool = False
    mtp_follows_spec: bool = False
    core_attention: str = "megatron"

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self.config, name, default)

    @property
    def sites(self) -> frozenset[str]:
        """Sites of this package's dropout, whatever p is."""
        return frozenset(self.regularization.sites if self.regularization.is_active else ())

    @property
    def dropped(self) -> frozenset[str]:
        """Sites where something is dropped."""
        p = self.regularization.p
        return self.sites if (self.get("hidden_dropout", 0.0) if p is None else p) > 0 else frozenset()

    @property
    def has_batch_statistics(self) -> bool:
        return self.regularization.placement == "vpad" and self.regularization.statistics == "batch"

    @property
    def windowed(self) -> list[int]:
        """Numbers of the layers that see a part of the past only; a window of -1 is unlimited."""
        window, frequency = self.get("window_size"), self.get("window_attn_skip_freq")
        if not window or window[0] < 0:
            return []
        layers = range(1, self.get("num_layers", 0) + 1)
        return [layer for layer in layers if is_layer_window_attention(window, frequency, layer)]

    @property
    def nope(self) -> bool:
        """Does any layer go without rotary positions?"""
        skip = self.get("no_rope_freq")
        return any(skip) if isinstance(skip, list) else bool(skip)

    @property
    def has_experts(self) -> bool:
        frequency = self.get("moe_layer_freq", 1)
        return bool(self.get("num_moe_experts")) and (any(frequency) if isinstance(frequency, list) else True)

    @property
    def stages(self) -> list[set[str]]:
        """Kinds of layers on each pipeline stage of a custom layout."""
        layout = getattr(self.get("pipeline_model_parallel_layout"), "layout", ())
        return [{layer.name for layer in stage} for rank in layout for stage in rank]

    @property
    def recomputed(self) -> frozenset[str]:
        """``full``, or the modules of selective recomputation."""
        granularity = self.get("recompute_granularity")
        modules = {"full"} if granularity == "full" else set()
        if granularity == "selective":
            modules |= set(self.get("recompute_modules") or ())
        return frozenset(modules | ({"moe"} if self.get("moe_layer_recompute") else set()))

    @property
    def graph_modules(self) -> frozenset[str]:
        """What ``cuda_graph_modules`` names; empty for whole layers."""
        modules = self.get("cuda_graph_modules") or ()
        names = {getattr(module, "name", module) for module in ([modules] if isinstance(modules, str) else modules)}
        return frozenset(names - {"full"})

    @property
    def captured(self) -> frozenset[str]:
        """Sites inside CUDA graphs."""
        implementation = self.get("cuda_graph_impl", "none")
        if implementation == "none":
            return frozenset()
        if implementation == "full_iteration":
            return frozenset(SITES)
        modules = self.graph_modules
        return _IN_LAYERS if not modules else frozenset().union(*(_CAPTURED.get(name, ()) for name in modules))


def _window(run: _Run) -> Iterator[str]:
    window, frequency, layers = run.get("window_size"), run.get("window_attn_skip_freq"), run.get("num_layers", 0)
    # utils.py::is_layer_window_attention reads the list by layer number, and nothing checks its length.
    if window and isinstance(frequency, list) and len(frequency) != layers:
        yield (
            f"window_attn_skip_freq lists {len(frequency)} layers, and the model has {layers}: give one entry per layer"
        )
    windowed = run.windowed
    if not windowed:
        return
    ways = run.get("cp_comm_type")
    for layer in windowed if run.get("context_parallel_size", 1) > 1 else ():
        way = (ways[layer - 1] if isinstance(ways, list) else ways) or "p2p"
        # Transformer Engine's context_parallel.py::attn_forward_func_with_cp asserts it in the first forward.
        if way not in ("a2a", "all_gather"):
            yield (
                f"cp_comm_type is {way!r} for layer {layer}, which attends through a window, and with windows context "
                "parallelism works by 'a2a' and 'all_gather' alone: set cp_comm_type to one of these"
            )
    # Attention.flash_decode calls its kernel without a window.
    if run.get("flash_decode"):
        yield (
            f"flash_decode ignores window_size {tuple(window)}, so that generated tokens see the whole past: switch "
            "flash_decode off"
        )
    # DSAttention chooses its own keys (experimental_attention_variant/dsa.py).
    if run.get("experimental_attention_variant") == "dsa":
        yield (f"experimental_attention_variant 'dsa' ignores window_size {tuple(window)}: leave one of the two out")
    # FusedScaleMaskSoftmax.forward_fused_softmax masks the future and nothing else.
    stock = run.core_attention == "megatron" or run.get("multi_latent_attention")
    is_local = run.get("transformer_impl") == "local" or getattr(run.get("attention_backend"), "name", "") == "local"
    if (
        (run.get("masked_softmax_fusion") and (run.get("fp16") or run.get("bf16")))
        and (stock and is_local and run.get("softmax_type", "vanilla") == "vanilla")
        and window[0] + 1 < _FUSED_SOFTMAX_KEYS
        and torch.cuda.is_available()
    ):
        yield (
            f"masked_softmax_fusion ignores window_size {tuple(window)} in Megatron's local attention: switch it off "
            "(no_masked_softmax_fusion), or use transformer_impl: transformer_engine"
        )


def _nope(run: _Run) -> Iterator[str]:
    if not run.nope:
        return
    # Attention.forward asserts that every layer has rotary positions to fuse.
    if run.get("fused_single_qkv_rope"):
        yield (
            "fused_single_qkv_rope needs rotary positions in every layer, and no_rope_freq excepts some: switch "
            "fused_single_qkv_rope off"
        )
    # MultiLatentAttention has a forward and rotary embeddings of its own.
    if run.kind == "gpt" and run.get("multi_latent_attention"):
        yield (
            "multi_latent_attention ignores no_rope_freq and rotates in every layer: leave no_rope_freq out, or use "
            "another attention"
        )


def _seams(run: _Run) -> Iterator[str]:
    """Parts of a model that leave no room for dropout, or that are built past the spec."""
    config, sites, dropped = run.get, run.sites, run.dropped
    # training/models/gpt.py::GPTModelBuilder.build_model puts DotProductAttention into a layer spec, the caller's own.
    if (
        run.core_attention == "sdpa"
        and config("transformer_impl") == "local"
        and getattr(config("attention_backend"), "name", "") == "local"
    ):
        yield (
            "attention_backend 'local' makes Megatron put its own DotProductAttention in place of core_attention "
            "'sdpa': set attention_backend: auto, or core_attention: megatron"
        )
    # heterogeneous_layer_specs.py makes a spec per layer, which no entry point of this package does.
    if run.kind == "gpt" and config("heterogeneous_block_specs"):
        yield "heterogeneous_block_specs is on, and this package's specs make all layers alike: leave it out"
    if sites and config("transformer_impl") == "inference_optimized":
        yield (
            "transformer_impl 'inference_optimized' fuses norms, communication and linears, and no dropout fits "
            "between: use transformer_impl: transformer_engine, or placement none"
        )
    if sites and config("use_kitchen"):
        yield "use_kitchen replaces norms and linears by ones that are not public: switch use_kitchen off"
    # TEFusedMLP rebuilds the MLP from a LayerNormLinear in its first forward, past the hooks of its parts.
    if (
        config("use_transformer_engine_op_fuser")
        and (run.kind == "gpt" and config("transformer_impl") != "local" and not run.has_experts)
        and (site := sorted(sites & {"mlp", "linear_fc2"}))
    ):
        yield (
            f"use_transformer_engine_op_fuser fuses the whole MLP, and site {site[0]!r} is inside: switch "
            "use_transformer_engine_op_fuser off, or leave the site out"
        )
    # gpt_layer_specs.py fuses the norm; HybridStack._fuse_mla_down_proj replaces it by IdentityOp, whatever the spec.
    if "attention" in sites and config("mla_down_proj_fusion"):
        yield (
            "mla_down_proj_fusion fuses the norm with the projection, and site 'attention' is between them: switch "
            "mla_down_proj_fusion off, or leave the site out"
        )
    # TEFusedResidualRMSNorm calls forward hooks without an output and raises when one gives a new output.
    if (
        "attention" in dropped
        and config("fused_residual_rmsnorm")
        and (run.kind == "gpt" and config("multi_latent_attention") and config("transformer_impl") != "local")
    ):
        yield (
            "fused_residual_rmsnorm does not hand out the norm's output, which site 'attention' drops: switch "
            "fused_residual_rmsnorm off, or leave the site out"
        )
    variant = config("experimental_attention_variant")
    # DSAttention's indexer chooses keys by the same input as the projections.
    if "attention" in dropped and variant not in (None, "gated_delta_net"):
        yield (
            f"experimental_attention_variant {variant!r} chooses its keys by the input that site 'attention' drops: "
            "leave the variant or the site out"
        )
    # CheckpointWithoutOutput takes every argument but None for FP8, and FP8 from Transformer Engine.
    if "layernorm" in run.recomputed and config("transformer_impl") == "local" and not random.HAVE_TE:
        yield (
            "recompute_modules has 'layernorm', which crashes without Transformer Engine: install it, or leave "
            "'layernorm' out"
        )
    # TransformerLayer gives the MLP's bias through tensor_parallel.checkpoint, whose backward then runs itself again.
    if "mlp" in run.recomputed and config("add_bias_linear"):
        yield (
            "recompute_modules has 'mlp' and the MLP has biases, with which Megatron's recomputation never ends: leave "
            "'mlp' out, or set disable_bias_linear: true"
        )
    if dropped and config("mtp_num_layers"):
        yield from _multi_token_prediction(run)


def _multi_token_prediction(run: _Run) -> Iterator[str]:
    layers = run.get("mtp_num_layers")
    # MultiTokenPredictionLayer hard-codes HybridStack.
    if run.kind == "hybrid":
        yield (
            f"mtp_num_layers is {layers}, and a hybrid model builds multi-token prediction in Megatron's own "
            "HybridStack instead of the spec's: leave mtp_num_layers out"
        )
    # megatron/training/models/gpt.py::mtp_block_spec takes the stock layer.
    elif not run.mtp_follows_spec:
        yield (
            f"mtp_num_layers is {layers}, and megatron.training builds these layers from the stock spec, without this "
            "dropout: leave mtp_num_layers out, or train with Megatron Bridge"
        )
    # One layer, and so one identity, at several depths.
    elif run.keyed and run.get("mtp_use_repeated_layer") and (layers or 0) > 1:
        yield (
            f"mtp_use_repeated_layer runs one layer at {layers} depths, which would all have the same masks: switch it "
            "off"
        )
    # Bridge's mtp_block_spec takes a stock layer where the stage has none of the spec's.
    elif any("mtp" in stage and "decoder" not in stage for stage in run.stages):
        yield (
            f"pipeline_model_parallel_layout {run.get('pipeline_model_parallel_layout')} gives multi-token prediction "
            "a stage without decoder layers, where Megatron Bridge builds it from the stock spec, without this "
            "dropout: put a decoder layer on that stage"
        )


def _streams(run: _Run) -> Iterator[str]:
    if run.get("use_te_rng_tracker"):
        yield from _graph_safe(run, "use_te_rng_tracker is on")
    if run.get("inference_rng_tracker"):
        yield from _inference_tracker(run)


def _graph_safe(run: _Run, tracker: str) -> Iterator[str]:
    # random.py::_get_all_rng_states keeps generators and not their values, so that a recompute finds advanced ones.
    for module in sorted(run.recomputed):
        if not run.keyed and run.dropped & _RECOMPUTED.get(module, frozenset()):
            what = "recompute_granularity is 'full'" if module == "full" else f"recompute_modules has {module!r}"
            yield (
                f"{tracker} and {what}, so that the recomputation would draw other masks than the forward: switch "
                "one of them off"
            )


def _inference_tracker(run: _Run) -> Iterator[str]:
    # random.py::InferenceCudaRNGStatesTracker neither switches streams nor keeps states.
    if run.dropped and (run.keyed or run.get("tensor_model_parallel_size", 1) > 1):
        yield (
            "inference_rng_tracker is on, whose random streams neither differ between tensor-parallel ranks nor keep a "
            "state: switch inference_rng_tracker off for training"
        )


def _schedules(run: _Run) -> Iterator[str]:
    """Ways to run a model's layers other than one forward of the model after another."""
    if not run.dropped:
        return
    regularization = run.regularization
    if regularization.has_schedule and not run.keyed:
        yield (
            f"start_step {regularization.start_step} and ramp_steps {regularization.ramp_steps} need to know the "
            "training step, which a spec alone does not: use this package's trainer, or leave them out"
        )
    # The key and p are read in Python, which a graph does not repeat.
    if run.keyed and (site := sorted(run.captured & run.dropped)):
        yield (
            f"cuda_graph_impl is {run.get('cuda_graph_impl')!r} and captures site {site[0]!r}, whose mask would be the "
            "same in all steps: set cuda_graph_impl: none"
        )
    # combined_1f1b.py calls build_schedule_plan in place of forward, and its fine_grained_callables.py calls the parts
    # of a layer: no hook of the model or of MoELayer, and no switch of the random stream as in TransformerBlock.
    if run.get("overlap_moe_expert_parallel_comm") and (
        run.keyed or "mlp" in run.dropped or run.get("sequence_parallel")
    ):
        yield (
            "overlap_moe_expert_parallel_comm runs the parts of layers past the model's forward, where dropout is "
            "lost or draws equal masks on tensor-parallel ranks: switch it off"
        )
    # hybrid_cp_schedule.py: every sample has context-parallel ranks of its own, and ranks differ in their microbatches.
    if run.get("hybrid_context_parallel") and (run.keyed or run.has_batch_statistics):
        what = "masks that do not depend on the layout" if run.keyed else "statistics 'batch'"
        yield (
            f"hybrid_context_parallel splits every sample over other ranks, and {what} cannot follow it: switch "
            "hybrid_context_parallel off"
        )
    # TransformerLayer._forward_mlp calls the MLP once per chunk.
    chunks = run.get("mlp_chunks_for_training", 1)
    inside = run.dropped & ({"linear_fc2", "mlp"} if run.has_experts else {"linear_fc2"})
    if chunks > 1 and inside and "mlp" not in run.recomputed and (run.keyed or run.has_batch_statistics):
        yield (
            f"mlp_chunks_for_training is {chunks}, and site {min(inside)!r} would take every chunk for the whole "
            "sequence: set it to 1, or leave the site out"
        )


def _experts(run: _Run) -> Iterator[str]:
    if not run.has_experts:
        return
    if "linear_fc2" in run.sites:
        yield (
            f"num_moe_experts is {run.get('num_moe_experts')}, and site 'linear_fc2' is inside the experts, where "
            "tokens have lost their places: leave the site out"
        )
    if "mlp" not in run.dropped:
        return
    # MoELayer.forward's checkpoint begins behind the hook that keeps the router's input, and repeats the router.
    if "moe" in run.recomputed:
        yield (
            "recompute_modules has 'moe', which repeats the router on the dropped input of the experts: leave 'moe' "
            "out, use recompute_granularity: full, or leave site 'mlp' out"
        )
    # The layer is called in parts then, each of which would be dropped (TransformerLayer._te_cuda_graph_replay_impl,
    # MoETransformerLayer._forward_mlp).
    if run.get("cuda_graph_impl", "none") != "none" and (
        part := sorted(run.graph_modules & {"moe_router", "moe_preprocess"})
    ):
        yield (
            f"cuda_graph_modules has {part[0]!r}, with which a mixture-of-experts layer is called in parts and its "
            f"input dropped twice: leave {part[0]!r} out, or leave site 'mlp' out"
        )
