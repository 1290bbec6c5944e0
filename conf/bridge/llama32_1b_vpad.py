"""Train Llama 3.2 1B with Megatron Bridge and VPAD. Copy this file and change what is yours.

    torchrun --nproc-per-node=8 llama32_1b_vpad.py train.train_iters=2000 model.tensor_model_parallel_size=2

Arguments are Bridge's overrides. Any other recipe works the same way; so does ``finetune`` in place of ``pretrain``.
"""

import sys

from megatron.bridge.recipes.llama import llama32_1b_pretrain_config
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain
from megatron.bridge.training.utils.omegaconf_utils import process_config_with_overrides

from megatron_lengthgen.bridge import apply
from megatron_lengthgen.regularization import Regularization


def main(overrides: list[str]) -> None:
    """Run the recipe with ``overrides``."""
    cfg = process_config_with_overrides(llama32_1b_pretrain_config(), cli_overrides=overrides)
    # Last, and in Python: Bridge puts a recipe's layer spec back when an override names another one.
    masks = apply(cfg, Regularization("vpad", p=0.1))
    pretrain(cfg, forward_step, callbacks=[masks])


if __name__ == "__main__":
    main(sys.argv[1:])
