"""The key that this microbatch's masks are computed from, kept where recomputation finds it.

A site runs again when Megatron recomputes activations, at a time when other microbatches have passed, and cannot know
for which one it is called. Megatron's checkpointing notes all named states of its RNG tracker before a forward and
restores them before the same computation is repeated: a key written there as one more state is always the right one.
It is written before the model's forward and removed after it, so that no checkpoint on disk holds one.

Source: ``megatron/core/tensor_parallel/random.py::CheckpointFunction``.
"""

import hashlib
from typing import Any, NamedTuple

import torch

__all__ = ["StepKey", "clear", "derive", "read", "write"]

_STATE = "lengthgen-step-key"


class StepKey(NamedTuple):
    """What tells a microbatch from all others.

    Attributes:
        key: 64-bit key of the training step, see :func:`derive`.
        step: Number of training steps finished before this one.
        microbatch: Number of the microbatch in the step's global batch, over all data-parallel ranks.
    """

    key: int
    step: int
    microbatch: int


def derive(seed: int, step: int) -> int:
    """The 64-bit key of a training step: a hash, so that neighbouring seeds and steps have unrelated keys."""
    digest = hashlib.blake2b(f"megatron_lengthgen masks {seed} {step}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def write(step_key: StepKey) -> None:
    """Make ``step_key`` the one that sites read."""
    tracker = _tracker()
    # A random state is a byte tensor; this one holds three integers, the first as its two's complement.
    values = torch.tensor([step_key.key - (step_key.key >> 63 << 64), step_key.step, step_key.microbatch])
    tracker.set_states({**tracker.get_states(), _STATE: values.view(torch.uint8)})


def read() -> StepKey | None:
    """The key of the microbatch that is being computed, or computed again; None outside of a bound model."""
    state = _tracker().get_states().get(_STATE)
    if state is None:
        return None
    key, step, microbatch = state.view(torch.int64).tolist()
    return StepKey(key % (1 << 64), step, microbatch)


def clear() -> None:
    """Remove the key."""
    tracker = _tracker()
    tracker.set_states({name: state for name, state in tracker.get_states().items() if name != _STATE})


def _tracker() -> Any:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return get_cuda_rng_tracker()
