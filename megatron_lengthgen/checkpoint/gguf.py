"""GGUF file -> Hugging Face directory, by transformers' own dequantisation."""

import os
from pathlib import Path
from typing import Any

from megatron_lengthgen.checkpoint.common import make_readable
from megatron_lengthgen.checkpoint.huggingface import some
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import atomic_directory
from megatron_lengthgen.models import llama

__all__ = ["gguf_to_hugging_face", "is_complete"]

# llama.cpp's names: gguf-py/gguf/constants.py, MODEL_TENSORS of LLAMA.
_LAYER = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_ROPE_FREQUENCIES = "rope_freqs.weight"


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
        UserError: no GGUF file or a damaged one, the ``gguf`` package missing, an architecture that cannot be imported,
            tensors that are missing or have no place in it, a RoPE that transformers' reader does not carry over, or
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

    _check_contents(file)
    config, tokenizer, model = _read(file)
    with atomic_directory(destination) as temporary:
        try:
            model.save_pretrained(temporary)
            # The tokenizer of a GGUF file may name other special tokens than the model's own metadata beside it.
            for name in ("bos", "eos", "pad", "unk"):
                token = getattr(config, f"{name}_token_id", None)
                if token is not None:
                    setattr(tokenizer, f"{name}_token", tokenizer.convert_ids_to_tokens(token))
            tokenizer.save_pretrained(temporary)
            for written in temporary.iterdir():
                make_readable(written)
        except Exception as error:
            raise UserError(f"{destination} could not be written: {error}") from error
    return True


def _read(file: Path) -> tuple[Any, Any, Any]:
    """Configuration, tokenizer and a model that can be saved.

    Each of the three parses the file's metadata once more, which is what takes the time; the Auto classes would do it
    oftener.
    """
    import torch
    from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    where: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        config = AutoConfig.from_pretrained(**where)
        if config.model_type != "llama":
            raise UserError(f"{file} holds a {config.model_type} model; supported: {llama.ARCHITECTURE}")
        config.architectures = [llama.ARCHITECTURE]
        llama.megatron_args(config.to_dict())
        tokenizer = PreTrainedTokenizerFast.from_pretrained(**where)
        loaded = LlamaForCausalLM.from_pretrained(**where, config=config, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError, KeyError, IndexError) as error:
        raise UserError(f"transformers cannot read {file}: {' '.join(str(error).split())[:300]}") from error
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # A model that came from a GGUF file refuses save_pretrained: give its weights to a fresh one, without a copy.
    with torch.device("meta"):
        fresh = LlamaForCausalLM(config)
    fresh.load_state_dict(loaded.state_dict(), assign=True)
    fresh.tie_weights()
    fresh.generation_config = loaded.generation_config
    return config, tokenizer, fresh


def _check_magic(file: Path) -> None:
    try:
        with open(file, "rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    if magic != b"GGUF":
        raise UserError(f"{file} is no GGUF file: it begins with {magic!r} instead of b'GGUF'")


def _check_contents(file: Path) -> None:
    """Refuse what transformers' reader passes over: missing tensors become random numbers, unknown ones are dropped."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(file)
        values = {name: reader.fields[name].contents() for name in reader.fields if not name.startswith("tokenizer.")}
        found = {tensor.name for tensor in reader.tensors}
    except Exception as error:  # numpy, struct and the reader itself each fail in their own way on a damaged file
        raise UserError(f"{file} is damaged ({' '.join(str(error).split())[:200]}); download it again") from error
    if values.get("general.architecture") != "llama":
        return  # _read names the architecture
    if experts := values.get("llama.expert_count"):
        raise UserError(f"{file} holds a model of {experts} experts a layer; only dense ones can be converted")
    scaling = values.get("llama.rope.scaling.type", "none")
    factor = values.get("llama.rope.scaling.factor", values.get("llama.rope.scale_linear", 1.0))
    if scaling != "none" or factor not in (0.0, 1.0) or _ROPE_FREQUENCIES in found:
        which = (
            f"in {_ROPE_FREQUENCIES}, as Llama 3.1 does" if _ROPE_FREQUENCIES in found else f"({scaling}, {factor:g})"
        )
        raise UserError(
            f"{file} scales RoPE {which}, which would be lost: convert the model's Hugging Face files instead, with "
            "the import command"
        )
    layers = int(values.get("llama.block_count", 0))
    wanted = {"token_embd.weight", "output_norm.weight"}
    wanted |= {f"blk.{layer}.{name}.weight" for layer in range(layers) for name in _LAYER}
    if missing := sorted(wanted - found):
        raise UserError(f"{file} lacks {some(missing)}, which its {layers} layers need: download it again")
    if unknown := sorted(found - wanted - {"output.weight"}):
        raise UserError(f"{file} has {some(unknown)}, which have no place in {llama.ARCHITECTURE} without biases")
