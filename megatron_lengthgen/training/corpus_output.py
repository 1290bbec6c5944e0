"""How a dataset appears on disk: all of it or nothing, whatever stops the run.

A run holds a lock on ``.NAME.lock`` beside the output, builds ``.NAME.TOKEN.{bin,idx,report}.tmp`` there, writes the
report last and then renames .bin, .idx and report in this order. A staged report therefore says that the other two are
complete: the next start finishes the renames of a run that died among them, and deletes what any other dead run left.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

from megatron_lengthgen.errors import UserError

__all__ = ["Output", "Stage", "file_size", "is_disk_full", "locked"]


def is_disk_full(error: OSError) -> bool:
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def file_size(path: Path) -> int | None:
    """Size in bytes, or None where there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


class Output:
    """The three files of a prefix: ``PREFIX.bin``, ``PREFIX.idx`` and ``PREFIX.report.json``."""

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        prefix = os.fspath(prefix)
        if not os.path.basename(prefix):
            raise UserError(f"--output {prefix!r} must end in a name, to which .bin and .idx are added.")
        self.prefix = Path(prefix)
        self.bin, self.idx, self.report = (Path(prefix + end) for end in (".bin", ".idx", ".report.json"))

    @property
    def directory(self) -> Path:
        return self.prefix.parent

    def check(self) -> None:
        """Make the parent directory and see that files can be written there."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the output directory {self.directory}: {error.strerror}.") from error
        if not os.access(self.directory, os.W_OK | os.X_OK):
            raise UserError(f"no permission to write into {self.directory}; choose another --output.")
        for path in (self.bin, self.idx, self.report):
            if path.is_dir():
                raise UserError(f"{path} is a directory; choose another --output.")

    def free(self) -> int:
        return shutil.disk_usage(self.directory).free


class Stage:
    """The temporary files of one run."""

    def __init__(self, output: Output, token: str | None = None) -> None:
        self.output = output
        name = f".{output.prefix.name}.{token or uuid.uuid4().hex[:8]}"
        self.bin, self.idx, self.report = (output.directory / f"{name}.{end}.tmp" for end in ("bin", "idx", "report"))

    def publish(self) -> None:
        """Rename the staged files to their final names; may be called again after a death at any point."""
        for path in (self.bin, self.idx):
            if path.exists():
                _sync(path)
        if self.bin.exists():
            # An older output goes first, so that no moment shows an index beside another run's tokens.
            self.output.report.unlink(missing_ok=True)
            self.output.idx.unlink(missing_ok=True)
        for staged, final in (
            (self.bin, self.output.bin),
            (self.idx, self.output.idx),
            (self.report, self.output.report),
        ):
            if staged.exists():
                os.replace(staged, final)
        _sync(self.output.directory)

    def remove(self) -> None:
        for path in (self.bin, self.idx, self.report):
            path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def locked(output: Output) -> Iterator[list[str]]:
    """Hold the output's lock and tidy up after dead runs; yields what was found of them, in words.

    Raises:
        UserError: another run is writing the same output.
    """
    path = output.directory / f".{output.prefix.name}.lock"
    descriptor = _lock(path, output)
    try:
        yield _recover(output)
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path, output: Output) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise UserError(
                f"another run is writing {output.prefix}; wait for it or choose another --output."
            ) from error
        # The holder before may have unlinked the file between our open and our lock.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        os.close(descriptor)


def _recover(output: Output) -> list[str]:
    pattern = re.compile(rf"\.{{1,2}}{re.escape(output.prefix.name)}\.([0-9a-f]{{8}})\.(bin|idx|report)\.tmp(\..+)?")
    notes: list[str] = []
    found: dict[str, list[Path]] = {}
    for path in output.directory.iterdir():
        if match := pattern.fullmatch(path.name):
            found.setdefault(match[1], []).append(path)
    for token, paths in found.items():
        stage = Stage(output, token)
        if stage.report.exists():
            stage.publish()
            notes.append(f"finished writing {output.prefix}, which an earlier run had built but not yet renamed")
        else:
            notes.append(f"removed {len(paths)} temporary file(s) of an earlier run that did not finish")
        for path in paths:
            path.unlink(missing_ok=True)
    return notes
