"""Which checkpoint was it: a digest that changes with the weights and not with the place where they lie."""

import hashlib
from pathlib import Path

from megatron_lengthgen.errors import UserError

__all__ = ["fingerprint", "hugging_face_directory", "megatron_iteration"]

_WHOLE = 1 << 20
_PIECE = 1 << 16


def megatron_iteration(checkpoint: str) -> Path:
    """The directory of the newest iteration in a ``torch_dist`` checkpoint directory.

    Raises:
        UserError: when the directory, its tracker file or the checkpoint's metadata is missing.
    """
    root = Path(checkpoint)
    if not root.is_dir():
        raise UserError(f"--checkpoint {checkpoint} is not a directory")
    tracker = root / "latest_checkpointed_iteration.txt"
    if tracker.is_file():
        name = tracker.read_text(encoding="utf-8").strip()
        if name != "release" and not name.isdigit():
            raise UserError(f"{tracker} says {name!r}, which is neither an iteration nor 'release'")
        iteration = root / (name if name == "release" else f"iter_{int(name):07d}")
    else:
        iteration = root
    if not (iteration / "metadata.json").is_file():
        raise UserError(
            f"--checkpoint {checkpoint} is not a complete torch_dist checkpoint: "
            f"{iteration / 'metadata.json'} is missing"
        )
    return iteration


def hugging_face_directory(source: str) -> Path | None:
    """The local directory of a Hugging Face model, or None for a hub id.

    Raises:
        UserError: when a local path is not a model directory.
    """
    path = Path(source)
    if not path.exists():
        if path.is_absolute() or source.startswith(".") or source.count("/") != 1:
            raise UserError(f"--hf {source} does not exist; give a directory saved by save_pretrained or a hub id")
        return None
    if not (path / "config.json").is_file():
        raise UserError(f"--hf {source} holds no config.json; give a directory saved by save_pretrained")
    return path


def fingerprint(directory: Path) -> str:
    """SHA-256 over the files' names, sizes and contents; of a large file its start, middle and end."""
    digest = hashlib.sha256()
    for file in sorted(path for path in directory.rglob("*") if path.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(directory).as_posix()}\0{size}\0".encode())
        with open(file, "rb") as handle:
            if size <= _WHOLE:
                digest.update(handle.read())
                continue
            for start in (0, size // 2, size - _PIECE):
                handle.seek(start)
                digest.update(handle.read(_PIECE))
    return digest.hexdigest()
