"""Where documents come from: text files, JSON Lines and `datasets` inputs, read as a bounded stream.

Reading is split in two so that processes can share it. :func:`units` does what needs the file (read, decompress, hash,
number the lines) and yields raw work units of about ``UNIT_BYTES``; :func:`parse` does what costs time (decode, JSON,
check) on one unit, anywhere. :func:`documents` is the two in a row.
"""

import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron_lengthgen.errors import UserError

__all__ = ["BadRecord", "Document", "FileRecord", "Raw", "Source", "Unit", "documents", "parse", "units"]

UNIT_BYTES = 1 << 19
# A document is tokenized in one piece, which was seen to take 100 bytes of memory for each of its bytes.
MAX_DOCUMENT_BYTES = 1 << 26
_ROWS = 64
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class FileRecord:
    """A file as it was read: size in bytes, modification time in ns, SHA-256 of its (compressed) bytes."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str


@dataclass
class Source:
    """One input: a text file (one document), a JSON Lines file, or the rows of a dataset.

    ``rows`` is an open ``datasets.Dataset`` for kind ``dataset``; ``identity`` names a dataset that has no local files.
    :func:`units` fills ``read`` with the files as they were when read.
    """

    location: str
    kind: Literal["text", "jsonl", "dataset"]
    files: tuple[Path, ...] = ()
    rows: Any = None
    identity: str = ""
    read: list[FileRecord] = field(default_factory=list)

    def size(self) -> int:
        """Bytes to read, for progress."""
        return sum(path.stat().st_size for path in self.files) or int(getattr(self.rows, "dataset_size", None) or 1)


@dataclass(frozen=True, slots=True)
class Raw:
    """A record before decoding. ``line`` counts lines, or rows of a dataset, from 1; 0 is a whole file.

    ``value`` is None where the record is larger than ``MAX_DOCUMENT_BYTES``.
    """

    line: int
    value: Any
    oversized: bool = False


@dataclass(frozen=True, slots=True)
class Unit:
    """A work unit: consecutive records of one source, about ``UNIT_BYTES``. ``weight`` is its share of ``size()``."""

    source: int
    location: str
    kind: str
    records: tuple[Raw, ...]
    weight: int


@dataclass(frozen=True, slots=True)
class Document:
    """Text of one document and where it stood."""

    location: str
    line: int
    text: str


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that gives no document: its file, line (0: the whole file), kind and a sentence for people.

    Kinds: ``not_utf8``, ``broken_json``, ``not_an_object``, ``missing_key``, ``not_a_string``, ``lone_surrogate``,
    ``too_large``, ``empty``, ``not_tokenized``, and ``blank_line``, which JSON Lines readers pass over and which is
    harmless.
    """

    location: str
    line: int
    kind: str
    detail: str

    @property
    def harmless(self) -> bool:
        return self.kind == "blank_line"

    def __str__(self) -> str:
        where = f"{self.location}:{self.line}" if self.line else self.location
        return f"{where}: {self.kind}: {self.detail}"


