"""A run's YAML: Megatron's own argument names, grouped as the user likes, and one ``lengthgen`` section."""

import argparse
import importlib.util
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_lengthgen import backends, megatron_args
from megatron_lengthgen.attention.pattern import AttentionPattern, attention_layers
from megatron_lengthgen.checkpoint.load import TRACKER
from megatron_lengthgen.choices import check_choice, suggest
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models.build import regularization
from megatron_lengthgen.regularization import Regularization
from megatron_lengthgen.training import blend, schedule
from megatron_lengthgen.training.probe_settings import PROBES, ProbeSettings
from megatron_lengthgen.training.resume import record

__all__ = ["RunConfig", "load", "parse", "resolve"]

_SECTION = "lengthgen"
_CORE_ATTENTION = ("sdpa", "megatron")
_MEGATRON_DEFAULT_DROPOUT = 0.1
_REGULARIZATION = tuple(option.name for option in fields(Regularization))
_KEYS = (*_REGULARIZATION, "attention", "core_attention", *PROBES)


@dataclass(frozen=True)
class RunConfig:
    """What a run was asked to do: Megatron's arguments, and this package's section as plain values."""

    megatron: dict[str, Any] = field(default_factory=dict)
    lengthgen: dict[str, Any] = field(default_factory=dict)


