"""Read a Megatron ``torch_dist`` checkpoint: what it is, and a model from it for evaluation on any layout."""

import argparse
import contextlib
import io
import itertools
import os
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_lengthgen import backends, megatron_args
from megatron_lengthgen.checkpoint.common import LOCAL, reason
from megatron_lengthgen.errors import UserError

__all__ = [
    "HUGGING_FACE",
    "TRACKER",
    "checkpoint_args",
    "find_checkpoint",
    "is_model_key",
    "load_model",
    "tokenizer_dir",
]

TRACKER = "latest_checkpointed_iteration.txt"
HUGGING_FACE = "hf"
"""Folder beside the iterations that holds the source's configuration and tokenizer."""

_ITERATION = re.compile(r"iter_\d{7,}|release")
_DTYPES: dict[str, dict[str, bool]] = {"fp32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}

# What decides the function that the model computes, beyond the fields of TransformerConfig
# (megatron/training/argument_utils.py::core_transformer_config_from_args and gpt_config_from_args).
_MODEL_ARGS = (
    "add_position_embedding",
    "apply_layernorm_1p",
    "group_query_attention",
    "make_vocab_size_divisible_by",
    "max_position_embeddings",
    "num_experts",
    "padded_vocab_size",
    "position_embedding_type",
    "quick_geglu",
    "rope_scaling_factor",
    "rotary_base",
    "rotary_percent",
    "rotary_seq_len_interpolation_factor",
    "seq_length",
    "squared_relu",
    "swiglu",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
    "vocab_size",
)
# Fields of TransformerConfig that say how a run computes, not what: this run's own machine decides.
_RUN_ARGS = re.compile(
    r"account_for_|attention_backend|batch_invariant|calculate_per_token_loss|config_logger|cp_comm_type|cuda_graph|"
    r"enable_cuda_graph|external_cuda_graph|distribute_saved|fine_grained_|flash_|fp4|fp8|first_last_layers_bf16|"
    r"num_layers_at_|num_layers_in_|init_method|embedding_init|inference_|init_model_with_meta|log_max|mlp_chunks|"
    r"nccl_|offload|activation_offload|delay_offload|delta_offload|min_offloaded|pipeline_model_parallel_layout|"
    r"recompute_|symmetric_ar|test_mode|transformer_impl|use_kitchen|kitchen_|use_te_|use_transformer_engine|"
    r"high_priority|clone_scatter|.*_fusion$"
)


def find_checkpoint(checkpoint: str | os.PathLike[str]) -> Path:
    """The iteration directory that ``checkpoint`` means, checked to be complete.

    Args:
        checkpoint: an iteration directory (``iter_0000100``, ``release``), or its parent with Megatron's tracker file.

    Raises:
        UserError: not there, not a ``torch_dist`` checkpoint, or a file missing or cut short.
    """
    path = Path(checkpoint)
    if not path.is_dir():
        raise UserError(f"no checkpoint directory {path}")
    tracker = path / TRACKER
    if tracker.is_file():
        text = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if not (text.isascii() and text.isdigit()) and text != "release":
            raise UserError(f"{tracker} holds {text!r}, not an iteration; {_alternatives(path)}")
        name = text if text == "release" else f"iter_{int(text):07d}"
        if not (path / name).is_dir():
            raise UserError(f"{tracker} names {name}, which is not there; {_alternatives(path)}")
        path = path / name
    elif not _ITERATION.fullmatch(path.name) and not (path / ".metadata").is_file():
        raise UserError(f"{path} has no {TRACKER}, so it is no Megatron checkpoint; {_alternatives(path)}")
    _check_complete(path)
    return path


def _alternatives(parent: Path) -> str:
    complete = [entry.name for entry in sorted(parent.iterdir()) if (entry / "metadata.json").is_file()]
    return f"give a complete one by name: {', '.join(complete)}" if complete else "it holds no complete iteration"


def _check_complete(path: Path) -> None:
    if not (path / "metadata.json").is_file():
        if any(path.glob("mp_rank_*")):
            raise UserError(f"{path} is in Megatron's legacy format; save it with --ckpt-format torch_dist")
        # dist_checkpointing.save writes it last.
        raise UserError(
            f"{path} has no metadata.json: it was not saved to the end; use an earlier iteration, or save it again"
        )
    if not (path / ".metadata").is_file():
        raise UserError(f"{path} has no .metadata, the index of its tensors; copy it again with its hidden files")
    backends.prepare()
    from torch.distributed.checkpoint import FileSystemReader

    try:
        metadata = FileSystemReader(path).read_metadata()
    except Exception as error:
        raise UserError(f"{path / '.metadata'} cannot be read ({error}); copy or save the checkpoint again") from error
    ends: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        ends[stored.relative_path] = max(ends.get(stored.relative_path, 0), stored.offset + stored.length)
    for name, end in ends.items():
        file = path / name
        if not file.is_file():
            raise UserError(f"{file} is missing, but .metadata names it; copy or save the checkpoint again")
        if file.stat().st_size < end:
            raise UserError(
                f"{file} has {file.stat().st_size} bytes instead of {end}: it was cut short; copy or save it again"
            )
    common = any(key.startswith("common_state") for key in metadata.state_dict_metadata)
    if not common and not (path / "common.pt").is_file():
        raise UserError(
            f"{path} has no common.pt, which holds the model's arguments; copy or save the checkpoint again"
        )


def checkpoint_args(checkpoint: str | os.PathLike[str]) -> argparse.Namespace:
    """The arguments stored in a checkpoint; builds nothing and needs no process group.

    ``args.lengthgen`` is always there ({} for a checkpoint of somebody else's trainer), and ``args.iteration`` is the
    iteration it was saved at.

    Raises:
        UserError: as :func:`find_checkpoint`, or no arguments inside.
    """
    return _stored(find_checkpoint(checkpoint))[0]


def _stored(path: Path) -> tuple[argparse.Namespace, dict[str, Any]]:
    backends.prepare()
    from megatron.core import dist_checkpointing

    try:
        with warnings.catch_warnings():
            # One process reads it, and torch says so where the others are not connected yet.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            common = dist_checkpointing.load_common_state_dict(path)
    except Exception as error:
        raise UserError(
            f"the arguments in {path} cannot be read ({error}); copy or save the checkpoint again"
        ) from error
    args = common.get("args")
    if args is None:
        raise UserError(f"{path} holds no arguments, so the model is unknown; save it with Megatron's save_checkpoint")
    args.lengthgen = dict(getattr(args, "lengthgen", None) or {})
    args.iteration = common.get("iteration", 0)
    return args, dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}


