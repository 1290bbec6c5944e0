"""HELMET's archive, read where it lies.

The data directory is the ``data`` folder that HELMET's ``scripts/download_data.sh`` unpacks (``kilt/``, ``ruler/`` and
others). The demonstrations of ALCE and the prompts of the judge are not in the archive but in HELMET's repository.
"""

import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.lengths import length_name

from .datasets import DATASETS, LENGTHS, Dataset

__all__ = ["Archive", "JsonLines", "Row", "check_fields", "present", "read_json_rows"]

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Archive:
    """Where the files are.

    Args:
        data: the data directory; None where nothing is asked for that is in it.
        repository: a clone of princeton-nlp/HELMET.
    """

    data: Path | None
    repository: Path | None

    @classmethod
    def at(cls, data: str | None, repository: str | None) -> "Archive":
        """From the options of a command line; the clone is taken to be the folder that the data directory lies in.

        Raises:
            UserError: when one of them is not a directory.
        """
        for option, value in (("--data", data), ("--helmet", repository)):
            if value is not None and not Path(value).is_dir():
                raise UserError(f"{option} {value} is not a directory")
        found = None if data is None else Path(data)
        return cls(found, Path(repository) if repository else None if found is None else found.resolve().parent)

    def file(self, name: str) -> Path:
        """A file of the data directory.

        Raises:
            UserError: when there is no such directory.
        """
        if self.data is None:
            raise UserError(f"{name} is needed: give --data, the folder that HELMET's data.tar.gz unpacks to")
        return self.data / name

    def from_repository(self, name: str) -> Path:
        """A file of HELMET's repository.

        Raises:
            UserError: when it is not there.
        """
        path = None if self.repository is None else self.repository / name
        if path is None or not path.is_file():
            where = "" if path is None else f"; it is expected at {path}"
            raise UserError(f"{name} of HELMET's repository is needed: give --helmet, a clone of it{where}")
        return path

    def lacking(self, dataset: Dataset, lengths: Sequence[int]) -> str | None:
        """What the first file is that a data set needs and that is not there, in words; None when all are."""
        wanted = [(dataset.file_at(length), length) for length in lengths if dataset.file]
        if dataset.demo_file and dataset.category != "cite":
            wanted.append((dataset.demo_file, 0))
        for name, length in wanted:
            path = self.file(name)
            if not path.is_file():
                at = f" at {length_name(length)}" if length else ""
                makes = "; tools/eval_longctx.py helmet-extend makes it" if length > LENGTHS[-1] else _instead(path)
                return f"{path} is missing, which {dataset.name}{at} needs{makes}"
        if dataset.category == "cite":
            try:
                self.from_repository(dataset.demo_file)
            except UserError as error:
                return str(error)
        return None


def _instead(path: Path) -> str:
    known = {Path(d.file_at(length)).name for d in DATASETS.values() if d.file for length in LENGTHS}
    known |= {Path(d.demo_file).name for d in DATASETS.values()}
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    names = sorted(p.name for p in beside if p.is_file() and p.name not in known)
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.85)
    return f" (beside it lies {near[0]}: was it renamed?)" if near else ""


def present(
    archive: Archive, datasets: Sequence[Dataset], lengths: Sequence[int], skip_missing: bool
) -> tuple[list[Dataset], list[str]]:
    """The data sets whose files are there, and a line for each other.

    Raises:
        UserError: when a file is missing and ``skip_missing`` is off, or nothing is left.
    """
    lacking = {d.name: why for d in datasets if (why := archive.lacking(d, lengths))}
    kept = [dataset for dataset in datasets if dataset.name not in lacking]
    if lacking and not (skip_missing and kept):
        why = next(iter(lacking.values()))
        more = f", and {len(lacking) - 1} other data set(s) lack files too" if len(lacking) > 1 else ""
        whole = dict.fromkeys(
            d.category for d in datasets if all(k in kept for k in datasets if k.category == d.category)
        )
        rest = [d.name for d in kept if d.category not in whole]
        can = f"; what can run: --tasks {','.join([*whole, *rest])}, which --skip-missing does" if kept else ""
        raise UserError(f"{why}{more}{can}")
    return kept, [f"{name}: {why}" for name, why in lacking.items()]


class JsonLines:
    """A file of JSON lines, of which one row is in memory at a time: a file of HELMET's may have gigabytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._starts: list[int] = []

    def scan[T](self, fields: Sequence[str], look: Callable[[Row], T]) -> list[T]:
        """``look`` at every row, once.

        Raises:
            UserError: when the file cannot be read, a line is not a JSON object, or a row lacks one of ``fields``.
        """
        self._starts, found = [], []
        try:
            with open(self.path, "rb") as file:
                start = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        row = _parse(self.path, number, line)
                        check_fields(f"{self.path}, line {number}", row, fields)
                        self._starts.append(start)
                        found.append(look(row))
                    start += len(line)
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from error
        if not found:
            raise UserError(f"{self.path} holds no rows")
        return found

    def __getitem__(self, at: int) -> Row:
        with open(self.path, "rb") as file:
            file.seek(self._starts[at])
            return json.loads(file.readline())


def _parse(path: Path, number: int, line: bytes) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number} is not JSON ({error}); unpack the archive again") from error
    if not isinstance(row, dict):
        raise UserError(f"{path}, line {number} is not a JSON object; unpack the archive again")
    return row


def check_fields(where: str, row: Row, fields: Sequence[str]) -> None:
    """Raise :class:`UserError` for the first of ``fields`` that ``row`` lacks; ``a|b`` asks for either."""
    for field in fields:
        if not any(name in row for name in field.split("|")):
            raise UserError(
                f"{where}: no field {field.replace('|', ' or ')} among {', '.join(sorted(map(str, row)))}; "
                "is this another version of the data?"
            )


def read_json_rows(path: Path, fields: Sequence[str]) -> list[Row]:
    """All rows of a JSON array, of an object whose ``data`` is one, or of JSON lines.

    Raises:
        UserError: as :meth:`JsonLines.scan`.
    """
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from error
    except ValueError:
        return JsonLines(path).scan(fields, lambda row: row)
    rows = value.get("data", [value]) if isinstance(value, dict) else value
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise UserError(f"{path} is not a list of JSON objects")
    for number, row in enumerate(rows):
        check_fields(f"{path}, entry {number}", row, fields)
    return rows