def load(path: str | os.PathLike[str], overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run's YAML.

    Args:
        path: the YAML file. Interpolations such as ``${oc.env:HOME}`` are resolved.
        overrides: ``key=value`` items that win over the file: ``lr=1e-4``, ``lengthgen.p=0.2``, and, with the name of
            its group if one likes, ``optimizer.lr=1e-4``.

    Raises:
        UserError: for a missing or malformed file, a key written twice, an unknown key.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no configuration file at {path}")
    try:
        tree = OmegaConf.to_container(OmegaConf.load(path), resolve=True)
    except (OmegaConfBaseException, OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} cannot be read as YAML: {_one_line(error)}") from error
    except Exception as error:  # yaml's own errors share no public base with OmegaConf's
        raise UserError(f"{path} is no valid YAML: {_one_line(error)}") from error
    if not isinstance(tree, dict):
        raise UserError(f"{path} must hold a mapping of keys to values, not {type(tree).__name__}")
    section = tree.pop(_SECTION, None) or {}
    if not isinstance(section, dict):
        raise UserError(f"the {_SECTION} section of {path} must be a mapping, not {section!r}")
    values: dict[str, Any] = {}
    groups = _flatten(tree, values)
    _override(values, section, groups, overrides)
    return resolve(values, section)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _flatten(tree: Mapping[Any, Any], into: dict[str, Any]) -> set[str]:
    """Collect the leaves of nested groups into one mapping; returns the groups' names."""
    groups = set()
    for name, value in tree.items():
        if isinstance(value, dict):
            groups |= {str(name)} | _flatten(value, into)
        elif str(name) in into:
            raise UserError(f"the key {name!r} is written twice, in two groups: keep one")
        else:
            into[str(name)] = value
    return groups


def _override(values: dict[str, Any], section: dict[str, Any], groups: set[str], overrides: Iterable[str]) -> None:
    for item in overrides:
        key, separator, text = item.partition("=")
        if not separator or not key:
            raise UserError(f"{item!r} is no override: write key=value")
        try:
            value = OmegaConf.to_container(OmegaConf.create(f"value: {text}"))["value"]  # type: ignore[call-overload, index]
        except Exception as error:
            raise UserError(f"the value of {item!r} is no YAML value: {_one_line(error)}") from error
        parts = key.split(".")
        if parts[0] == _SECTION:
            target, names = section, parts[1:]
            for name in names[:-1]:
                target = target.setdefault(name, {})
            if not names or not isinstance(target, dict):
                raise UserError(f"{key!r} names no single value of the {_SECTION} section")
            target[names[-1]] = value
        elif all(part in groups for part in parts[:-1]):
            values[parts[-1]] = value
        else:
            unknown = next(part for part in parts[:-1] if part not in groups)
            raise UserError(f"no group {unknown!r} in the configuration{suggest(unknown, sorted(groups))}")


def resolve(values: dict[str, Any], section: dict[str, Any]) -> RunConfig:
    """Settle what the two halves decide together: windows and RoPE, dropout probabilities, where to resume."""
    for key in section:
        if key not in _KEYS:
            raise UserError(f"unknown key {_SECTION}.{key}{suggest(key, list(_KEYS))}")
    core_attention = section.get("core_attention", "sdpa")
    check_choice(f"{_SECTION}.core_attention", core_attention, _CORE_ATTENTION)
    values = schedule.in_steps(blend.resolve(values))
    values |= _attention_arguments(values, section)
    chosen = {name: section[name] for name in _REGULARIZATION if section.get(name) is not None}
    written = values.get("hidden_dropout")
    if chosen.get("p") is None:
        chosen["p"] = _MEGATRON_DEFAULT_DROPOUT if written is None else written
    regularization = Regularization.from_mapping({"placement": "none", **chosen})
    # p acts through the layer spec alone: Megatron would also drop embeddings with `hidden_dropout`, and attention
    # weights at its own default of 0.1.
    values["hidden_dropout"] = 0.0
    values.setdefault("attention_dropout", 0.0)
    # Without documents to keep apart, attention derives a mask from causality and the window.
    if not values.get("reset_attention_mask"):
        values.setdefault("no_create_attention_mask_in_dataloader", True)
    elif int(values.get("pipeline_model_parallel_size") or 1) > 2:
        raise UserError(
            "reset_attention_mask keeps documents apart through a mask, which Megatron gives to the first and the last "
            "pipeline stage alone: set pipeline_model_parallel_size to 2 at most, or reset_attention_mask: false"
        )
    if values.get("dataloader_inter_document_masking"):
        raise UserError(
            "dataloader_inter_document_masking packs documents in a way that this trainer does not read: use "
            "reset_attention_mask: true, which keeps them apart too"
        )
    # Megatron's own default is 0.01, and weight decay is what length generalisation suffers from.
    values.setdefault("weight_decay", 0.0)
    # Without an interval Megatron divides by None once the model is built.
    values.setdefault("eval_interval", 1000)
    if values.get("save") is not None:
        values.setdefault("save_interval", 1000)
        # A second start goes on where the first one stopped.
        values.setdefault("load", values["save"])
        values.setdefault("tensorboard_dir", os.path.join(str(values["save"]), "tensorboard"))
        # Time per step and TFLOP/s per GPU beside the loss.
        values.setdefault("log_timers_to_tensorboard", True)
        values.setdefault("log_throughput", True)
        # SIGTERM: save at the end of the step, and end.
        values.setdefault("exit_signal_handler", True)
    if values.get("async_save"):
        # Megatron would quietly save synchronously without the one, and end without the other.
        values.setdefault("use_persistent_ckpt_worker", True)
        if importlib.util.find_spec("nvidia_resiliency_ext") is None:
            values.setdefault("async_strategy", "mcore")
    if values.get("wandb_project"):
        values.setdefault("wandb_exp_name", Path(str(values.get("save") or "run")).name)
    resolved = {**regularization.to_dict(), "core_attention": core_attention}
    if section.get("attention"):
        resolved["attention"] = section["attention"]
    for name in PROBES:
        if section.get(name) is not None:
            resolved[name] = ProbeSettings.from_mapping(name, section[name]).to_mapping()
    return RunConfig(megatron=values, lengthgen=resolved)


def _attention_arguments(values: Mapping[str, Any], section: Mapping[str, Any]) -> dict[str, Any]:
    attention = section.get("attention")
    if not attention:
        return {}
    if not isinstance(attention, dict):
        raise UserError(f"{_SECTION}.attention must be a mapping such as {{window: 4096, pattern: WWWF}}")
    layers, symbols = _num_layers(values), values.get("hybrid_layer_pattern")
    if layers is None:
        raise UserError(f"{_SECTION}.attention needs num_layers in the configuration")
    if symbols is None:
        pattern = AttentionPattern.from_mapping(attention, layers)
    else:
        count = attention_layers(symbols)
        if not count:
            raise UserError(
                f"hybrid_layer_pattern {symbols!r} has no attention layer (*): leave {_SECTION}.attention out"
            )
        pattern = AttentionPattern.from_mapping(attention, count).in_hybrid(symbols)
    arguments = pattern.to_megatron()
    arguments = {name: value for name, value in arguments.items() if value is not None}
    both = sorted(arguments.keys() & {name for name, value in values.items() if value is not None})
    if both:
        raise UserError(f"{', '.join(both)} and {_SECTION}.attention say the same thing twice: keep one")
    return arguments


def _num_layers(values: Mapping[str, Any]) -> int | None:
    """Layers of the model, if known; every symbol of a hybrid model's pattern is one."""
    symbols, written = values.get("hybrid_layer_pattern"), values.get("num_layers")
    if symbols is None:
        return written if isinstance(written, int) else None
    backends.prepare()
    from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_total_layer_count, parse_hybrid_pattern

    try:
        parse_hybrid_pattern(symbols)
    except (ValueError, AttributeError) as error:
        raise UserError(f"hybrid_layer_pattern {symbols!r} is no pattern of layers: {_one_line(error)}") from error
    layers = get_hybrid_total_layer_count(symbols)
    if written not in (None, layers):
        raise UserError(f"hybrid_layer_pattern {symbols!r} has {layers} layers: leave num_layers {written} out")
    return layers


def parse(run: RunConfig, *, logs: bool = True) -> argparse.Namespace:
    """Check ``run`` against this machine's files and processes, and parse it into Megatron's global arguments.

    Args:
        run: as :func:`load` gives it.
        logs: start TensorBoard's and W&B's logs, which Megatron does here.

    Raises:
        UserError: for missing data, checkpoints or tokenizers, an impossible layout, or what Megatron refuses.
    """
    _check_files(run.megatron)
    _check_layout(run.megatron)
    _check_wandb(run.megatron)
    # Probes do nothing to a run, so that its checkpoints need not know of them.
    lengthgen = {name: value for name, value in run.lengthgen.items() if name not in PROBES}
    values = run.megatron if logs else {**run.megatron, "tensorboard_dir": None, "wandb_project": None}
    args = megatron_args.parse(values, lengthgen=record(lengthgen))
    _check_vocabulary(args)
    schedule.check(args)
    _check_schedule(args)
    _check_splits(args)
    return args


def _check_files(values: Mapping[str, Any]) -> None:
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        blend = values.get(name)
        if blend is None:
            continue
        for item in blend if isinstance(blend, list | tuple) else [blend]:
            if not _is_number(item):
                for suffix in (".idx", ".bin"):
                    if not Path(f"{item}{suffix}").is_file():
                        raise UserError(
                            f"{name} names {item}, but there is no file {item}{suffix}: make it with "
                            "tools/prepare_data.py"
                        )
    pretrained, load = values.get("pretrained_checkpoint"), values.get("load")
    started = load is not None and (Path(str(load)) / TRACKER).is_file()
    if pretrained is not None and not started:
        marker = Path(str(pretrained)) / TRACKER
        if not marker.is_file():
            raise UserError(
                f"pretrained_checkpoint {pretrained} is no Megatron checkpoint ({marker.name} is missing): make one "
                "with tools/convert_checkpoint.py import"
            )
    tokenizer = values.get("tokenizer_model")
    if tokenizer is not None and str(tokenizer).startswith((".", "/", "~")) and not Path(str(tokenizer)).exists():
        raise UserError(f"tokenizer_model {tokenizer} does not exist")


def _check_wandb(values: Mapping[str, Any]) -> None:
    """Megatron would find out on the last rank alone, with the others waiting for it."""
    project = values.get("wandb_project")
    if not project:
        return
    if importlib.util.find_spec("wandb") is None:
        raise UserError(
            f"wandb_project {project} needs Weights & Biases: pip install wandb, or leave wandb_project out"
        )
    if not (values.get("wandb_save_dir") or values.get("save")):
        raise UserError(f"wandb_project {project} needs a folder for its files: set save or wandb_save_dir")
    if not values.get("tensorboard_dir"):
        raise UserError(
            f"wandb_project {project} gets nothing without TensorBoard, beside which Megatron logs: set save or "
            "tensorboard_dir"
        )


def _is_number(text: Any) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _check_layout(values: Mapping[str, Any]) -> None:
    """Refuse layouts that Megatron would refuse only once every process has started, with the values that work."""
    layers = _num_layers(values)
    tensor, pipeline = (int(values.get(f"{name}_model_parallel_size") or 1) for name in ("tensor", "pipeline"))
    split = {name: values.get(name) for name in _split_names(values)}
    counts = {name: count for name, count in split.items() if isinstance(count, int)}
    for name, count in counts.items():
        if count % tensor:
            shared = [n for n in range(1, count + 1) if not any(other % n for other in counts.values())]
            raise UserError(
                f"tensor_model_parallel_size {tensor} does not divide {name} {count}; "
                f"this model can use {', '.join(map(str, shared))}"
            )
    symbols = values.get("hybrid_layer_pattern")
    segments = [] if symbols is None else symbols.split("/")[0].split("|")
    stages = max(len(segments), 1)
    if "" in segments:
        raise UserError(
            f"hybrid_layer_pattern {symbols!r} leaves a pipeline stage without layers: take a | out, or give the stage "
            "a layer"
        )
    if stages > 1 and (stages % pipeline or pipeline == 1):
        raise UserError(
            f"pipeline_model_parallel_size {pipeline} does not fit the {stages} stages of hybrid_layer_pattern "
            f"{symbols!r}: set it to {stages}, or take | out of the pattern"
        )
    uneven = stages > 1 or any(
        values.get(name)
        for name in (
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
            "pipeline_model_parallel_layout",
            "account_for_embedding_in_pipeline_split",
            "account_for_loss_in_pipeline_split",
        )
    )
    if layers is not None and layers % pipeline and not uneven:
        way_out = "give decoder_first_pipeline_num_layers" if symbols is None else "write the stages' borders as |"
        raise UserError(
            f"pipeline_model_parallel_size {pipeline} does not divide num_layers {layers}: choose one that "
            f"does, or {way_out}"
        )
    length = values.get("seq_length")
    if values.get("sequence_parallel") and isinstance(length, int) and length % tensor:
        raise UserError(f"sequence_parallel needs seq_length {length} divisible by tensor_model_parallel_size {tensor}")


def _split_names(values: Mapping[str, Any]) -> Iterator[str]:
    """What tensor-parallel ranks share out."""
    yield "num_attention_heads"
    if values.get("group_query_attention"):
        yield "num_query_groups"
    if "M" in (values.get("hybrid_layer_pattern") or ""):
        yield from ("mamba_num_heads", "mamba_num_groups")


def _check_vocabulary(args: argparse.Namespace) -> None:
    """Vocabulary rows are split evenly over tensor-parallel ranks."""
    rows = args.padded_vocab_size
    if rows is not None and rows % args.tensor_model_parallel_size:
        raise UserError(
            f"tensor_model_parallel_size {args.tensor_model_parallel_size} does not divide the vocabulary's {rows} rows"
        )


def _check_schedule(args: argparse.Namespace) -> None:
    """Megatron asserts the first one without the numbers; a dropout that the run ends before would go unnoticed."""
    decay = args.lr_decay_iters or args.train_iters
    if decay and args.lr_warmup_iters >= decay:
        raise UserError(
            f"lr_warmup_iters {args.lr_warmup_iters} is not less than the {decay} steps over which the learning rate "
            "goes up and down: set it lower, or 0"
        )
    chosen = regularization(args)
    # Under step_batch_size_schedule the number of steps is known once training has begun.
    steps = args.train_iters
    if not steps and args.train_samples and args.step_batch_size_schedule is None:
        steps = args.train_samples // args.global_batch_size
    if not (chosen.is_active and chosen.p and steps):
        return
    if chosen.start_step >= steps:
        raise UserError(
            f"{_SECTION}.start_step {chosen.start_step} is never reached in a run of {steps} steps, so that nothing "
            "would be dropped: start earlier, or choose placement none"
        )
    if chosen.start_step + chosen.ramp_steps > steps:
        raise UserError(
            f"{_SECTION}.start_step {chosen.start_step} and ramp_steps {chosen.ramp_steps} end after the run's {steps} "
            f"steps, so that p {chosen.p:g} would never be reached: start earlier, or ramp up faster"
        )


def _check_splits(args: argparse.Namespace) -> None:
    """Megatron splits documents, not tokens, and loops forever over a split that got none."""
    if args.data_path is None or args.split is None:
        return
    from megatron.core.datasets.blended_megatron_dataset_config import parse_and_normalize_split
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    weights = parse_and_normalize_split(args.split)
    for prefix in (item for item in args.data_path if not _is_number(item)):
        documents = len(IndexedDataset(prefix, mmap=True).document_indices) - 1
        end = 0.0
        for name, weight in zip(("training", "validation", "test"), weights, strict=True):
            begin, end = end, end + weight
            if weight > 0 and round(begin * documents) == round(end * documents):
                raise UserError(
                    f"split {args.split} leaves the {name} split of {prefix} without a document, since it has "
                    f"{documents} in all: give that split more, or 0"
                )
