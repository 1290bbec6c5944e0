"""Start Megatron's training loop for a run, or show what it would do."""

import argparse
import contextlib
import dataclasses
import functools
import io
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_lengthgen import backends
from megatron_lengthgen.checkpoint.common import reason
from megatron_lengthgen.dropout.masks import MASK_VERSION
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models import build
from megatron_lengthgen.training import blend, decay, memory, schedule
from megatron_lengthgen.training import config as run_config
from megatron_lengthgen.training.faults import lost_contact
from megatron_lengthgen.training.plan import model_parallel_size, pretended_world_size
from megatron_lengthgen.training.preflight import check_clocks, check_shared
from megatron_lengthgen.training.pretrained import check_pretrained
from megatron_lengthgen.training.probes import Probes, make
from megatron_lengthgen.training.progress import TrainingProgress
from megatron_lengthgen.training.ranks import Ranks, connect
from megatron_lengthgen.training.recovery import recover
from megatron_lengthgen.training.resume import check_resume
from megatron_lengthgen.training.run_lock import RunLock
from megatron_lengthgen.training.writers import end_writers, start_writers

__all__ = ["dry_run", "train"]

_MEGATRON_TIMEOUT_MINUTES = 10
_ONE_PROCESS = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "decoder_first_pipeline_num_layers": None,
    "decoder_last_pipeline_num_layers": None,
    "pipeline_model_parallel_layout": None,
    "num_layers_per_virtual_pipeline_stage": None,
    "num_virtual_stages_per_pipeline_rank": None,
    "expert_tensor_parallel_size": None,
    "tp_comm_overlap": False,
    "use_distributed_optimizer": False,
    "overlap_grad_reduce": False,
    "overlap_param_gather": False,
    # Nothing is read or written.
    "tensorboard_dir": None,
    "wandb_project": None,
    "save": None,
    "load": None,
    "pretrained_checkpoint": None,
    "use_cpu_initialization": True,
    "perform_initialization": False,
}


def train(run: run_config.RunConfig, *, datasets: Callable[..., Any] | None = None) -> None:
    """Train with ``megatron.training.pretrain``; every process that torchrun started calls this.

    Args:
        run: What to do.
        datasets: Megatron's dataset provider; by default the blended datasets that ``run`` names.

    Raises:
        UserError: for a configuration that cannot run; nothing was built then.
    """
    backends.prepare()
    from megatron.training import global_vars

    if run.megatron.get("save"):
        start_writers(bool(run.megatron.get("async_save")))
    ranks = connect(60.0 * float(run.megatron.get("distributed_timeout_minutes") or _MEGATRON_TIMEOUT_MINUTES))
    args = ranks.agree(lambda: run_config.parse(run))
    if "RANK" not in os.environ:  # started alone, which Megatron would take a rendezvous for too
        build.connect()
    with contextlib.ExitStack() as stack:
        stack.callback(end_writers)
        if args.exit_signal_handler:
            stack.callback(global_vars.get_signal_handler().release)
        if args.save:
            _open_folder(args, ranks, stack)
        _train(args, run.lengthgen, ranks, datasets)


def _open_folder(args: argparse.Namespace, ranks: Ranks, stack: contextlib.ExitStack) -> None:
    """Make the run's folder this job's own until ``stack`` closes, and its tracker name a whole checkpoint."""

    def own() -> None:
        if ranks.rank:
            return
        try:
            stack.enter_context(RunLock(Path(args.save)))
        except OSError as error:
            raise UserError(f"save {args.save} cannot be written ({error.strerror}): choose another folder") from error
        if args.load and Path(args.load).resolve() == Path(args.save).resolve() and not args.ckpt_step:
            for remark in recover(args.load, verify=args.verify_integrity):
                _warn(remark)

    if ranks.world_size > 1:
        warning = check_clocks(ranks)
        if warning:
            _warn(warning)
        check_shared(ranks, Path(args.save), "save")
    ranks.agree(own)


def _warn(text: str) -> None:
    print(f"WARNING: {text}", file=sys.stderr, flush=True)


def _train(
    args: argparse.Namespace, section: dict[str, Any], ranks: Ranks, datasets: Callable[..., Any] | None
) -> None:
    from megatron.core.enums import ModelType
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.training import pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_lengthgen.training.data import train_valid_test_datasets
    from megatron_lengthgen.training.forward import forward_step

    finished = ranks.agree(lambda: check_resume(args))
    if args.train_iters and finished >= args.train_iters:
        if args.rank == 0:
            print(
                f"{args.load} has all {args.train_iters} steps already: to train on, raise train_iters and set "
                "override_opt_param_scheduler: true",
                flush=True,
            )
        return
    model = ranks.agree(lambda: build.model_config(args))
    remark = ranks.agree(lambda: None if finished else check_pretrained(args))
    probes = Probes(ranks.agree(lambda: make(section, args)), args)
    if args.rank == 0:
        remarks = [remark, *_stage(args), f"checkpoints and logs: {args.save}" if args.save else None]
        print("\n".join(filter(None, remarks)), flush=True)
    model.pre_wrap_hooks.append(functools.partial(_report_decay, args, ranks))
    progress = TrainingProgress(
        steps=args.train_iters or args.train_samples // args.global_batch_size,
        microbatches=get_num_microbatches(),
        tokens_per_step=args.global_batch_size * args.seq_length,
        interval=args.log_interval,
        path=Path(args.save) / "progress.jsonl" if args.save else None,
        finished=lambda: args.iteration,
        active=_is_reporting_rank,
    )
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, model),
            probes.preparing(datasets or train_valid_test_datasets),
            ModelType.encoder_or_decoder,
            functools.partial(forward_step, progress=progress),
            non_loss_data_func=probes,
        )
    except (CheckpointException, OSError, RuntimeError) as error:  # the first is a BaseException
        lost = lost_contact(error, args.rank, args.save)
        if lost is not None:
            raise lost from error
        if isinstance(error, RuntimeError):
            raise
        raise UserError(
            f"a file of the run could not be read or written ({reason(error)}): free some space under {args.save} or "
            "choose another save; the last whole checkpoint there is intact, and the same command goes on from it"
        ) from error
    finally:
        progress.stop()


