"""Block specs of GPT models: for this package's trainer, and by name for Megatron's ``--spec``.

``--spec megatron_lengthgen.specs.gpt gpt_vpad`` selects one in anybody's Megatron run; p is ``--hidden-dropout``.
"""

import copy
import warnings
from typing import Any, Literal, get_args

import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron_lengthgen.attention.core import SDPACoreAttention
from megatron_lengthgen.choices import check_choice
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.checks import check
from megatron_lengthgen.specs.local_parts import replace_local_parts
from megatron_lengthgen.specs.substitution import apply

__all__ = ["block_spec", "gpt_none", "gpt_pre_linear", "gpt_pre_norm", "gpt_vpad", "gpt_vpad_mean_fill", "stock_block"]

CoreAttention = Literal["sdpa", "megatron"]


def block_spec(
    config: Any, regularization: Regularization, vp_stage: int | None = None, *, core_attention: CoreAttention = "sdpa"
) -> TransformerBlockSubmodules:
    """The layers that this pipeline stage builds, with dropout as asked, and the final norm.

    Args:
        config: Megatron's ``GPTModelConfig``, or a flat ``TransformerConfig`` (Megatron Bridge's provider is one).
        regularization: Which dropout.
        vp_stage: Virtual pipeline stage, if any.
        core_attention: ``sdpa``: this package's, linear in memory; ``megatron``: the stock ``DotProductAttention``.

    Returns:
        A block spec for ``GPTModel(transformer_layer_spec=...)``; its pipeline stage is read from Megatron's parallel
        state.

    Raises:
        UserError: a kind of model that is not supported yet.

    Source: ``megatron/training/models/gpt.py::default_layer_spec``.
    """
    return apply(stock_block(config, vp_stage, core_attention=core_attention), regularization)


def stock_block(
    config: Any, vp_stage: int | None = None, *, core_attention: CoreAttention = "sdpa"
) -> TransformerBlockSubmodules:
    """Like :func:`block_spec`, before any dropout is substituted: Megatron's own dropouts are as ``config`` says."""
    check_choice("core_attention", core_attention, get_args(CoreAttention))
    transformer = getattr(config, "transformer", config)
    use_te = transformer.transformer_impl == "transformer_engine"
    block = get_gpt_decoder_block_spec(
        transformer,
        use_transformer_engine=use_te,
        normalization=transformer.normalization,
        qk_l2_norm=transformer.qk_l2_norm,
        vp_stage=vp_stage,
    )
    return block if use_te else _with_our_parts(block, core_attention)


def _with_our_parts(block: TransformerBlockSubmodules, core_attention: CoreAttention) -> TransformerBlockSubmodules:
    """Megatron's local parts replaced by this package's; Apex norms are kept."""
    block = copy.deepcopy(block)
    replace_local_parts(block)
    for layer in block.layer_specs or []:
        attention = layer.submodules.self_attention
        if attention.module is SelfAttention:  # multi-latent attention has values of another width than its keys
            attention.submodules.core_attention = core_attention_class(core_attention)
    return block


def core_attention_class(core_attention: CoreAttention) -> type:
    """The core attention of local layers by its name: this package's, or Megatron's ``DotProductAttention``."""
    if core_attention == "sdpa":
        return SDPACoreAttention
    return DotProductAttention


def _named(config: Any, vp_stage: int | None, regularization: Regularization) -> TransformerBlockSubmodules:
    transformer = getattr(config, "transformer", config)
    # A flat config is Megatron Bridge's, which makes layers of multi-token prediction from this spec.
    check(transformer, regularization, core_attention="sdpa", mtp_follows_spec=transformer is config)
    _warn_about_other_dropouts(transformer, regularization.placement)
    return block_spec(config, regularization, vp_stage)


def _warn_about_other_dropouts(transformer: Any, placement: str) -> None:
    """The layer spec cannot switch off the embedding's and attention's own dropouts: say so where they are on."""
    if placement == "pre_norm" or (dist.is_initialized() and dist.get_rank() != 0):
        return
    others = []
    if transformer.hidden_dropout > 0:
        others.append(f"hidden_dropout={transformer.hidden_dropout} acts on the embedding's output too")
    if transformer.attention_dropout > 0:
        others.append(f"attention_dropout={transformer.attention_dropout} acts on the attention weights")
    if others:
        # One text, one place: Python's default filter shows it once.
        warnings.warn(
            f"gpt_{placement}: {' and '.join(others)}, which a layer spec cannot switch off; set attention_dropout to "
            "0, and bind p in the spec (block_spec with Regularization(p=...)) with hidden_dropout 0 for dropout at "
            "the chosen sites alone",
            stacklevel=3,
        )
    if transformer.hidden_dropout == 0 and placement != "none":
        warnings.warn(f"gpt_{placement}: hidden_dropout is 0, so that no activation is dropped", stacklevel=3)


def gpt_none(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """No dropout in the layers."""
    return _named(config, vp_stage, Regularization("none"))


def gpt_pre_norm(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Megatron's own residual dropout, p = ``hidden_dropout``."""
    return _named(config, vp_stage, Regularization("pre_norm"))


def gpt_pre_linear(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Pre-Linear dropout between norms and their linears, p = ``hidden_dropout``."""
    return _named(config, vp_stage, Regularization("pre_linear"))


def gpt_vpad(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Variance-preserving affine dropout, zero fill, batch statistics, p = ``hidden_dropout``."""
    return _named(config, vp_stage, Regularization("vpad"))


def gpt_vpad_mean_fill(config: Any, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Variance-preserving affine dropout, mean fill, batch statistics, p = ``hidden_dropout``."""
    return _named(config, vp_stage, Regularization("vpad", fill="mean"))
