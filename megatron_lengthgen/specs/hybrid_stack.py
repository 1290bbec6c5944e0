"""Megatron's ``HybridStack`` with a final norm from its spec, and in the right random stream."""

import dataclasses
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules

from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.specs.checks import check
from megatron_lengthgen.specs.streams import stack_stream

__all__ = ["FinalNormHybridStack", "FinalNormHybridStackSubmodules"]


@dataclasses.dataclass
class FinalNormHybridStackSubmodules(HybridStackSubmodules):
    """Adds what ``HybridStack`` does not take from its spec.

    Attributes:
        final_norm: Builder of the norm before the output layer (``HybridStack`` hard-codes Transformer Engine's).
        regularization: What to check the config against before a layer is built; None where that has been done.
    """

    final_norm: Any = TENorm
    regularization: Regularization | None = None


class FinalNormHybridStack(HybridStack):
    """``HybridStack`` whose final norm is a part of its spec, and whose layers draw from the tracked stream under
    sequence parallelism, as those of ``TransformerBlock`` do: without, both tensor-parallel ranks draw the same mask
    for different tokens.

    Source: ``megatron/core/models/hybrid/hybrid_block.py``.
    """

    def __init__(
        self, config: Any, submodules: FinalNormHybridStackSubmodules, *, post_layer_norm: bool = True, **kwargs: Any
    ) -> None:
        if submodules.regularization is not None:
            check(config, submodules.regularization, kind="hybrid", core_attention="sdpa")
        super().__init__(config, submodules, post_layer_norm=False, **kwargs)
        self.post_layer_norm = post_layer_norm
        if self.post_process and post_layer_norm:
            self.final_norm = submodules.final_norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """As ``HybridStack.forward``, hidden states ``[s, b, h]`` in and out."""
        with stack_stream(sequence_parallel=self.config.sequence_parallel):
            return super().forward(*args, **kwargs)