def tokenizer_dir(checkpoint: str | os.PathLike[str]) -> Path | None:
    """The local directory with the Hugging Face tokenizer of a checkpoint, or ``None``.

    It is looked for in the checkpoint (import puts it there), then where the training run took its tokenizer from, then
    in the checkpoint that the run started from.
    """
    path = find_checkpoint(checkpoint)
    candidates = [path / HUGGING_FACE, path.parent / HUGGING_FACE]
    args = _stored(path)[0]
    if getattr(args, "tokenizer_type", None) == "HuggingFaceTokenizer" and args.tokenizer_model:
        candidates.append(Path(args.tokenizer_model))
    if getattr(args, "pretrained_checkpoint", None):
        candidates.append(Path(args.pretrained_checkpoint) / HUGGING_FACE)
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return next((directory for directory in candidates if any((directory / name).is_file() for name in names)), None)


def is_model_key(key: str) -> bool:
    """Whether a key of the checkpoint is a weight that a model must take, not state of a training run."""
    return key.startswith(("embedding.", "decoder.", "output_layer.", "mtp.")) and not key.endswith("_extra_state")


def load_model(
    checkpoint: str | os.PathLike[str],
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    dtype: str = "bf16",
    overrides: Mapping[str, Any] | None = None,
) -> tuple[Any, argparse.Namespace]:
    """Build the model that a checkpoint holds, for this process layout, and load its weights.

    Works from any layout the checkpoint was saved on, with or without optimizer state. Every rank of a torchrun launch
    calls it. Megatron's global arguments, process groups and random states of this process are set up by it.

    Args:
        checkpoint: as for :func:`find_checkpoint`.
        tensor_parallel: ranks that each layer is split over.
        pipeline_parallel: stages that the layers are dealt to in equal numbers.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``, whatever the checkpoint stores.
        overrides: Megatron arguments that win over the stored ones; the key ``lengthgen`` replaces that section.

    Returns:
        This rank's ``GPTModel`` or ``HybridModel`` (its stage) in evaluation mode, without a wrapper, and the
        arguments it was built from.

    Raises:
        UserError: before the model is built where the checkpoint is incomplete or the layout does not fit; after it
            where keys or shapes of checkpoint and model differ.
    """
    if dtype not in _DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose from {', '.join(_DTYPES)}")
    path = find_checkpoint(checkpoint)
    stored, content = _stored(path)
    _check_layout(stored, tensor_parallel, pipeline_parallel)
    overrides = dict(overrides or {})
    lengthgen = overrides.pop("lengthgen", stored.lengthgen)
    layout = {"tensor_model_parallel_size": tensor_parallel, "pipeline_model_parallel_size": pipeline_parallel}
    args = _arguments(stored, layout, _DTYPES[dtype], overrides, lengthgen)

    from megatron.core.utils import unwrap_model

    from megatron_lengthgen.models.build import build_model, initialize

    initialize(args)
    model = unwrap_model(build_model(args))[0]
    _load_weights(model, path, content)
    return model.eval(), args


