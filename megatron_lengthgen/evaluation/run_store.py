"""A run on disk: its settings and one durable line per finished sample.

Layout of a run directory::

    config.json                              settings; a later start must agree with them
    predictions/<task>/<length>.<part>.jsonl one line per finished sample; each data-parallel rank has its own part
    ruler/<length>/<task>.jsonl              all samples in the form that RULER's evaluator reads
    summary.json, summary.md, score_vs_length.png
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import atomic_file, write_json

__all__ = ["RunStore"]

_FORMAT = 1


class RunStore:
    """Records of a run, by task and length.

    Several processes may append at once, each to its own part; one of them, the owner, opens the store.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        self._lock: Any = None
        self._read: dict[Path, tuple[int, int]] = {}

    # -- opening ------------------------------------------------------------------------------------------------------

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        identity: Mapping[str, Any],
        scope: Mapping[str, Any],
        info: Mapping[str, Any],
    ) -> "RunStore":
        """Create a run, or continue the one in ``directory``; to be called by one process.

        Args:
            identity: what decides a sample's result. A continued run must have the same.
            scope: ``tasks``, ``lengths`` and ``samples``. A continued run may ask for more, not for less.
            info: anything else worth keeping: paths, versions, the command.

        Raises:
            UserError: when another process has the run open, when the directory holds something else, or when the
                settings disagree (both values are named).
        """
        store = cls(directory)
        store._acquire()
        try:
            if store.config_file.exists():
                store._check(identity, scope)
            elif leftover := [p.name for p in store.directory.iterdir() if not p.name.startswith(".")]:
                raise UserError(
                    f"--output {directory} holds {leftover[0]} but no config.json, so it is not a run; "
                    "use a new directory"
                )
            write_json(
                store.config_file,
                {"format": _FORMAT, "identity": dict(identity), "scope": dict(scope), "info": dict(info)},
            )
        except BaseException:
            store.close()
            raise
        return store

    @property
    def config_file(self) -> Path:
        return self.directory / "config.json"

    def config(self) -> dict[str, Any]:
        """The contents of ``config.json``.

        Raises:
            UserError: when there is none, or it is of another format.
        """
        try:
            value = json.loads(self.config_file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise UserError(f"{self.directory} is not a run: it has no config.json") from None
        except json.JSONDecodeError as error:
            raise UserError(f"{self.config_file} is not JSON: {error}") from error
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise UserError(f"{self.config_file} is not of run format {_FORMAT}")
        return value

    def close(self) -> None:
        """Let another process open the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _acquire(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.directory / ".lock", "w")  # noqa: SIM115 - held until close()
        except OSError as error:
            raise UserError(f"cannot write to --output {self.directory}: {error.strerror}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            raise UserError(
                f"another process is writing to {self.directory}; wait for it or use a new --output"
            ) from None

    def _check(self, identity: Mapping[str, Any], scope: Mapping[str, Any]) -> None:
        stored = self.config()
        for key in sorted({*stored["identity"], *identity}):
            old, new = stored["identity"].get(key), identity.get(key)
            # A run without essay tasks has no essays; adding such a task gives it some.
            if old != new and not (key == "essays" and old is None):
                raise UserError(
                    f"the run in {self.directory} has {key} = {old!r}, this start has {new!r}: "
                    "repeat the settings, or use a new --output"
                )
        old_scope = stored["scope"]
        for key in ("tasks", "lengths"):
            if missing := [value for value in old_scope[key] if value not in scope[key]]:
                raise UserError(
                    f"the run in {self.directory} has {key} {old_scope[key]}, this start has {list(scope[key])}, "
                    f"without {missing[0]}: ask for the same or more, or use a new --output"
                )
        if scope["samples"] < old_scope["samples"]:
            raise UserError(
                f"the run in {self.directory} has samples = {old_scope['samples']}, this start has {scope['samples']}: "
                "ask for the same or more, or use a new --output"
            )

    # -- records ------------------------------------------------------------------------------------------------------

    def _folder(self, task: str) -> Path:
        return self.directory / "predictions" / task

    def _parts(self, task: str, length: int) -> list[Path]:
        return sorted(self._folder(task).glob(f"{length}.*.jsonl"))

    def records(self, task: str, length: int) -> dict[int, dict[str, Any]]:
        """Finished samples by index; broken lines are left out."""
        found: dict[int, dict[str, Any]] = {}
        for part in self._parts(task, length):
            for record in _read_lines(part)[0]:
                found.setdefault(record["index"], record)
        return found

    def lines(self, task: str, length: int) -> int:
        """Lines written so far, over all parts; reads only what is new since the last call."""
        for part in self._parts(task, length):
            offset, count = self._read.get(part, (0, 0))
            with open(part, "rb") as file:
                file.seek(offset)
                new = file.read()
            self._read[part] = (offset + len(new), count + new.count(b"\n"))
        return sum(count for part, (_, count) in self._read.items() if part in self._parts(task, length))

    def repair(self) -> int:
        """Cut broken lines (a process was killed while writing) out of all parts; their samples run again.

        Returns:
            The number of lines dropped.
        """
        dropped = 0
        for part in sorted((self.directory / "predictions").glob("*/*.jsonl")):
            records, broken, complete = _read_lines(part)
            if broken or not complete:
                _write_lines(part, records)
            dropped += broken
        return dropped

    @contextlib.contextmanager
    def appending(self, task: str, length: int, part: int) -> Iterator["Appender"]:
        """Append to one part. Every line is on disk when :meth:`Appender.write` returns."""
        self._folder(task).mkdir(parents=True, exist_ok=True)
        with open(self._folder(task) / f"{length}.{part}.jsonl", "a", encoding="utf-8") as file:
            yield Appender(file)

    def write_ruler_files(self, cells: Sequence[tuple[str, int]]) -> None:
        """Write ``ruler/<length>/<task>.jsonl``, sorted by index, with the fields that RULER's evaluator asks for."""
        for task, length in cells:
            records = self.records(task, length)
            lines = [
                {"input": "", **records[index], "others": {"id": index}, "truncation": -1} for index in sorted(records)
            ]
            if lines:
                (self.directory / "ruler" / str(length)).mkdir(parents=True, exist_ok=True)
                _write_lines(self.directory / "ruler" / str(length) / f"{task}.jsonl", lines)


class Appender:
    """Writes one record per line."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _read_lines(path: Path) -> tuple[list[dict[str, Any]], int, bool]:
    """Records, number of broken lines, and whether the file ends with a newline."""
    records, broken = [], 0
    # Bytes: a cut may fall inside a character.
    data = path.read_bytes()
    for line in data.split(b"\n"):
        if not line:
            continue
        try:
            record = json.loads(line)
            if not isinstance(record["index"], int) or not isinstance(record["score"], int | float):
                raise TypeError
        except (ValueError, KeyError, TypeError):
            broken += 1
        else:
            records.append(record)
    return records, broken, not data or data.endswith(b"\n")


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with atomic_file(path) as temporary, open(temporary, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
