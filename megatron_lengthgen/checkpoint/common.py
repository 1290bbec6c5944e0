"""What reading and writing checkpoints share: arguments of a portable model, and errors in one line."""

from typing import Any

__all__ = ["LOCAL", "prepare_saving", "reason"]

LOCAL: dict[str, Any] = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
}
"""Megatron arguments for building a model without kernels that not every machine has.

The sharded keys of the local spec are Transformer Engine's too (``gpt_layer_specs.py::get_gpt_layer_local_spec``)."""


def reason(error: BaseException) -> str:
    """One line for the innermost cause; torch.distributed.checkpoint wraps it in tracebacks, one for each rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__


def prepare_saving() -> None:
    """Start the process through which Megatron's checkpoint writer collects its results, by a fork.

    At the first save Megatron would spawn it, and a spawned process imports torch and Megatron once more: seconds of
    every rank. Call it before process groups and CUDA are initialised; a second call does nothing.

    Source: ``megatron/core/dist_checkpointing/strategies/filesystem_async.py::get_write_results_queue``.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    get_write_results_queue(mp_mode="fork")
