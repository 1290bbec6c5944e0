"""Writing so that a reader sees the whole file or none of it."""

import contextlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["atomic_directory", "atomic_file", "write_json", "write_text"]


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}.tmp")


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; rename it to ``path`` when the block ends without an error."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_directory(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a new temporary directory beside ``path``; rename it to ``path`` when the block ends without an error.

    ``path`` must not exist yet, or be an empty directory.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary(path)
    temporary.mkdir()
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8, whole or not at all."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")
