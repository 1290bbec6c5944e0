"""Layer specs by name, for Megatron's ``--spec megatron_lengthgen.specs NAME``; ``python -m`` lists them.

GPT names are functions of the model's config, hybrid names are ``ModuleSpec`` objects: that is what Megatron takes.
"""

from megatron_lengthgen.specs.gpt import gpt_none, gpt_pre_linear, gpt_pre_norm, gpt_vpad, gpt_vpad_mean_fill
from megatron_lengthgen.specs.hybrid import (
    hybrid_none,
    hybrid_pre_linear,
    hybrid_pre_norm,
    hybrid_vpad,
    hybrid_vpad_mean_fill,
)
from megatron_lengthgen.specs.substitution import substitute

__all__ = [
    "gpt_none",
    "gpt_pre_linear",
    "gpt_pre_norm",
    "gpt_vpad",
    "gpt_vpad_mean_fill",
    "hybrid_none",
    "hybrid_pre_linear",
    "hybrid_pre_norm",
    "hybrid_vpad",
    "hybrid_vpad_mean_fill",
    "substitute",
]
