"""Masks that do not depend on the parallel layout: tells a built model's sites who they are, and when it is.

A norm's builder learns neither its layer's number nor the ranks' places, so both are filled in once the model is built
(Megatron's ``pre_wrap_hooks``, Megatron Bridge's ``register_pre_wrap_hook``). A pre-hook on the model's forward then
writes the key of every microbatch (:mod:`.step_key`). The mask that a token meets at a layer, site and channel is a
function of the seed, the step, the sample's number in the global batch and these alone: it is the same under any
tensor, sequence, context, pipeline and data parallelism, micro batch size and recomputation, and after a resume.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import SITES
from megatron_lengthgen.specs import step_key
from megatron_lengthgen.specs.site import Extent, SiteDropout, sites

__all__ = ["bind"]

_LAYERS = 1 << 16
_SITES = 1 << 5
_SITE_NUMBERS = {site: number for number, site in enumerate(SITES)}
_SECOND_NORM = _SITES // 2  # enorm and hnorm of multi-token prediction are two sites of one name


def bind(
    models: Iterable[torch.nn.Module],
    *,
    seed: int,
    step: Callable[[], int],
    microbatches: Callable[[], int],
) -> None:
    """Give every dropout site of ``models`` its number and extent, and every microbatch its key.

    Call it once, after the model is built and before it is wrapped; the process groups are Megatron's parallel state.

    Args:
        models: This rank's model chunks (``GPTModel`` or ``HybridModel``, wrapped or not).
        seed: Of the run; the same on all ranks.
        step: Number of finished training steps, read at every microbatch (``get_args().curr_iteration``).
        microbatches: Number of microbatches in a step on this rank (``get_num_microbatches``).

    Raises:
        UserError: two sites with one identity, or a site outside of any numbered layer.
    """
    from megatron.core import parallel_state

    taken: dict[int, str] = {}
    for model in models:
        found = False
        for name, _, dropout in sites(model):
            dropout.number = _number(model, name, dropout)
            dropout.extent = _extent(dropout, parallel_state)
            if dropout.number in taken:
                raise UserError(f"dropout sites {taken[dropout.number]} and {name} cannot be told apart")
            taken[dropout.number] = name
            found = True
        if found:
            _Keys(seed, step, microbatches, parallel_state).attach(model)


def _number(model: torch.nn.Module, name: str, dropout: SiteDropout) -> int:
    """Depth of multi-token prediction (0 in the model proper), layer (from 1; 0 outside of layers) and site in one."""
    depth, layer = 0, None
    parts = name.split(".")
    for length in range(1, len(parts) + 1):
        module: Any = model.get_submodule(".".join(parts[:length]))
        if isinstance(module, MultiTokenPredictionLayer):
            depth, layer = module.layer_number, 0
        elif isinstance(number := getattr(module, "layer_number", None), int):
            layer = number
    if layer is None and dropout.site != "output":
        raise UserError(f"dropout site {name} is in no layer with a number")
    site = _SITE_NUMBERS[dropout.site] + (_SECOND_NORM if parts[-1] == "hnorm" else 0)
    return (depth * _LAYERS + (layer or 0)) * _SITES + site


def _extent(dropout: SiteDropout, parallel_state: Any) -> Extent:
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    features = dropout.place == "features"
    split = dropout.sequence_parallel and not features
    return Extent(
        token_rank=tensor_rank if split else 0,
        token_parts=parallel_state.get_tensor_model_parallel_world_size() if split else 1,
        context_rank=parallel_state.get_context_parallel_rank(),
        context_parts=parallel_state.get_context_parallel_world_size(),
        channel_rank=tensor_rank if features else 0,
    )


class _Keys:
    """Writes the key before each forward of a training step, and removes it afterwards."""

    def __init__(self, seed: int, step: Callable[[], int], microbatches: Callable[[], int], state: Any) -> None:
        self.seed, self.step, self.microbatches = seed, step, microbatches
        self.data_rank: int = state.get_data_parallel_rank()
        self.data_ranks: int = state.get_data_parallel_world_size()
        self._step, self._seen = -1, 0

    def attach(self, model: torch.nn.Module) -> None:
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after, always_call=True)

    def _before(self, model: torch.nn.Module, args: Any) -> None:
        if not model.training:
            return
        step = self.step()
        if step != self._step:
            self._step, self._seen = step, 0
        # Modulo: Megatron may run a step again to look for faulty hardware.
        index = self._seen % self.microbatches()
        self._seen += 1
        # As Megatron's sampler deals them out: microbatch by microbatch, each from rank to rank.
        microbatch = index * self.data_ranks + self.data_rank
        step_key.write(step_key.StepKey(step_key.derive(self.seed, step), step, microbatch))

    def _after(self, model: torch.nn.Module, args: Any, output: Any) -> None:
        if model.training:
            step_key.clear()