class _Hashing(io.RawIOBase):
    """A raw file that hashes and counts what is read from it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256, self.count = file, hashlib.sha256(), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self.file.readinto(buffer)  # type: ignore[attr-defined]
        self.sha256.update(memoryview(buffer)[:size])
        self.count += size
        return size


def documents(sources: Iterable[Source], text_key: str = "text") -> Iterator[Document | BadRecord]:
    """The documents of ``sources`` in input order, and in their places the records that give none.

    Raises:
        UserError: a file cannot be read, or its gzip stream is damaged.
    """
    for unit in units(list(sources), text_key):
        yield from parse(unit, text_key)


def units(sources: list[Source], text_key: str) -> Iterator[Unit]:
    """Raw work units of ``sources``, in input order, in bounded memory."""
    for number, source in enumerate(sources):
        source.read.clear()
        if source.kind == "dataset":
            yield from _dataset_units(number, source, text_key)
        else:
            yield from _file_units(number, source)


def _dataset_units(number: int, source: Source, text_key: str) -> Iterator[Unit]:
    for path in source.files:
        with open(path, "rb", buffering=0) as file:
            hashing = _Hashing(file)
            _drain(io.BufferedReader(hashing, UNIT_BYTES))
            source.read.append(_file_record(path, file, hashing))
    total, rows = source.size(), max(len(source.rows), 1)
    line = 0
    for batch in source.rows.select_columns([text_key]).iter(batch_size=_ROWS):
        values = batch[text_key]
        records = tuple(Raw(line + 1 + i, value) for i, value in enumerate(values))
        weight = total * (line + len(values)) // rows - total * line // rows
        line += len(values)
        yield Unit(number, source.location, source.kind, records, weight)


def _file_units(number: int, source: Source) -> Iterator[Unit]:
    (path,) = source.files
    line, seen, records, size = 0, 0, [], 0
    try:
        with open(path, "rb", buffering=0) as file:
            hashing = _Hashing(file)
            stream: BinaryIO = io.BufferedReader(hashing, UNIT_BYTES)
            if path.suffix.lower() == ".gz":
                stream = gzip.GzipFile(fileobj=stream)  # type: ignore[assignment]
            for raw in _whole(stream) if source.kind == "text" else _lines(stream):
                line = raw.line
                records.append(raw)
                # The constant keeps blank and very short lines from making units of unbounded length.
                size += len(raw.value or b"") + 64
                if size >= UNIT_BYTES:
                    yield Unit(number, source.location, source.kind, tuple(records), hashing.count - seen)
                    seen, records, size = hashing.count, [], 0
            _drain(stream)
            source.read.append(_file_record(path, file, hashing))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{path} is a damaged gzip file after line {line} ({error}); fetch or compress it again."
        ) from error
    except OSError as error:
        raise UserError(f"cannot read {path} after line {line}: {error.strerror or error}.") from error
    if records or hashing.count > seen:
        yield Unit(number, source.location, source.kind, tuple(records), hashing.count - seen)


def _drain(stream: BinaryIO) -> None:
    while stream.read(UNIT_BYTES):
        pass


def _file_record(path: Path, file: Any, hashing: _Hashing) -> FileRecord:
    mtime_ns = os.fstat(file.fileno()).st_mtime_ns
    return FileRecord(str(path.absolute()), hashing.count, mtime_ns, hashing.sha256.hexdigest())


def _whole(stream: BinaryIO) -> Iterator[Raw]:
    value = stream.read(MAX_DOCUMENT_BYTES + 1)
    yield Raw(0, None, True) if len(value) > MAX_DOCUMENT_BYTES else Raw(0, value.removeprefix(_BOM))


def _lines(stream: BinaryIO) -> Iterator[Raw]:
    line = 0
    while value := stream.readline(MAX_DOCUMENT_BYTES + 1):
        line += 1
        if len(value) <= MAX_DOCUMENT_BYTES:
            yield Raw(line, value.removeprefix(_BOM) if line == 1 else value)
            continue
        while value and not value.endswith(b"\n"):
            value = stream.readline(UNIT_BYTES)
        yield Raw(line, None, True)


def parse(unit: Unit, text_key: str = "text") -> Iterator[Document | BadRecord]:
    """One :class:`Document` or :class:`BadRecord` for each record of ``unit``, in order. Pure."""
    for raw in unit.records:
        result = _oversized if raw.oversized else _parse(unit.kind, raw.value, text_key)
        if isinstance(result, str):
            yield Document(unit.location, raw.line, result)
        else:
            yield BadRecord(unit.location, raw.line, *result)


_oversized = ("too_large", f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB; a document is kept whole, so cut it up first")


def _parse(kind: str, value: Any, text_key: str) -> str | tuple[str, str]:
    """The text of a record, or the kind and detail of what is wrong with it."""
    if kind != "dataset":
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError as error:
            return "not_utf8", _not_utf8(error, count_lines=kind == "text")
    if kind == "jsonl":
        value = value.rstrip("\r\n")
        if not value.strip():
            return "blank_line", "no record"
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            return "broken_json", f"{error.msg} at column {error.colno}: {_excerpt(value, error.pos)}"
        except (ValueError, RecursionError) as error:
            return "broken_json", str(error)
        if not isinstance(value, dict):
            return "not_an_object", f"{_json_type(value)} where an object with {text_key!r} is expected"
        if text_key not in value:
            return "missing_key", f"no {text_key!r} among the keys {', '.join(map(repr, list(value)[:8])) or '(none)'}"
        value = value[text_key]
    if not isinstance(value, str):
        return "not_a_string", f"{text_key!r} is {_json_type(value)}, not a string"
    if not value.strip():
        return "empty", "no text but white space" if value else "no text"
    try:
        encoded = value.encode("utf-8")
    except UnicodeEncodeError as error:
        return "lone_surrogate", f"half a surrogate pair (U+{ord(value[error.start]):04X}) at character {error.start}"
    return _oversized if len(encoded) > MAX_DOCUMENT_BYTES else value


def _not_utf8(error: UnicodeDecodeError, *, count_lines: bool) -> str:
    raw: bytes = error.object
    if raw.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "not UTF-8 but, by its byte order mark, UTF-16"
    line = f" on line {raw.count(b'\n', 0, error.start) + 1}" if count_lines else ""
    return f"byte 0x{raw[error.start]:02x} at offset {error.start}{line} is not UTF-8 ({error.reason})"


def _json_type(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else type(value).__name__)


def _excerpt(text: str, position: int) -> str:
    start = max(position - 20, 0)
    return repr(text[start : position + 20])
