"""Megatron ``torch_dist`` checkpoint -> Hugging Face directory that transformers loads."""

import argparse
import json
import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron_lengthgen.checkpoint import huggingface, load
from megatron_lengthgen.checkpoint.common import check_space, make_readable, replacing_directory
from megatron_lengthgen.checkpoint.tensors import StoredModel
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import write_json
from megatron_lengthgen.models import hugging_face
from megatron_lengthgen.models.entries import Entry

__all__ = ["DTYPES", "export_model"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(
    checkpoint: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    max_shard_size: str = "5GB",
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Write safetensors shards with their index, ``config.json``, ``generation_config.json`` and the tokenizer.

    The model is a ``LlamaForCausalLM``, a ``SmolLM3ForCausalLM`` where it has windows or layers without RoPE, or a
    ``Mamba2ForCausalLM``. Rows that pad the vocabulary are cut off; zero-centred gains of norms become plain ones,
    which may round them. Tokenizer, generation settings and special tokens come from where
    :func:`.load.tokenizer_dir` finds them.

    One process does it, without a model or process groups; memory holds one shard and up to four times one parameter,
    which torch's reader copies on the way. The directory appears under ``destination`` only when it is complete.

    Args:
        checkpoint: as for :func:`.load.find_checkpoint`; of any layout, with or without optimizer state.
        destination: a directory that is new or empty.
        dtype: ``"fp32"``, ``"bf16"`` or ``"fp16"``; by default that of the checkpoint.
        max_shard_size: size of a weights file, such as ``500MB``; a larger tensor gets a file of its own.
        force: replace an earlier Hugging Face model in ``destination``.
        progress: called with (parameters done, parameters in all).

    Returns:
        The content of ``config.json``.

    Raises:
        UserError: before anything is written, except for weights that do not fit ``dtype`` or a full disk.
    """
    destination = Path(destination)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError("export runs in one process: start it without torchrun; it reads a checkpoint of any layout")
    if dtype is not None and dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}; choose from {', '.join(DTYPES)}")
    limit = _bytes(max_shard_size)
    replaces = _is_occupied(destination, force)
    path = load.find_checkpoint(checkpoint)
    args, side_files = load.checkpoint_args(path), load.tokenizer_dir(path) or path.parent / load.HUGGING_FACE
    source = _source_config(side_files)
    args.vocab_size = _vocab_size(args, source)
    config = hugging_face.config_json(args) | {name: source.get(name) for name in _TOKENS}
    entries, stored = hugging_face.key_map(vars(args)), StoredModel(path)
    stored.check(entries)
    to = _dtype(stored, dtype)
    config["dtype"] = str(to).removeprefix("torch.")
    total = sum(math.prod(shape) for entry in entries for shape in entry.shapes) * to.itemsize
    check_space(destination, total)

    with replacing_directory(destination, replaces) as temporary:
        try:
            huggingface.copy_side_files(side_files, temporary)
            write_json(temporary / "config.json", config)
            if not (temporary / "generation_config.json").is_file():
                tokens = {name: config[name] for name in _TOKENS if config[name] is not None}
                write_json(temporary / "generation_config.json", {"_from_model_config": True, **tokens})
            files = _assign(entries, to.itemsize, limit)
            is_zero_centred = any(
                getattr(args, name, False) for name in ("layernorm_zero_centered_gamma", "apply_layernorm_1p")
            )
            _write_shards(stored, entries, files, temporary, to, is_zero_centred, progress)
            if len(set(files.values())) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": files}
                write_json(temporary / huggingface.INDEX, index)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{destination} could not be written: {error}") from error
    return config


def _bytes(size: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMG]B)", size.strip().upper())
    if match is None or not int(match[1]):
        raise UserError(f"max_shard_size {size!r} is no size: write it like 500MB or 5GB")
    return int(match[1]) * _UNITS[match[2]]


def _is_occupied(destination: Path, force: bool) -> bool:
    if destination.is_symlink() or destination.is_file():
        raise UserError(f"{destination} is a file or link; give a directory that is new or empty")
    if not destination.exists() or not any(destination.iterdir()):
        return False
    if not (destination / "config.json").is_file() or not any(destination.glob("*.safetensors")):
        raise UserError(
            f"{destination} holds something that is no Hugging Face model; give a directory that is new or empty"
        )
    if not force:
        raise UserError(f"{destination} holds a model already; use --force to replace it, or another directory")
    return True


def _source_config(directory: Path) -> dict[str, Any]:
    """The ``config.json`` beside the tokenizer, of the model that the checkpoint was made from; {} without one."""
    file = directory / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON ({error}); repair it or remove it") from error
    return config if isinstance(config, dict) else {}


def _vocab_size(args: argparse.Namespace, source: dict[str, Any]) -> int:
    """Rows without padding. A run whose tokenizer chose the size stores the padded one alone; the source knows."""
    rows: int = args.padded_vocab_size
    known = args.vocab_size or source.get("vocab_size")
    return known if isinstance(known, int) and known <= rows else rows


def _dtype(stored: StoredModel, dtype: str | None) -> torch.dtype:
    if dtype is not None:
        return DTYPES[dtype]
    found = stored.dtypes
    if len(found) > 1 or not found <= set(DTYPES.values()):
        names = ", ".join(sorted(str(name).removeprefix("torch.") for name in found))
        raise UserError(f"the checkpoint stores {names}: choose one of {', '.join(DTYPES)} with --dtype")
    return found.pop()


def _assign(entries: list[Entry], itemsize: int, limit: int) -> dict[str, str]:
    """File of each tensor: as many in a file, in order, as ``limit`` bytes hold."""
    numbers: dict[str, int] = {}
    number, used = 1, 0
    for entry in entries:
        for name, shape in zip(entry.hugging_face, entry.shapes, strict=True):
            size = math.prod(shape) * itemsize
            if used and used + size > limit:
                number, used = number + 1, 0
            numbers[name] = number
            used += size
    if number == 1:
        return dict.fromkeys(numbers, huggingface.SINGLE)
    return {name: f"model-{here:05d}-of-{number:05d}.safetensors" for name, here in numbers.items()}


def _write_shards(
    stored: StoredModel,
    entries: list[Entry],
    files: dict[str, str],
    directory: Path,
    dtype: torch.dtype,
    is_zero_centred: bool,
    progress: Callable[[int, int], None],
) -> None:
    shard: dict[str, Tensor] = {}
    file = next(iter(files.values()))
    for done, entry in enumerate(entries, start=1):
        tensor = stored.read(entry.megatron)
        if is_zero_centred and entry.is_layer_norm:
            tensor = tensor.float() + 1
        for name, part in zip(entry.hugging_face, entry.unpack(tensor), strict=True):
            if files[name] != file:
                _write_shard(shard, directory / file)
                shard, file = {}, files[name]
            shard[name] = _alone(_cast(part, dtype, name))
        progress(done, len(entries))
    _write_shard(shard, directory / file)


def _cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    converted = tensor.to(dtype)
    if dtype == torch.float16 and not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise UserError(f"{name} has values beyond fp16's range, up to {tensor.abs().max():g}: export it as bf16")
    return converted


def _alone(tensor: Tensor) -> Tensor:
    """``tensor`` with a storage of its own size: a shard keeps no more alive than it writes."""
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _write_shard(shard: dict[str, Tensor], file: Path) -> None:
    save_file(shard, file, metadata={"format": "pt"})
    make_readable(file)