def _stage(args: argparse.Namespace) -> list[str]:
    """What a stage of training is: its tokens, where they come from, the course of its learning rate."""
    return [*blend.describe(args), schedule.describe(args)]


def _report_decay(args: argparse.Namespace, ranks: Ranks, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
    counts = ranks.gather(decay.count(args, models))
    if args.rank == 0:
        print(decay.describe(args, counts), flush=True)
    return models


def _is_reporting_rank() -> bool:
    """The last pipeline stage has the loss; one of its ranks reports, the one whose output torchrun shows last."""
    from megatron.core import mpu

    return (
        mpu.is_pipeline_last_stage(ignore_virtual=True)
        and mpu.get_tensor_model_parallel_rank() == 0
        and mpu.get_data_parallel_rank(with_context_parallel=True) == 0
    )


def dry_run(run: run_config.RunConfig) -> None:
    """Print the resolved configuration, the parameter count and the layer table. Builds no weights, starts no ranks.

    Raises:
        UserError: as :func:`train` would.
    """
    backends.prepare()
    from megatron_lengthgen.specs.layer_table import format_layer_table, layer_table

    ranks = model_parallel_size(run.megatron)
    with pretended_world_size(max(ranks, int(os.environ.get("WORLD_SIZE", "1")))):
        args = run_config.parse(run, logs=False)
    remark = None if check_resume(args) else check_pretrained(args)
    make(run.lengthgen, args)
    build.model_config(args)
    _print_configuration(args, run)
    if remark:
        print(remark)
    with pretended_world_size(1):
        alone = run_config.parse(dataclasses.replace(run, megatron=_on_one_process(run.megatron, args)))
        build.initialize(alone)
        config = build.model_config(alone)
        model = _without_weights(config)
        counts = decay.count(args, [model])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"\nparameters: {parameters:,}")
    print(decay.describe(args, [counts]))
    print(format_layer_table(layer_table(config, model)))


def _without_weights(config: Any) -> torch.nn.Module:
    """The model on the meta device; with Transformer Engine the vocabulary's two matrices are allocated."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    builder = config.get_builder_cls()(config)
    with torch.device("meta"), contextlib.redirect_stdout(io.StringIO()):
        return builder.build_model(ProcessGroupCollection.use_mpu_process_groups())


def _on_one_process(values: dict[str, Any], args: argparse.Namespace) -> dict[str, Any]:
    """The arguments ``values``, parsed before as ``args``, for the whole model in one process."""
    alone = {**values, **_ONE_PROCESS}
    if args.hybrid_layer_pattern:
        alone["hybrid_layer_pattern"] = args.hybrid_layer_pattern.replace("|", "")
    if args.transformer_impl == "transformer_engine":
        # Its layers would copy from a weight on the CPU otherwise, which has no values.
        alone |= {"use_cpu_initialization": False, "init_model_with_meta_device": True}
    return alone


def _print_configuration(args: argparse.Namespace, run: run_config.RunConfig) -> None:
    from omegaconf import OmegaConf

    resolved = {name: value for name, value in run.megatron.items() if value is not None}
    print("Megatron arguments (as written, with this package's defaults):")
    print(_indent(OmegaConf.to_yaml(OmegaConf.create(_plain(resolved)))))
    print("lengthgen:")
    print(_indent(OmegaConf.to_yaml(OmegaConf.create(_plain(run.lengthgen)))))
    steps = args.train_iters or 0
    layout = (
        f"TP {args.tensor_model_parallel_size}, PP {args.pipeline_model_parallel_size}, "
        f"CP {args.context_parallel_size}, DP {args.data_parallel_size}"
    )
    print(f"layout: {layout} on {args.world_size} process(es)")
    print(f"training: {steps:,} steps, {steps * args.global_batch_size * args.seq_length:,} tokens")
    needed = memory.estimate(args)
    if needed:
        states, activations = (f"{value / 1e9:.1f} GB" for value in needed)
        print(
            f"memory per GPU, by Megatron's estimate: {states} of weights and optimizer, {activations} of activations"
        )
    print("\n".join(_stage(args)))
    print(f"masks: {_masks(args)}")
    print(f"kernel: {_kernel(args)}")


def _masks(args: argparse.Namespace) -> str:
    """Where dropout's masks come from, and what may change without changing them."""
    chosen = build.regularization(args)
    if not (chosen.is_active and chosen.p):
        nothing = "" if chosen.placement == "pre_norm" and chosen.p else ", which drops nothing"
        return f"Megatron's random streams (placement {chosen.placement}{nothing}); they depend on the layout"
    attention = args.attention_dropout
    own = f"; attention_dropout {attention:g} draws from Megatron's random streams" if attention else ""
    return (
        f"layout-invariant, Philox4x32-10, version {MASK_VERSION}, seed {args.seed}; the same under any TP/PP/DP/CP "
        f"layout, recomputation and resume{own}"
    )


def _kernel(args: argparse.Namespace) -> str:
    """What computes the dropout behind norms."""
    from megatron_lengthgen.specs import fused_norm

    chosen = build.regularization(args)
    return fused_norm.describe() if chosen.is_active and chosen.p else "Megatron's own"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _indent(text: str) -> str:
    return "".join(f"  {line}\n" for line in text.splitlines())
