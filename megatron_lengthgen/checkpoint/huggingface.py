"""A Hugging Face model directory, checked as a whole before anything is built, its tensors read one at a time."""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.models.entries import Entry

__all__ = ["INDEX", "SIDE_FILES", "SINGLE", "Source", "copy_side_files", "open_source", "some"]

# What a model needs beside its weights: configuration and tokenizer.
SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# Old Llama checkpoints carry this constant; it is computed, not learnt.
_COMPUTED = re.compile(r"\.rotary_emb\.inv_freq$")


@dataclass(frozen=True)
class Source:
    """An opened directory.

    Attributes:
        root: the directory.
        config: the content of ``config.json``.
        files: tensor name -> name of the safetensors file that holds it.
        headers: tensor name -> (safetensors dtype, shape).
    """

    root: Path
    config: dict[str, Any]
    files: dict[str, str]
    headers: dict[str, tuple[str, tuple[int, ...]]]

    def check(self, entries: Sequence[Entry], *, tied: bool) -> None:
        """Hold the tensors against the key map.

        Args:
            entries: the key map of the model that ``config`` describes; the input embedding is first.
            tied: whether input and output embeddings are one; a second copy is then accepted if it is equal.

        Raises:
            UserError: a tensor that is missing, unknown, of another shape, or of a dtype that is not handled.
        """
        wanted = {
            name: shape for entry in entries for name, shape in zip(entry.hugging_face, entry.shapes, strict=True)
        }
        where = f"in {self.root}"
        missing = [name for name in wanted if name not in self.headers]
        if missing:
            raise UserError(f"{some(missing)} missing {where}; config.json asks for it: download the model again")
        unknown = [name for name in self.headers if name not in wanted and not _COMPUTED.search(name)]
        if tied and "lm_head.weight" in unknown:
            unknown.remove("lm_head.weight")
            self._check_tied_copy(entries[0].hugging_face[0])
        if unknown:
            raise UserError(f"{some(unknown)} {where} has no place in {self.config['architectures'][0]}")
        for name, shape in wanted.items():
            dtype, found = self.headers[name]
            if found != shape:
                raise UserError(f"{name} {where} has shape {list(found)}, but config.json asks for {list(shape)}")
            if dtype not in _DTYPES:
                raise UserError(
                    f"{name} {where} has dtype {dtype}; import handles {', '.join(_DTYPES)}: "
                    "save the model in one of them"
                )

    def _check_tied_copy(self, embedding: str) -> None:
        if not torch.equal(self.tensor("lm_head.weight"), self.tensor(embedding)):
            raise UserError(
                f"config.json in {self.root} ties the embeddings, but lm_head.weight differs from {embedding}: set "
                "tie_word_embeddings to false to keep both"
            )

    def tensor(self, name: str) -> Tensor:
        """Read one tensor, in the dtype it is stored in."""
        with _open(self.root / self.files[name]) as shard:
            return shard.get_tensor(name)


def open_source(source: str | os.PathLike[str]) -> Source:
    """Open a local directory, or download a hub id's files and open those.

    Raises:
        UserError: nothing there, no ``config.json``, no safetensors, a shard that is missing or damaged, an index that
            does not agree with its shards.
    """
    root = _locate(source)
    config = _read_json(root / "config.json", "a Hugging Face model directory has one")
    index = root / INDEX
    if index.exists():
        weight_map = _read_json(index, "").get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index} has no weight_map; download it again")
        absent = sorted({file for file in weight_map.values() if not (root / file).is_file()})
        if absent:
            raise UserError(f"{INDEX} names {some(absent)}, which {root} does not hold: download the missing shard")
    elif (root / SINGLE).is_file():
        weight_map = None
    else:
        raise UserError(_no_safetensors(root))

    files: dict[str, str] = {}
    headers: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(set(weight_map.values())) if weight_map else [SINGLE]:
        with _open(root / file) as shard:
            for name in shard.keys():  # noqa: SIM118 - a safetensors file, not a dict
                if name in files:
                    raise UserError(f"{name} is stored twice in {root}: in {files[name]} and in {file}")
                piece = shard.get_slice(name)
                files[name], headers[name] = file, (piece.get_dtype(), tuple(piece.get_shape()))
    for name, file in (weight_map or {}).items():
        if files.get(name) != file:
            raise UserError(f"{INDEX} in {root} places {name} in {file}, which does not hold it: download both again")
    return Source(root, config, files, headers)


def copy_side_files(source: Path, destination: Path) -> list[str]:
    """Copy configuration and tokenizer files; returns the names of those that were there."""
    destination.mkdir(parents=True, exist_ok=True)
    names = [name for name in SIDE_FILES if (source / name).is_file()]
    for name in names:
        shutil.copyfile(source / name, destination / name)
    return names


def _locate(source: str | os.PathLike[str]) -> Path:
    text = os.fspath(source)
    path = Path(text)
    if path.is_dir():
        return path
    if path.exists():
        raise UserError(f"{path} is a file; give the Hugging Face directory (a GGUF file needs the gguf command first)")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", text):
        raise UserError(f"no directory {path}, and it is not a hub id such as HuggingFaceTB/SmolLM2-135M either")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(text, allow_patterns=["*.safetensors", INDEX, *SIDE_FILES]))
    except (OSError, ValueError, HfHubHTTPError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(
            f"no directory {text} here, and the hub did not give {text} ({reason}): check the name and the network, "
            "or give a local directory"
        ) from error


def _no_safetensors(root: Path) -> str:
    if any(root.glob("pytorch_model*.bin*")):
        return (
            f"{root} holds pytorch_model.bin only; convert it once with transformers: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors"
        )
    if any(root.glob("*.gguf")):
        return f"{root} holds a GGUF file only; turn it into a Hugging Face directory with the gguf command first"
    return f"{root} has neither {SINGLE} nor {INDEX}; give a directory with safetensors weights"


def _read_json(path: Path, why: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}; {why}") from None
    except (ValueError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds no JSON object; download it again")
    return value


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as shard:
            yield shard
    except SafetensorError as error:
        raise UserError(f"{path} is damaged or cut short ({error}): download it again") from error


def some(names: list[str]) -> str:
    """The first of several names, and how many more."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
