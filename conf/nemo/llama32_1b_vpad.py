"""Train Llama 3.2 1B with NeMo 2.7 and VPAD. Copy this file and change what is yours.

NOT RUN with this package, only read against the source of NeMo 2.7.3, the last release with ``nemo.collections.llm``:
that one breaks on Megatron-Core 0.19, and this package needs 0.19. For a NeMo that is built on it, this is what differs
from a recipe of its own: a GPT config takes a function of the config as its layer spec, and the names of
``megatron_lengthgen.specs`` are such functions (``nemo/collections/llm/gpt/model/base.py``, ``configure_model``).
NeMo's successor for language models is Megatron Bridge, with which this package is tested: see ``conf/bridge``.

Not to be had here: masks that do not depend on the parallel layout (Megatron's random streams draw them), and a p apart
from ``hidden_dropout``, which drops embeddings too.
"""

import nemo_run as run
from nemo.collections import llm

from megatron_lengthgen.specs import gpt_vpad


def recipe() -> run.Partial:
    """The recipe with dropout between norms and linears."""
    recipe = llm.llama32_1b.pretrain_recipe(name="llama32_1b_vpad", num_nodes=1, num_gpus_per_node=8)
    recipe.model.config.transformer_layer_spec = gpt_vpad
    recipe.model.config.hidden_dropout = 0.1
    recipe.model.config.attention_dropout = 0.0
    return recipe


if __name__ == "__main__":
    run.run(recipe(), executor=run.LocalExecutor(ntasks_per_node=8, launcher="torchrun"))
