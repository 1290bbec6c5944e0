"""Layer specs by name, for Megatron's ``--spec megatron_lengthgen.specs NAME``; ``python -m`` lists them.

GPT names are functions of the model's config, hybrid names are ``ModuleSpec`` objects: that is what Megatron takes.
"""

import logging
import warnings

# Megatron and torch tell at length which optional kernels are absent as they are imported. Megatron's own scripts have
# imported them before, and said so there.
logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
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
