"""Stack specs of hybrid models: for this package's trainer, and by name for ``--spec`` and ``hybrid_stack_spec``.

Megatron wants a ``ModuleSpec`` here, not a function. The named ones are made of Transformer Engine's parts where it is
installed, and of the local parts elsewhere.
"""

import copy
from typing import Any, Literal

from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mamba_mixer import MambaMixerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.gpt import CoreAttention, core_attention_class
from megatron_lengthgen.specs.hybrid_stack import FinalNormHybridStack, FinalNormHybridStackSubmodules
from megatron_lengthgen.specs.local_parts import replace_local_parts
from megatron_lengthgen.specs.substitution import apply
from megatron_lengthgen.specs.torch_norm import TorchNorm
from megatron_lengthgen.ssm.cached_mixer import CachedMambaMixer

__all__ = [
    "hybrid_none",
    "hybrid_pre_linear",
    "hybrid_pre_norm",
    "hybrid_vpad",
    "hybrid_vpad_mean_fill",
    "stack_spec",
    "stock_stack",
]


def stack_spec(
    transformer_impl: Literal["local", "transformer_engine"],
    regularization: Regularization,
    *,
    core_attention: CoreAttention = "sdpa",
) -> ModuleSpec:
    """A ``HybridStack`` spec with dropout as asked.

    Args:
        transformer_impl: As in Megatron's config.
        regularization: Which dropout.
        core_attention: For the local parts, as in :func:`megatron_lengthgen.specs.gpt.block_spec`.
    """
    return apply(stock_stack(transformer_impl, core_attention=core_attention), regularization)


def stock_stack(
    transformer_impl: Literal["local", "transformer_engine"], *, core_attention: CoreAttention = "sdpa"
) -> ModuleSpec:
    """Like :func:`stack_spec`, before any dropout is substituted."""
    if transformer_impl != "local":
        return copy.deepcopy(hybrid_layer_specs.hybrid_stack_spec)
    layer = get_gpt_layer_local_spec().submodules
    layer.self_attention.submodules.core_attention = core_attention_class(core_attention)
    attention = TransformerLayerSubmodules(
        input_layernorm=TorchNorm, self_attention=layer.self_attention, self_attn_bda=get_bias_dropout_add
    )
    mlp = TransformerLayerSubmodules(pre_mlp_layernorm=TorchNorm, mlp=layer.mlp, mlp_bda=get_bias_dropout_add)
    experts = get_gpt_layer_local_spec(num_experts=1).submodules.mlp
    moe = TransformerLayerSubmodules(pre_mlp_layernorm=TorchNorm, mlp=experts, mlp_bda=get_bias_dropout_add)
    mamba = MambaLayerSubmodules(
        norm=TorchNorm,
        mixer=ModuleSpec(
            module=CachedMambaMixer,
            submodules=MambaMixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear),
        ),
        mamba_bda=get_bias_dropout_add,
    )
    # Keys as in a checkpoint of the Transformer Engine stack, where these norms are parts of the linears.
    attention.sharded_state_dict_keys_map = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}
    mlp.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    mamba.sharded_state_dict_keys_map = {"norm.": "mixer.in_proj.layer_norm_"}
    spec = ModuleSpec(
        module=FinalNormHybridStack,
        submodules=FinalNormHybridStackSubmodules(
            mamba_layer=ModuleSpec(module=MambaLayer, submodules=mamba),
            attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
            moe_layer=ModuleSpec(module=TransformerLayer, submodules=moe),
            gdn_layer=IdentityOp,
            final_norm=TorchNorm,
        ),
    )
    replace_local_parts(spec)
    return spec


def _named(regularization: Regularization) -> Any:
    spec = stack_spec("transformer_engine" if HAVE_TE else "local", regularization)
    if isinstance(spec.submodules, FinalNormHybridStackSubmodules):
        spec.submodules.regularization = regularization
    return spec


#: No dropout in the layers.
hybrid_none = _named(Regularization("none"))
#: Megatron's own residual dropout, p = ``hidden_dropout``.
hybrid_pre_norm = _named(Regularization("pre_norm"))
#: Pre-Linear dropout between norms and their linears, p = ``hidden_dropout``.
hybrid_pre_linear = _named(Regularization("pre_linear"))
#: Variance-preserving affine dropout, zero fill, batch statistics, p = ``hidden_dropout``.
hybrid_vpad = _named(Regularization("vpad"))
#: Variance-preserving affine dropout, mean fill, batch statistics, p = ``hidden_dropout``.
hybrid_vpad_mean_fill = _named(Regularization("vpad", fill="mean"))
