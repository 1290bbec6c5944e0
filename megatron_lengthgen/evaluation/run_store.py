"""A run on disk: its settings and one durable line per finished sample.

Layout of a run directory::

    config.json                              settings; a later start must agree with them
    predictions/<task>/<length>.<part>.jsonl one line per finished sample; each process that records has its own part
    ruler/<length>/<task>.jsonl              all samples in the form that RULER's evaluator reads
    summary.json, summary.md, *.png          the report
    .lock, .lock.<shard>                     held while a run is opened or reported on, and while a shard is written
"""

import contextlib
import errno
import fcntl
import json
import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import IO, Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import atomic_file, write_json

from .shard import Shard

__all__ = ["RunStore", "expected_samples"]

_FORMAT = 1
#: What ``config.json`` must have.
_CONFIG = {"identity": (), "scope": ("tasks", "lengths", "samples"), "info": ()}
#: Fields without which a line is no record, and their types.
_RECORD: Mapping[str, type | UnionType] = {
    "index": int,
    "score": int | float,
    "pred": str,
    "finish": str,
    "seconds": int | float,
    "prompt_tokens": int,
    "generated_tokens": int,
}
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def expected_samples(scope: Mapping[str, Any], task: str, length: int) -> int:
    """How many samples a run's ``scope`` asks for of a task at a length."""
    return scope.get("sizes", {}).get(task, {}).get(str(length), scope["samples"])


