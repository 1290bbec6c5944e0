"""From what a user names on a command line to a list of sources."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training.corpus_sources import Source

__all__ = ["find_sources"]

_TEXT = (".txt", ".text")
_JSONL = (".jsonl", ".ndjson")
_TABLE = (".parquet", ".arrow")
_OTHER_COMPRESSION = (".zst", ".zstd", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z")


def find_sources(
    inputs: Sequence[str | os.PathLike[str]], *, split: str | None = None, text_key: str = "text"
) -> tuple[list[Source], list[str]]:
    """Sources in the order of ``inputs`` and, inside a directory, of the sorted relative paths.

    A file that ends in ``.jsonl``, ``.ndjson`` or ``.json`` (or these and ``.gz``) is JSON Lines, one that ends in
    ``.parquet`` or ``.arrow`` a dataset, any other a text file with one document. Of a directory the ``.txt``,
    ``.text``, ``.jsonl`` and ``.ndjson`` files (plain or ``.gz``) are taken, at any depth; ``.json`` files are not,
    because many are no JSON Lines. A directory that holds none of these but tables, or that ``save_to_disk`` wrote,
    and anything that is not a path, goes to `datasets`.

    Returns:
        The sources and the paths of files in directories that were not taken (hidden files are not mentioned).

    Raises:
        UserError: an input is missing, unreadable, of an unsupported kind, or holds nothing to read.
    """
    sources: list[Source] = []
    ignored: list[str] = []
    for name in [os.fspath(given) for given in inputs]:
        path = Path(name)
        if path.is_dir():
            taken, left = _directory(path)
            sources += taken
            ignored += left
        elif path.is_file():
            sources.append(_file(path))
        elif path.exists():
            raise UserError(f"{name} is neither a regular file nor a directory; write it to a file first.")
        elif _looks_like_path(name):
            raise UserError(f"no such file or directory: {name}.")
        else:
            sources.append(Source(name, "dataset"))
    if not sources:
        raise UserError("no input given; name text files, JSONL files, directories or a dataset.")
    for source in sources:
        for file in source.files:
            if not os.access(file, os.R_OK):
                raise UserError(f"no permission to read {file}.")
    tables = [source for source in sources if source.kind == "dataset"]
    if split is not None and not tables:
        raise UserError(f"--split {split} chooses a split of a dataset, and no input is one; leave it out.")
    for source in tables:
        source.rows = _open(source, split or "train", text_key)
        source.identity = str(getattr(source.rows, "_fingerprint", "")) if not source.files else ""
    return sources, ignored


def _looks_like_path(name: str) -> bool:
    suffixes = (*_TEXT, *_JSONL, *_TABLE, ".json", ".gz")
    return name.startswith((".", "/", "~")) or name.count("/") > 1 or name.lower().endswith(suffixes) or not name


def _kind(path: Path) -> str:
    """The suffix that decides, in lower case and without ``.gz``."""
    name = path.name.lower().removesuffix(".gz")
    return os.path.splitext(name)[1]


def _file(path: Path) -> Source:
    suffix = _kind(path)
    if suffix in _OTHER_COMPRESSION:
        raise UserError(f"{path} is compressed in a way that is not read here; decompress it, or use gzip.")
    if suffix in _TABLE:
        return Source(str(path), "dataset", (path,))
    return Source(str(path), "jsonl" if suffix in (*_JSONL, ".json") else "text", (path,))


def _directory(directory: Path) -> tuple[list[Source], list[str]]:
    files = _walk(directory)
    saved = {"state.json", "dataset_dict.json"} & {path.name for path in files if path.parent == directory}
    wanted = [] if saved else [path for path in files if _kind(path) in (*_TEXT, *_JSONL)]
    if wanted:
        taken = set(wanted)
        return [_file(path) for path in wanted], [str(path) for path in files if path not in taken]
    if saved or any(_kind(path) in _TABLE for path in files):
        return [Source(str(directory), "dataset", tuple(files))], []
    raise UserError(
        f"the directory {directory} holds no {', '.join((*_TEXT, *_JSONL, *_TABLE))} file; "
        "files with other names can be given one by one."
    )


def _walk(directory: Path) -> list[Path]:
    def fail(error: OSError) -> None:
        raise UserError(f"cannot list {error.filename}: {error.strerror}.")

    found: list[Path] = []
    for root, folders, names in os.walk(directory, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(root, name) for name in names if not name.startswith(".")]
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(directory).as_posix())


def _open(source: Source, split: str, text_key: str) -> Any:
    """An open `datasets` dataset; memory-mapped, so that opening costs no memory."""
    import datasets

    datasets.disable_progress_bars()
    path = Path(source.location)
    try:
        if path.is_file():
            rows = datasets.load_dataset(path.suffix[1:].lower(), data_files=str(path), split=split)
        elif source.files and any(file.name in ("state.json", "dataset_dict.json") for file in source.files):
            loaded = datasets.load_from_disk(str(path))
            if isinstance(loaded, dict):
                if split not in loaded:
                    raise ValueError(f"unknown split {split!r}, there are {', '.join(loaded)}")
                loaded = loaded[split]
            rows = loaded
        else:
            rows = datasets.load_dataset(source.location, split=split)
    except Exception as error:  # `datasets` raises whatever its readers, file systems and hub client raise
        what = (
            "could not be loaded as a dataset" if source.files else "is no file here and no dataset that can be loaded"
        )
        reason = " ".join(str(error.__cause__ or error).split())[:300].rstrip(".")
        raise UserError(f"{source.location} {what}: {reason} (--split chooses another split).") from error
    if text_key not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise UserError(f"{source.location} has no column {text_key!r}; choose one of {columns} with --text-key.")
    return rows
