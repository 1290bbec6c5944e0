"""Megatron's state of a process that may hold several models, one after the other, on different layouts."""

import argparse
from typing import Any

from megatron_lengthgen.models import build

__all__ = ["LOCAL", "initialize", "reason"]

LOCAL: dict[str, Any] = {
    "transformer_impl": "local",
    "no_persist_layer_norm": True,
    "no_gradient_accumulation_fusion": True,
}
"""Megatron arguments for building a model without kernels that not every machine has.

The sharded keys of the local spec are Transformer Engine's too (``gpt_layer_specs.py::get_gpt_layer_local_spec``)."""


def initialize(args: argparse.Namespace) -> None:
    """:func:`megatron_lengthgen.models.build.initialize`, also where a model was built in this process before.

    Megatron keeps the first layout of a process and sets some of its singletons once; models of an earlier layout that
    is given up here cannot run any more.
    """
    from megatron.core import mpu
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    if mpu.model_parallel_is_initialized():
        layout = (mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size())
        if layout != (args.tensor_model_parallel_size, args.pipeline_model_parallel_size):
            mpu.destroy_model_parallel()
    destroy_rerun_state_machine()
    build.initialize(args)


def reason(error: BaseException) -> str:
    """One line for the innermost cause; torch.distributed.checkpoint wraps it in tracebacks, one for each rank."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))[0]
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:300] or type(error).__name__