def _check_layout(stored: argparse.Namespace, tensor_parallel: int, pipeline_parallel: int) -> None:
    for name, value in (("tensor", tensor_parallel), ("pipeline", pipeline_parallel)):
        if value < 1:
            raise UserError(f"{name} parallel size must be at least 1, got {value}")
    # In evaluation our own specs compute what the stock one does; another's cannot be known.
    spec = getattr(stored, "spec", None)
    if spec and not str(spec[0]).startswith("megatron_lengthgen."):
        raise UserError(f"the checkpoint was trained with --spec {' '.join(spec)}, which cannot be rebuilt here")
    groups = stored.num_query_groups if stored.group_query_attention else stored.num_attention_heads
    for name, value in (
        ("num_attention_heads", stored.num_attention_heads),
        ("num_query_groups", groups),
        ("ffn_hidden_size", stored.ffn_hidden_size),
        ("padded_vocab_size", stored.padded_vocab_size),
    ):
        if value % tensor_parallel:
            way_out = "choose a tensor parallel size that divides it"
            if name == "padded_vocab_size":
                way_out += " or import the model again with --make-vocab-size-divisible-by a multiple of both"
            raise UserError(f"tensor parallel size {tensor_parallel} does not divide {name}={value}: {way_out}")
    symbols = _symbols(stored)
    if "M" in symbols:
        _check_mamba(stored, tensor_parallel)
    if symbols and len(symbols) < pipeline_parallel:
        raise UserError(
            f"pipeline parallel size {pipeline_parallel} is more than the {len(symbols)} layers of pattern {symbols!r}"
            ": choose fewer stages"
        )
    if not symbols and stored.num_layers % pipeline_parallel:
        raise UserError(
            f"pipeline parallel size {pipeline_parallel} does not divide num_layers={stored.num_layers}: choose one "
            "that divides it"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    size = tensor_parallel * pipeline_parallel
    if world % size:
        sizes = f"tensor parallel size {tensor_parallel}"
        if pipeline_parallel > 1:
            sizes += f" with pipeline parallel size {pipeline_parallel}"
        raise UserError(f"{sizes} does not fit {world} process(es): start with torchrun --nproc-per-node {size}")


def _check_mamba(stored: argparse.Namespace, tensor_parallel: int) -> None:
    # MambaMixer asserts it, in every process and without the numbers.
    heads = stored.mamba_num_heads or 2 * stored.hidden_size // stored.mamba_head_dim
    for name, value in (("mamba_num_heads", heads), ("mamba_num_groups", stored.mamba_num_groups)):
        if value % tensor_parallel:
            raise UserError(
                f"tensor parallel size {tensor_parallel} does not divide {name}={value}: choose one that divides it"
            )


def _symbols(stored: argparse.Namespace) -> str:
    """One symbol for each layer of a hybrid model; empty for other models."""
    return (getattr(stored, "hybrid_layer_pattern", None) or "").replace("|", "")


def _in_stages(symbols: str, stages: int) -> str | None:
    """``symbols`` with the borders of as equal ``stages`` as there are; longer ones come first. None without any."""
    if not symbols:
        return None
    size, longer = divmod(len(symbols), stages)
    borders = [stage * size + min(stage, longer) for stage in range(stages + 1)]
    return "|".join(symbols[start:end] for start, end in itertools.pairwise(borders))


def _arguments(
    stored: argparse.Namespace,
    layout: Mapping[str, int],
    dtype: Mapping[str, bool],
    overrides: Mapping[str, Any],
    lengthgen: Mapping[str, Any],
) -> argparse.Namespace:
    """This run's arguments: its own layout, dtype and machine, and the stored model.

    The stored values went through Megatron's validation once, so they are copied as attributes: a command line could
    not carry lists and tuples such as ``window_size`` back unchanged.
    """
    args = megatron_args.parse(
        {
            "num_layers": stored.num_layers,
            "hidden_size": stored.hidden_size,
            "num_attention_heads": stored.num_attention_heads,
            "seq_length": stored.seq_length,
            "max_position_embeddings": stored.max_position_embeddings,
            "position_embedding_type": stored.position_embedding_type,
            "micro_batch_size": 1,
            **LOCAL,
            **layout,
            "hybrid_layer_pattern": _in_stages(_symbols(stored), layout["pipeline_model_parallel_size"]),
            "tokenizer_type": "NullTokenizer",
            "vocab_size": stored.vocab_size or stored.padded_vocab_size,
            # Compiled or not, it is a pass over memory less (mlp.py::glu adds glu_linear_offset, a zero).
            "no_bias_swiglu_fusion": False,
            "no_initialization": True,
            "no_load_optim": True,
            "no_load_rng": True,
            **dtype,
            **overrides,
        },
        lengthgen=lengthgen,
    )
    for name in _model_arg_names():
        if hasattr(stored, name) and name not in overrides:
            setattr(args, name, getattr(stored, name))
    return args


def _model_arg_names() -> list[str]:
    import dataclasses

    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    fields = [field.name for field in dataclasses.fields(TransformerConfig) if field.name not in parallel]
    return [name for name in fields if not _RUN_ARGS.match(name)] + list(_MODEL_ARGS)


def _load_weights(model: Any, path: Path, content: dict[str, Any]) -> None:
    """Megatron's distributed load with every key of the model and of the checkpoint accounted for."""
    from megatron.core import dist_checkpointing, mpu
    from megatron.core.dist_checkpointing.validation import StrictHandling
    from torch.distributed.checkpoint.api import CheckpointException

    metadata = content | {"dp_cp_group": mpu.get_data_parallel_group(with_context_parallel=True)}
    sharded = {"model": model.sharded_state_dict(metadata=metadata)}
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            state, missing, unexpected = dist_checkpointing.load(sharded, str(path), strict=StrictHandling.RETURN_ALL)
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        raise UserError(f"the weights in {path} do not fit the model of its arguments: {reason(error)}") from error
    left_over = sorted(filter(is_model_key, missing))
    absent = sorted(filter(is_model_key, unexpected))
    if left_over or absent:
        raise UserError(
            f"{path} does not hold this model: "
            + "; ".join(
                f"{what} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
                for what, names in (("it lacks", absent), ("the model has no place for", left_over))
                if names
            )
        )
    result = model.load_state_dict(state["model"], strict=False)
    odd = [key for key in (*result.missing_keys, *result.unexpected_keys) if not key.endswith("_extra_state")]
    if odd:
        raise UserError(f"{path} does not hold this model: no match for {odd[0]} ({len(odd)} keys)")
