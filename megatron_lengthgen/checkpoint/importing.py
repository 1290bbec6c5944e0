"""Hugging Face model -> Megatron ``torch_dist`` checkpoint that loads on any layout."""

import contextlib
import hashlib
import io
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megatron_lengthgen import megatron_args
from megatron_lengthgen.attention.pattern import AttentionPattern
from megatron_lengthgen.checkpoint import huggingface, load
from megatron_lengthgen.checkpoint.common import LOCAL, check_space, prepare_saving, reason, replacing_directory
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import write_json
from megatron_lengthgen.models import hugging_face
from megatron_lengthgen.models.entries import Entry

__all__ = ["DTYPES", "ORIGIN", "import_model"]

DTYPES: dict[str, dict[str, bool]] = {"fp32": {}, "bf16": {"bf16": True}}
ORIGIN = "import.json"
"""File of a finished checkpoint that says what it was made from."""


def import_model(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str = "fp32",
    make_vocab_size_divisible_by: int = 128,
    window: int | None = None,
    pattern: str | None = None,
    rope: str | None = None,
    allow_nonfinite: bool = False,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> bool:
    """Convert a Llama, SmolLM3 or Mamba-2 model.

    The result holds one ``release`` checkpoint as ``megatron.training`` writes it, so ``--load`` and
    ``--pretrained-checkpoint`` start from it at iteration 0 on any tensor and pipeline size, and ``hf/`` with the
    source's configuration and tokenizer. It appears under ``destination`` only when it is complete.

    One process does it. The weights lie in temporary files beside the result until it is written, so that a model
    larger than the memory can be imported; the disk needs room for it twice. It sets Megatron's global arguments and
    process groups of this process.

    Args:
        source: local Hugging Face directory or hub id.
        destination: the checkpoint directory (what ``--load`` takes).
        dtype: ``"fp32"``, which every source dtype fits in, or ``"bf16"``.
        make_vocab_size_divisible_by: the embedding gets zero rows up to a multiple of it, on every layout the same; any
            tensor parallel size that divides the result can load it.
        window: attend through a window of so many tokens, the query's own included, in the layers that ``pattern``
            marks; by default in those that use RoPE, so that layers without keep full attention, as in the paper.
        pattern: ``W`` (windowed) and ``F`` (full) for each layer, repeated over them: ``WWWF``. Needs ``window``.
        rope: ``"windowed"`` takes RoPE from the layers with full attention; by default each layer keeps what it was
            pretrained with. Needs ``window``.
        allow_nonfinite: take NaN and infinite weights as they are.
        force: replace a finished checkpoint that was made from something else.
        progress: called with (parameters done, parameters in all).

    Returns:
        False where ``destination`` already holds this very conversion and nothing was done.

    Raises:
        UserError: before anything is built or written, except when the disk is full or a weight is NaN or infinite.
    """
    destination = Path(destination)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("import runs in one process: start it without torchrun; the result loads on any layout")
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    if make_vocab_size_divisible_by < 1:
        raise UserError(f"make_vocab_size_divisible_by must be at least 1, got {make_vocab_size_divisible_by}")
    opened = huggingface.open_source(source)
    values = hugging_face.megatron_args(opened.config, make_vocab_size_divisible_by=make_vocab_size_divisible_by)
    values |= _attention(values, window, pattern, rope)
    entries = hugging_face.key_map(values)
    origin = _origin(source, opened, dtype, make_vocab_size_divisible_by)
    if window is not None:
        origin["attention"] = {"window": window, "pattern": pattern, "rope": rope}
    replaces = _is_occupied(destination, origin, force)
    if replaces is None:
        return False
    opened.check(entries, tied=not values["untie_embeddings_and_output_weights"])

    check_space(destination, 2 * _size(values, entries, dtype))  # temporary files, and the result

    with replacing_directory(destination, replaces) as temporary:
        huggingface.copy_side_files(opened.root, temporary / load.HUGGING_FACE)
        tokenizer = {
            "tokenizer_type": "HuggingFaceTokenizer",
            "tokenizer_model": str(destination.resolve() / load.HUGGING_FACE),
        }
        read = opened.tensor if allow_nonfinite else partial(_finite, opened)
        _save(values | DTYPES[dtype], tokenizer, entries, read, temporary, progress)
        write_json(temporary / ORIGIN, origin)
    return True


def _attention(values: Mapping[str, Any], window: int | None, pattern: str | None, rope: str | None) -> dict[str, Any]:
    """Megatron's arguments for the windows that the caller asked for; none where they asked for nothing."""
    if window is None:
        if pattern is not None or rope is not None:
            raise UserError(f"pattern {pattern!r} and rope {rope!r} say where a window goes: set a window, too")
        return {}
    if "hybrid_layer_pattern" in values:
        raise UserError(f"window {window} is for attention, and this model has Mamba layers alone: leave window out")
    if rope not in (None, "windowed"):
        raise UserError(f"unknown rope {rope!r}: leave it out, or choose windowed")
    layers = values["num_layers"]
    skips = values.get("no_rope_freq") or [0] * layers
    mapping = {
        "window": window,
        "pattern": ["F" if skip else "W" for skip in skips] if pattern is None else pattern,
        "rope": rope or [int(not skip) for skip in skips],
    }
    return AttentionPattern.from_mapping(mapping, layers).to_megatron()


def _origin(
    source: str | os.PathLike[str], opened: huggingface.Source, dtype: str, make_vocab_size_divisible_by: int
) -> dict[str, Any]:
    """What decides the result. Weights are known by file name and size: hashing them would cost another read."""
    files = {name: (opened.root / name).stat().st_size for name in sorted(set(opened.files.values()))}
    return {
        "source": os.fspath(source),
        "config_sha256": hashlib.sha256(json.dumps(opened.config, sort_keys=True).encode()).hexdigest(),
        "files": files,
        "dtype": dtype,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
    }


def _is_occupied(destination: Path, origin: dict[str, Any], force: bool) -> bool | None:
    """Whether writing replaces a finished checkpoint; ``None`` where the very same one is there."""
    if destination.is_symlink() or destination.is_file():
        raise UserError(f"{destination} is a file or link; give a directory that is new or empty")
    if not destination.exists() or not any(destination.iterdir()):
        return False
    if not (destination / load.TRACKER).is_file():
        raise UserError(f"{destination} holds something that is no checkpoint; give a directory that is new or empty")
    if force:
        return True
    try:
        found = json.loads((destination / ORIGIN).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = None
    what = ("config_sha256", "files", "dtype", "make_vocab_size_divisible_by", "attention")
    if isinstance(found, dict) and all(found.get(name) == origin.get(name) for name in what):
        load.find_checkpoint(destination)
        return None
    made_from = f"from {found['source']} as {found['dtype']}" if found else "by a training run"
    raise UserError(
        f"{destination} holds a checkpoint made {made_from}; use --force to replace it or another directory"
    )


def _size(values: Mapping[str, Any], entries: list[Entry], dtype: str) -> int:
    """Bytes on disk."""
    parameters = sum(math.prod(shape) for entry in entries for shape in entry.shapes)
    padding = (values["padded_vocab_size"] - values["vocab_size"]) * values["hidden_size"]
    return (parameters + 2 * padding) * (2 if dtype == "bf16" else 4)


def _save(
    values: dict[str, Any],
    tokenizer: dict[str, Any],
    entries: list[Entry],
    read: Callable[[str], torch.Tensor],
    directory: Path,
    progress: Callable[[int, int], None],
) -> None:
    args = megatron_args.parse(
        {
            **values,
            "micro_batch_size": 1,
            **LOCAL,
            "use_cpu_initialization": True,
            "no_initialization": True,
            "tokenizer_type": "NullTokenizer",
            "no_save_optim": True,
            "no_save_rng": True,
            "save": str(directory),
            "save_interval": 1,
        }
    )
    vars(args).update(tokenizer)

    from megatron.core.utils import unwrap_model
    from megatron.training.checkpointing import save_checkpoint
    from torch.distributed.checkpoint.api import CheckpointException

    from megatron_lengthgen.models.build import build_model, initialize

    prepare_saving()
    initialize(args)
    chunks = build_model(args)
    parameters = dict(unwrap_model(chunks)[0].named_parameters())
    with tempfile.TemporaryDirectory(prefix=".weights", dir=directory) as files:
        _move_to_files(parameters, Path(files))
        _fill(parameters, entries, read, progress)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                save_checkpoint(0, chunks, None, None, 0, release=True)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            raise UserError(f"the checkpoint could not be written to {directory.parent}: {reason(error)}") from error


def _finite(opened: huggingface.Source, name: str) -> torch.Tensor:
    """A tensor, unless some of its values are no numbers."""
    tensor = opened.tensor(name)
    if count := tensor.numel() - int(tensor.isfinite().sum()):
        raise UserError(
            f"{name} in {opened.root} has {count:,} of {tensor.numel():,} values that are NaN or infinite, and every "
            "answer would be, too: take another checkpoint of the model, or import it as it is with --allow-nonfinite"
        )
    return tensor


def _move_to_files(parameters: dict[str, torch.nn.Parameter], directory: Path) -> None:
    """Back parameters, which hold nothing yet, by files: what is written leaves memory whenever the system needs it."""
    for number, parameter in enumerate(parameters.values()):
        file = str(directory / str(number))
        flat = torch.from_file(file, shared=True, size=parameter.numel(), dtype=parameter.dtype)
        parameter.data = flat.view_as(parameter)


def _fill(
    parameters: dict[str, torch.nn.Parameter],
    entries: list[Entry],
    read: Callable[[str], torch.Tensor],
    progress: Callable[[int, int], None],
) -> None:
    if set(parameters) != {entry.megatron for entry in entries}:
        odd = sorted(set(parameters) ^ {entry.megatron for entry in entries})
        raise RuntimeError(f"the key map and the built model disagree on {odd}")
    with torch.no_grad():
        for done, entry in enumerate(entries, start=1):
            parameters[entry.megatron].copy_(entry.pack([read(name) for name in entry.hugging_face]))
            progress(done, len(entries))
