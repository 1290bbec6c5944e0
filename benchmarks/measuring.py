"""What the benchmarks measure alike."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["peak_bytes", "synchronize"]


def synchronize(device: str) -> None:
    """Wait for what was started on ``device``, ``cuda`` or ``cpu``."""
    if device == "cuda":
        torch.cuda.synchronize()


def peak_bytes(run: Callable[[], Any], device: str) -> int:
    """The most bytes above the start that PyTorch's allocator had handed out while ``run`` ran."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        run()
    events = [event for event in profile.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
    return max(itertools.accumulate(sizes, initial=0))
