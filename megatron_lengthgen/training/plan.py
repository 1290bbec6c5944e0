"""What a run would do on a number of GPUs, and why it could not, told before a job is submitted."""

import argparse
import contextlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_lengthgen import backends
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import config as run_config
from megatron_lengthgen.training import memory, probes
from megatron_lengthgen.training.pretrained import check_pretrained
from megatron_lengthgen.training.resume import check_resume

__all__ = ["Cluster", "layout_faults", "model_parallel_size", "plan", "pretended_world_size"]

#: Megatron's uneven splits of layers over stages, which it checks itself.
_UNEVEN = (
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
    "hybrid_layer_pattern",
)
#: What an H100 typically does of its 989 in bf16 training.
_TYPICAL = 400e12
#: Tensors whose rows or heads tensor-parallel ranks share out.
_SPLIT = ("num_attention_heads", "num_query_groups", "ffn_hidden_size", "padded_vocab_size")


@dataclass(frozen=True)
class Cluster:
    """Where a run would run.

    Attributes:
        nodes: machines.
        gpus_per_node: GPUs in each.
        gpu_memory: bytes of one GPU; None where that is not to be checked.
    """

    nodes: int
    gpus_per_node: int
    gpu_memory: float | None = None

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus_per_node"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be 1 or more, got {getattr(self, name)}")

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node


def model_parallel_size(values: Mapping[str, Any]) -> int:
    """Processes of the smallest layout: experts have a tensor parallelism of their own, over the same processes."""
    tensor, pipeline, context, experts = (
        _size(values, name)
        for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "expert_model_parallel")
    )
    expert_tensor = int(values.get("expert_tensor_parallel_size") or tensor)
    return pipeline * math.lcm(tensor * context, expert_tensor * experts)


def layout_faults(values: Mapping[str, Any], cluster: Cluster) -> list[str]:
    """Why a configuration cannot be laid out over ``cluster``; empty where it can.

    Args:
        values: Megatron's argument names to values, as in :class:`.config.RunConfig`.

    Returns:
        Sentences without a full stop, each with the nearest values that would do.
    """
    tensor, pipeline, context = (
        _size(values, name) for name in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel")
    )
    faults = []
    split = {name: values[name] for name in _SPLIT if isinstance(values.get(name), int)}
    if not values.get("group_query_attention"):
        split.pop("num_query_groups", None)
    odd = [f"{name} {count:,}" for name, count in split.items() if count % tensor]
    if odd:
        common = math.gcd(*split.values())
        faults.append(
            f"tensor_model_parallel_size {tensor} does not divide {' and '.join(odd)}: nearest "
            f"{_nearest(tensor, _divisors(common))}"
        )
    layers = values.get("num_layers")
    if isinstance(layers, int) and layers % pipeline and not any(values.get(name) for name in _UNEVEN):
        faults.append(
            f"pipeline_model_parallel_size {pipeline} does not divide num_layers {layers}: nearest "
            f"{_nearest(pipeline, _divisors(layers))}"
        )
    length = values.get("seq_length")
    unit = math.lcm(tensor if values.get("sequence_parallel") else 1, 2 * context if context > 1 else 1)
    if isinstance(length, int) and length % unit:
        faults.append(
            f"seq_length {length:,} is no multiple of {unit}, which sequence_parallel and context_parallel_size "
            f"{context} need: nearest {_nearest(length, _multiples(unit, length))}"
        )
    longest = values.get("max_position_embeddings")
    if isinstance(length, int) and isinstance(longest, int) and longest < length:
        faults.append(f"seq_length {length:,} is more than max_position_embeddings {longest:,}: nearest {longest:,}")
    experts, expert_parallel = values.get("num_experts"), _size(values, "expert_model_parallel")
    if isinstance(experts, int) and experts % expert_parallel:
        faults.append(
            f"expert_model_parallel_size {expert_parallel} does not divide num_experts {experts}: nearest "
            f"{_nearest(expert_parallel, _divisors(experts))}"
        )
    faults += _gpu_faults(values, cluster, tensor, pipeline, context)
    return faults


