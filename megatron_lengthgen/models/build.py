"""From Megatron's arguments to a built model with this package's layer spec, for training and for tools alike."""

import argparse
import contextlib
import functools
import io
import os
from typing import Any

import torch

from megatron_lengthgen import backends
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization

__all__ = ["build_model", "initialize", "model_config", "regularization"]


def regularization(args: argparse.Namespace) -> Regularization:
    """The ``lengthgen`` section of ``args``, without the parts that became Megatron arguments."""
    section = dict(getattr(args, "lengthgen", {}))
    for name in ("attention", "core_attention"):
        section.pop(name, None)
    return Regularization.from_mapping({"placement": "none", **section})


def model_config(args: argparse.Namespace) -> Any:
    """Megatron's model config for ``args``, with this package's layer spec and layout-invariant masks.

    Args:
        args: from :func:`megatron_lengthgen.megatron_args.parse`; ``args.lengthgen`` may be empty.

    Returns:
        ``GPTModelConfig``, or ``HybridModelConfig`` where ``args.hybrid_layer_pattern`` is set.

    Raises:
        UserError: where another spec was asked for as well.
    """
    backends.prepare()
    if args.spec is not None:
        raise UserError(
            f"spec {' '.join(args.spec)!r} and the lengthgen section both choose the layer spec: write one of them"
        )
    config = _hybrid_config(args) if args.hybrid_layer_pattern else _gpt_config(args)
    config.pre_wrap_hooks.append(functools.partial(_bind, args))
    return config


def _gpt_config(args: argparse.Namespace) -> Any:
    from megatron.training.argument_utils import gpt_config_from_args

    from megatron_lengthgen.specs import gpt

    config = gpt_config_from_args(args)
    # gpt_config_from_args leaves it at its default of 8, whatever the arguments say.
    config.rope_scaling_factor = args.rope_scaling_factor
    config.transformer_layer_spec = functools.partial(
        gpt.block_spec, regularization=regularization(args), vp_stage=None, core_attention=_core_attention(args)
    )
    return config


def _hybrid_config(args: argparse.Namespace) -> Any:
    from megatron.training.argument_utils import hybrid_config_from_args

    from megatron_lengthgen.specs import hybrid

    config = hybrid_config_from_args(args)
    config.hybrid_stack_spec = hybrid.stack_spec(
        args.transformer_impl, regularization(args), core_attention=_core_attention(args)
    )
    return config


def _core_attention(args: argparse.Namespace) -> Any:
    return getattr(args, "lengthgen", {}).get("core_attention", "sdpa")


def _bind(args: argparse.Namespace, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    from megatron.core.num_microbatches_calculator import get_num_microbatches

    from megatron_lengthgen.specs.binding import bind

    bind(models, seed=args.seed, step=lambda: args.curr_iteration, microbatches=get_num_microbatches)
    return models


def initialize(args: argparse.Namespace) -> None:
    """Megatron's process groups and random states for a command-line tool, under torchrun or alone.

    A process may call it again, also for another layout; models of the earlier layout cannot run any more then.

    Args:
        args: Megatron's global arguments. ``distributed_backend`` chooses gloo or NCCL.
    """
    backend = backends.prepare()
    from megatron.core import mpu
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine
    from megatron.training.initialize import initialize_megatron

    if mpu.model_parallel_is_initialized():
        layout = (mpu.get_tensor_model_parallel_world_size(), mpu.get_pipeline_model_parallel_world_size())
        if layout != (args.tensor_model_parallel_size, args.pipeline_model_parallel_size):
            mpu.destroy_model_parallel()
    destroy_rerun_state_machine()
    if "RANK" not in os.environ and not torch.distributed.is_initialized():
        # A store in memory: a single process needs neither a port nor a file.
        torch.distributed.init_process_group(
            args.distributed_backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    with contextlib.redirect_stdout(io.StringIO()):
        initialize_megatron(allow_no_cuda=backend == "cpu")


def build_model(args: argparse.Namespace) -> list[torch.nn.Module]:
    """This rank's model chunks, on the device and in the dtype that ``args`` names, without a DDP wrapper.

    Call :func:`initialize` first. The modules are in training mode; bf16 and fp16 models come in Megatron's
    ``Float16Module``.
    """
    backends.prepare()
    from megatron.core.process_groups_config import ProcessGroupCollection

    config = model_config(args)
    builder = config.get_builder_cls()(config)
    with contextlib.redirect_stdout(io.StringIO()):
        return builder.build_distributed_models(
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
            wrap_with_ddp=False,
            data_parallel_random_init=False,
        )
