"""Which of Megatron's random streams a dropout site draws from.

Megatron keeps a default stream, equal on all tensor-parallel ranks, and a tracked one that differs between them. A site
whose input is the same on all ranks must draw from the first, one whose input is split over them from the second. Where
Megatron has already switched to the tracked stream a site must not switch again: with full recompute a nested fork
replays another mask, because ``CudaRNGStatesTracker.set_states`` does not restore which stream is current.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

__all__ = ["Place", "stack_stream", "stream"]

#: Where in the model a site is: ``block``: behind a norm inside ``TransformerBlock``, ``HybridStack`` or a layer of
#: multi-token prediction, which hold all features of a token; ``features``: there too, before a row-parallel linear,
#: whose input features are split over tensor-parallel ranks; ``after_block``: behind a final norm outside of these.
Place = Literal["block", "features", "after_block"]

# (place, sequence parallel) -> does the site itself switch to the tracked stream?
_FORKS: dict[tuple[Place, bool], bool] = {
    ("block", False): False,
    ("block", True): False,  # the block's forward has switched for all of its layers
    ("features", False): True,
    ("features", True): False,
    ("after_block", False): False,
    ("after_block", True): True,  # the final norm runs after the block has switched back
}


def stream(place: Place, *, sequence_parallel: bool) -> AbstractContextManager[None]:
    """Context in which a plain draw from the default generator is the right one for a site.

    Args:
        place: Where the site is.
        sequence_parallel: ``config.sequence_parallel``.
    """
    return _tracked() if _FORKS[place, sequence_parallel] else nullcontext()


def stack_stream(*, sequence_parallel: bool) -> AbstractContextManager[None]:
    """Context for the forward of ``HybridStack``, which unlike ``TransformerBlock`` never switches.

    Source: ``megatron/core/transformer/transformer_block.py::TransformerBlock.forward``.
    """
    return _tracked() if sequence_parallel else nullcontext()


def _tracked() -> AbstractContextManager[None]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker().fork()
