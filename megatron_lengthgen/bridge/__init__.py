"""Megatron Bridge: dropout in a recipe, with masks that do not depend on the parallel layout.

Call :func:`apply` last, after all overrides, and hand what it returns to Bridge::

    cfg = process_config_with_overrides(llama32_1b_pretrain_config(), cli_overrides=sys.argv[1:])
    masks = megatron_lengthgen.bridge.apply(cfg, Regularization("vpad", p=0.1))
    pretrain(cfg, forward_step, callbacks=[masks])

After, because Bridge takes no layer spec from a YAML file or a command line: it puts the recipe's back without a word
(``megatron/bridge/training/utils/omegaconf_utils.py::_restore_excluded_fields``).

SmolLM3, which Bridge does not know, is made known by ``import megatron_lengthgen.bridge.smollm3``.
"""

from megatron_lengthgen.bridge.dropout import MaskCallback, RegularizedSpec, allow_targets, apply

__all__ = ["MaskCallback", "RegularizedSpec", "allow_targets", "apply"]
