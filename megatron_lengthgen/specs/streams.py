"""Which of Megatron's random streams a dropout site draws from.

Megatron keeps a default stream, equal on all tensor-parallel ranks, and a tracked one that differs between them. A site
whose input is the same on all ranks must draw from the first, one whose input is split over them from the second. Where
Megatron has already switched to the tracked stream a site must not switch again: with full recompute a nested fork
replays another mask, because ``CudaRNGStatesTracker.set_states`` does not restore which stream is current.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

__all__ = ["Place", "stream"]

Place = Literal["block", "after_block"]

# (place, sequence parallel) -> does the site itself switch to the tracked stream?
_FORKS: dict[tuple[Place, bool], bool] = {
    ("block", False): False,
    ("block", True): False,  # TransformerBlock.forward has switched for all of its layers
    ("after_block", False): False,
    ("after_block", True): True,  # final_layernorm runs after TransformerBlock has switched back
}


def stream(place: Place, *, sequence_parallel: bool) -> AbstractContextManager[None]:
    """Context in which a plain draw from the default generator is the right one for a site.

    Args:
        place: ``block``: behind a norm of a layer inside ``TransformerBlock``; ``after_block``: behind its
            ``final_layernorm``.
        sequence_parallel: ``config.sequence_parallel``.
    """
    if not _FORKS[place, sequence_parallel]:
        return nullcontext()
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker().fork()