def _gpu_faults(values: Mapping[str, Any], cluster: Cluster, tensor: int, pipeline: int, context: int) -> list[str]:
    faults = []
    model = model_parallel_size(values)
    if cluster.gpus % model:
        nodes = math.lcm(model, cluster.gpus_per_node) // cluster.gpus_per_node
        faults.append(
            f"{cluster.gpus} GPUs are no multiple of the {model} that one copy of the model takes (TP {tensor} x PP "
            f"{pipeline} x CP {context}): nearest {_nearest(cluster.gpus, _multiples(model, cluster.gpus))} GPUs, or "
            f"{_nearest(cluster.nodes, _multiples(nodes, cluster.nodes))} nodes of {cluster.gpus_per_node}"
        )
        return faults
    micro, batch = int(values.get("micro_batch_size") or 1), values.get("global_batch_size")
    step = micro * (cluster.gpus // (tensor * pipeline * context))
    if isinstance(batch, int) and batch % step and not values.get("rampup_batch_size"):
        faults.append(
            f"global_batch_size {batch:,} is no multiple of {step:,}, which is micro_batch_size {micro} times "
            f"{step // micro} data-parallel ranks: nearest {_nearest(batch, _multiples(step, batch))}"
        )
    return faults


def _size(values: Mapping[str, Any], name: str) -> int:
    return int(values.get(f"{name}_size") or 1)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _multiples(unit: int, near: int) -> list[int]:
    below = near // unit * unit
    return [n for n in (below, below + unit) if n > 0]


def _nearest(value: int, valid: Iterable[int]) -> str:
    """The valid values next to ``value``, on either side."""
    known = list(valid)
    below, above = [n for n in known if n < value], [n for n in known if n > value]
    return " or ".join(f"{n:,}" for n in (*([max(below)] if below else []), *([min(above)] if above else [])))


@contextlib.contextmanager
def pretended_world_size(size: int) -> Iterator[None]:
    """Megatron validates a layout against the number of processes, which torchrun has not started here."""
    saved = {name: os.environ.get(name) for name in ("WORLD_SIZE", "RANK")}
    os.environ["WORLD_SIZE"] = str(size)
    os.environ.pop("RANK", None)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def plan(run: run_config.RunConfig, cluster: Cluster, show: Callable[[str], None] = print) -> None:
    """Show what ``run`` would take on ``cluster``: layout, memory, tokens, floating-point operations, checkpoints.

    Starts no ranks, builds no model, writes nothing.

    Raises:
        UserError: for a run that could not run there, naming every fault of its layout at once.
    """
    faults = layout_faults(run.megatron, cluster)
    if faults:
        raise UserError(f"the run does not fit {cluster.gpus} GPUs: {'; '.join(faults)}")
    backends.prepare()
    with pretended_world_size(cluster.gpus):
        args = run_config.parse(run, logs=False)
    finished = check_resume(args)
    if not finished:
        check_pretrained(args)
    probes.make(run.lengthgen, args)
    _show_layout(args, cluster, show)
    needed = memory.estimate(args)
    if needed is None:
        show("memory per GPU: Megatron has no estimate for hybrid models")
    else:
        total = needed.states + needed.activations
        show(
            f"memory per GPU, by Megatron's estimate: {total / 1e9:.1f} GB ({needed.states / 1e9:.1f} of weights, "
            f"gradients and optimizer, {needed.activations / 1e9:.1f} of activations)"
        )
        if cluster.gpu_memory is not None and total > cluster.gpu_memory:
            raise UserError(
                f"the run needs {total / 1e9:.1f} GB on each GPU, by Megatron's estimate, and a GPU has "
                f"{cluster.gpu_memory / 1e9:.1f} GB: {_savings(args)}"
            )
    _show_work(args, finished, show)
    _show_checkpoints(args, show)


def _show_layout(args: argparse.Namespace, cluster: Cluster, show: Callable[[str], None]) -> None:
    tensor, pipeline, context = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    data, micro = args.data_parallel_size, args.micro_batch_size
    show(f"GPUs: {cluster.gpus} = {cluster.nodes} x {cluster.gpus_per_node}")
    show(f"layout: TP {tensor} x PP {pipeline} x CP {context} x DP {data}")
    if tensor > cluster.gpus_per_node:
        show(f"  tensor parallelism spans nodes of {cluster.gpus_per_node} GPUs, over the network between them")
    for name, count in (
        ("attention heads", args.num_attention_heads),
        ("query groups", args.num_query_groups if args.group_query_attention else None),
        ("vocabulary", args.padded_vocab_size),
    ):
        if count is not None:
            show(f"  {name}: {count:,}, {count // tensor:,} on each of {tensor} tensor-parallel ranks")
    show(f"  layers: {args.num_layers} on {pipeline} pipeline stage{'s' if pipeline > 1 else ''}")
    share = context * (tensor if args.sequence_parallel else 1)
    show(
        f"  sequence: {args.seq_length:,} tokens, {args.seq_length // share:,} on each rank between the layers' blocks"
    )
    microbatches = args.global_batch_size // (micro * data)
    idle = (pipeline - 1) / (microbatches + pipeline - 1)
    show(
        f"  batch: {args.global_batch_size:,} sequences = {data} data-parallel ranks x {microbatches} microbatches of "
        f"{micro}" + (f"; a pipeline without interleaving idles {idle:.0%} of the time" if pipeline > 1 else "")
    )


def _show_work(args: argparse.Namespace, finished: int, show: Callable[[str], None]) -> None:
    from megatron.training.training import num_floating_point_operations

    steps = args.train_iters or args.train_samples // args.global_batch_size
    tokens = args.global_batch_size * args.seq_length
    operations = num_floating_point_operations(args, args.global_batch_size)
    behind = f", {finished:,} of which are done" if finished else ""
    show(f"steps: {steps:,}{behind}; tokens: {tokens:,} a step, {steps * tokens:,} in all")
    hours = steps * operations / (_TYPICAL * args.world_size) / 3600
    windows = "; Megatron counts windowed layers as full ones" if args.window_size else ""
    show(
        f"floating-point operations: {operations:.3g} a step, {steps * operations:.3g} in all{windows}; at "
        f"{_TYPICAL / 1e12:.0f} TFLOP/s a GPU that is {hours:,.1f} hours, {hours * args.world_size:,.0f} GPU hours"
    )


def _show_checkpoints(args: argparse.Namespace, show: Callable[[str], None]) -> None:
    if not args.save:
        show("checkpoints: none, since save is not set")
        return
    size = memory.checkpoint_size(args)
    each = "of unknown size" if size is None else f"of {size / 1e9:,.2f} GB"
    kept = "all are kept"
    if args.save_retain_interval:
        kept = f"the newest is kept, and one every {args.save_retain_interval:,} steps"
    show(f"checkpoints: {each}, every {args.save_interval:,} steps, in {args.save}; {kept}")


def _savings(args: argparse.Namespace) -> str:
    ways = []
    if not args.use_distributed_optimizer and args.data_parallel_size > 1:
        ways.append("set use_distributed_optimizer: true")
    if args.micro_batch_size > 1:
        ways.append("lower micro_batch_size")
    if args.recompute_granularity is None:
        ways.append("set recompute_granularity: selective")
    ways.append("raise tensor_model_parallel_size or pipeline_model_parallel_size")
    return ", or ".join(ways)
