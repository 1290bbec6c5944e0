"""GGUF file -> Hugging Face directory, by transformers' own dequantisation."""

import os
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import atomic_directory
from megatron_lengthgen.models.llama import megatron_args

__all__ = ["gguf_to_hugging_face", "is_complete"]


def is_complete(directory: str | os.PathLike[str]) -> bool:
    """Whether ``directory`` holds what :func:`gguf_to_hugging_face` writes."""
    names = ("config.json", "model.safetensors", "tokenizer.json")
    return all((Path(directory) / name).is_file() for name in names)


def gguf_to_hugging_face(file: str | os.PathLike[str], destination: str | os.PathLike[str]) -> bool:
    """Write the dequantised weights (float32 safetensors), ``config.json`` and the tokenizer of a Llama GGUF file.

    Args:
        file: the GGUF file.
        destination: a directory that is new or empty; it appears when it is complete.

    Returns:
        False where ``destination`` is complete already and nothing was done.

    Raises:
        UserError: no GGUF file, the ``gguf`` package missing, an architecture that cannot be imported, or
            ``destination`` taken.
    """
    file, destination = Path(file), Path(destination)
    if is_complete(destination):
        return False
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} holds something else; give a directory that is new or empty")
    _check_magic(file)
    try:
        import gguf  # noqa: F401 - transformers imports it late and by name
    except ImportError:
        raise UserError("reading GGUF needs the gguf package: pip install 'megatron-lengthgen[hf]'") from None
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"transformers cannot read {file}: {' '.join(str(error).split())[:300]}") from error
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.architectures = [type(loaded).__name__]
    megatron_args(config.to_dict())
    # A model that came from a GGUF file refuses save_pretrained: give its weights to a fresh one, without a copy.
    with torch.device("meta"):
        fresh = type(loaded)(config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    with atomic_directory(destination) as temporary:
        try:
            fresh.save_pretrained(temporary)
            tokenizer.save_pretrained(temporary)
        except OSError as error:
            raise UserError(f"{destination} could not be written: {error}") from error
    return True


def _check_magic(file: Path) -> None:
    try:
        with open(file, "rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    if magic != b"GGUF":
        raise UserError(f"{file} is no GGUF file: it begins with {magic!r} instead of b'GGUF'")