class RunStore:
    """Records of a run, by task and length.

    Several processes may append at once, each to its own part. The processes of one launch follow one of them, which
    opens the store; launches that are shards of one run each open it, and are kept apart by their names.

    Args:
        directory: the run.
        shard: the part of the run whose samples are appended here.
    """

    def __init__(self, directory: str | os.PathLike[str], shard: Shard | None = None) -> None:
        self.directory = Path(directory)
        self.shard = shard or Shard()
        self._lock: IO[str] | None = None
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
        shard: Shard | None = None,
        grows: Collection[str] = (),
    ) -> "RunStore":
        """Create a run, or continue the one in ``directory``; to be called by one process of a launch.

        Args:
            identity: what decides a sample's result. A continued run must have the same.
            scope: ``tasks``, ``lengths`` and ``samples``. A continued run may ask for more, not for less. Where tasks
                have another number of samples, ``sizes`` has it by task and length (as text, since it is JSON).
            info: anything else worth keeping: paths, versions, the command.
            shard: the part of the run that this launch fills; None for all of it.
            grows: keys of ``identity`` that may become something where they were None, such as a text that only tasks
                need which the run did not have before.

        Raises:
            UserError: when another process has the run or this shard open, when the directory holds something else, or
                when the settings disagree (both values are named).
        """
        store = cls(directory, shard)
        with store.alone():
            store._acquire()
            try:
                if store.config_file.exists():
                    store._check(identity, scope, grows)
                elif leftover := [p.name for p in store.directory.iterdir() if not p.name.startswith(".")]:
                    raise UserError(
                        f"--output {directory} holds {leftover[0]} but no config.json, so it is not a run; "
                        "use a new directory"
                    )
                with store.writing():
                    write_json(
                        store.config_file,
                        {"format": _FORMAT, "identity": dict(identity), "scope": dict(scope), "info": dict(info)},
                    )
                    _sync(store.directory)
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
        except (FileNotFoundError, NotADirectoryError):
            raise UserError(f"{self.directory} is not a run: it has no config.json") from None
        except OSError as error:
            raise UserError(f"cannot read {self.config_file}: {error.strerror or error}") from error
        except ValueError as error:
            raise UserError(f"{self.config_file} is not JSON: {error}") from error
        if not isinstance(value, dict) or value.get("format") != _FORMAT:
            raise UserError(f"{self.config_file} is not of run format {_FORMAT}")
        for key, wanted in _CONFIG.items():
            part = value.get(key)
            if not isinstance(part, dict) or any(name not in part for name in wanted):
                raise UserError(
                    f"{self.config_file} lacks {key}{f' ({", ".join(wanted)})' if wanted else ''}: put the file back, "
                    "or use a new --output"
                )
        return value

    def close(self) -> None:
        """Let another process open the run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While the block runs no other process opens the run or is in such a block; waits for one that is.

        Raises:
            UserError: when the directory cannot be written to.
        """
        with self._lock_file(".lock") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                warnings.warn(
                    f"the file system of {self.directory} has no locks: start nothing twice on this run", stacklevel=3
                )
            yield

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Turns what goes wrong in writing to the run into a :class:`UserError`."""
        try:
            yield
        except OSError as error:
            raise UserError(
                f"cannot write to {self.directory}: {error.strerror or error}; finished samples are kept, "
                "so mend that and start the same command again"
            ) from error

    def _lock_file(self, name: str) -> IO[str]:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            return open(self.directory / name, "a")
        except OSError as error:
            raise UserError(f"cannot write to {self.directory}: {error.strerror}") from error

    def _acquire(self) -> None:
        """Take this shard's lock for as long as the store is open, unless others are at work that it would disturb."""
        own = f".lock.{self.shard.label}"
        for path in sorted(self.directory.glob(".lock.*")):
            other = Shard.of_label(path.name.removeprefix(".lock."))
            if path.name != own and other.count != self.shard.count:
                with self._lock_file(path.name) as file:
                    if not _try_lock(file):
                        raise UserError(self._busy(other))
        self._lock = self._lock_file(own)
        if not _try_lock(self._lock):
            self.close()
            raise UserError(self._busy(self.shard))

    def _busy(self, other: Shard) -> str:
        what = "to" if other.whole else f"shard {other} of"
        return f"another process is writing {what} {self.directory}; wait for it or use a new --output"

    def _check(self, identity: Mapping[str, Any], scope: Mapping[str, Any], grows: Collection[str]) -> None:
        stored = self.config()
        for key in sorted({*stored["identity"], *identity}):
            old, new = stored["identity"].get(key), identity.get(key)
            if old != new and not (key in grows and old is None):
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

    @property
    def _prefix(self) -> str:
        return "" if self.shard.whole else f"{self.shard.label}."

    def records(self, task: str, length: int) -> dict[int, dict[str, Any]]:
        """Finished samples by index, of all shards; broken lines are left out."""
        found: dict[int, dict[str, Any]] = {}
        for part in sorted(self._folder(task).glob(f"{length}.*.jsonl")):
            for record in _read_lines(part)[0]:
                found.setdefault(record["index"], record)
        return found

    def lines(self, task: str, length: int) -> int:
        """Lines written so far over all parts of this shard; reads only what is new since the last call."""
        total = 0
        for part in self._folder(task).glob(f"{length}.{self._prefix}*.jsonl"):
            offset, count = self._read.get(part, (0, 0))
            with open(part, "rb") as file:
                file.seek(offset)
                new = file.read()
            self._read[part] = (offset + len(new), count + new.count(b"\n"))
            total += self._read[part][1]
        return total

    def repair(self) -> int:
        """Cut broken lines out of this shard's parts; their samples run again.

        A process may have been killed while it wrote, or someone else have changed the file.

        Returns:
            The number of lines dropped.
        """
        dropped = 0
        for part in sorted((self.directory / "predictions").glob(f"*/*.{self._prefix}*jsonl")):
            records, broken, complete = _read_lines(part)
            if broken or not complete:
                with self.writing():
                    _write_lines(part, records)
            dropped += broken
        return dropped

    @contextlib.contextmanager
    def appending(self, task: str, length: int, rank: int) -> Iterator["Appender"]:
        """Append to the part of one process. Every line is on disk when :meth:`Appender.write` returns.

        Raises:
            UserError: when that cannot be.
        """
        folder = self._folder(task)
        with self.writing():
            folder.mkdir(parents=True, exist_ok=True)
        # Bytes: a line goes to the file in one piece, and not in pieces of a text buffer.
        with self.writing(), open(folder / f"{length}.{self._prefix}{rank}.jsonl", "ab") as file:
            for directory in (folder, folder.parent, folder.parent.parent):
                _sync(directory)
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

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def write(self, record: Mapping[str, Any]) -> None:
        self._file.write(_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())


def _try_lock(file: IO[str]) -> bool:
    # POSIX locks belong to a process, not to a descriptor: a forked worker that outlives a killed run holds nothing.
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN, *_NO_LOCKS):
            raise
        return error.errno in _NO_LOCKS
    return True


def _sync(directory: Path) -> None:
    """Make the names in a directory durable, as fsync makes a file's contents."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
            if not all(isinstance(record[name], kind) for name, kind in _RECORD.items()):
                raise TypeError
            if not 0 <= record["score"] <= 1:
                raise ValueError
        except (ValueError, KeyError, TypeError):
            broken += 1
        else:
            records.append(record)
    return records, broken, not data or data.endswith(b"\n")


def _write_lines(path: Path, records: Sequence[Mapping[str, Any]]) -> None:
    with atomic_file(path) as temporary, open(temporary, "wb") as file:
        file.writelines(map(_line, records))


def _line(record: Mapping[str, Any]) -> bytes:
    # Half a surrogate pair, which a server may answer, has no UTF-8; it is written as the escape that JSON has for it.
    return json.dumps(record, ensure_ascii=False).encode(errors="backslashreplace") + b"\n"
