"""From Megatron's arguments to a built model with this package's layer spec, for training and for tools alike."""

import argparse
import contextlib
import functools
import io
import os
from typing import Any, Literal

import torch

from megatron_lengthgen import backends
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.regularization import Regularization

__all__ = ["build_model", "connect", "forget", "initialize", "model_config", "regularization"]

#: What else ``args.lengthgen`` holds.
_NOT_DROPOUT = ("attention", "core_attention", "mask_version")
#: Symbols of ``hybrid_layer_pattern`` for which :func:`.specs.hybrid.stock_stack` has no local layer: Megatron would
#: build an ``IdentityOp`` in their place.
_NOT_LOCAL = frozenset("GD+")


def regularization(args: argparse.Namespace) -> Regularization:
    """The dropout that the ``lengthgen`` section of ``args`` asks for; none without a section."""
    section = {name: value for name, value in getattr(args, "lengthgen", {}).items() if name not in _NOT_DROPOUT}
    return Regularization.from_mapping({"placement": "none", **section})


def model_config(args: argparse.Namespace) -> Any:
    """Megatron's model config for ``args``, with this package's layer spec and layout-invariant masks.

    Args:
        args: from :func:`megatron_lengthgen.megatron_args.parse`; ``args.lengthgen`` may be empty.

    Returns:
        ``GPTModelConfig``, or ``HybridModelConfig`` where ``args.hybrid_layer_pattern`` is set.

    Raises:
        UserError: where another spec was asked for as well, something that the layers need is missing, or Megatron
            would run the model wrongly.
    """
    backends.prepare()
    if args.spec is not None:
        raise UserError(
            f"spec {' '.join(args.spec)!r} and the lengthgen section both choose the layer spec: write one of them"
        )
    _check_layers(args)
    from megatron_lengthgen.specs import checks

    chosen, core_attention = regularization(args), _core_attention(args)
    checks.check_arguments(args, chosen, keyed=True)
    config = _hybrid_config(args) if args.hybrid_layer_pattern else _gpt_config(args)
    kind: Literal["gpt", "hybrid"] = "hybrid" if args.hybrid_layer_pattern else "gpt"
    checks.check(config, chosen, kind=kind, keyed=True, core_attention=core_attention)
    config.pre_wrap_hooks.append(functools.partial(_bind, args))
    return config


def _check_layers(args: argparse.Namespace) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.ssm import mamba_mixer

    if args.transformer_impl == "transformer_engine" and not (HAVE_TE and torch.cuda.is_available()):
        lack, way = ("finds no CUDA", "") if HAVE_TE else ("cannot be imported", "install it, or ")
        raise UserError(
            f"transformer_impl is transformer_engine, and Transformer Engine {lack} here: {way}set transformer_impl: "
            "local"
        )
    symbols = args.hybrid_layer_pattern or ""
    if "M" in symbols and not mamba_mixer.HAVE_MAMBA_SSM:
        raise UserError(
            f"hybrid_layer_pattern {symbols!r} has Mamba layers (M), which need mamba_ssm where there is CUDA, and it "
            "cannot be imported: install mamba-ssm, or choose a pattern without M"
        )
    if "E" in symbols and not args.num_experts:
        raise UserError(
            f"hybrid_layer_pattern {symbols!r} has mixtures of experts (E): say how many experts with num_experts"
        )
    absent = sorted(_NOT_LOCAL.intersection(symbols))
    if absent and args.transformer_impl == "local":
        raise UserError(
            f"hybrid_layer_pattern {symbols!r} has layers of kind {absent[0]!r}, which transformer_impl: local does "
            "not have: choose M, *, - and E, or transformer_impl: transformer_engine"
        )


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

    if args.use_rope_scaling:
        raise UserError("use_rope_scaling is on, and Megatron's hybrid models have no such scaling: switch it off")
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
            forget()
    destroy_rerun_state_machine()
    connect()
    with contextlib.redirect_stdout(io.StringIO()):
        initialize_megatron(allow_no_cuda=backend == "cpu")


def connect() -> None:
    """torch.distributed among the processes that torchrun started; for a process started alone, with itself."""
    if torch.distributed.is_initialized():
        return
    backend = "gloo" if backends.prepare() == "cpu" else "nccl"
    if "RANK" in os.environ:
        torch.distributed.init_process_group(backend)
    else:
        # A store in memory: a single process needs neither a port nor a file.
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)


def forget() -> None:
    """Bring Megatron's state of this process back to where a fresh one has it, but for torch.distributed.

    One process can then do another run, of another layout and model.
    """
    from megatron.core import mpu
    from megatron.core.rerun_state_machine import destroy_rerun_state_machine

    if mpu.model_parallel_is_initialized():
        # destroy_model_parallel only drops its names for most groups, and each gloo group has three threads that poll.
        for group in filter(None, mpu._global_process_group_list):
            torch.distributed.destroy_process_group(group)
        mpu.destroy_model_parallel()
    destroy_rerun_state_machine()


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
