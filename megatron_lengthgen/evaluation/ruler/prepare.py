"""Samples made by several processes, and made once: a cache on disk, named after everything that decides a sample."""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
import zlib
from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.prompt import PromptEncoder
from megatron_lengthgen.files import atomic_file
from megatron_lengthgen.orphans import end_with_parent

from .data import DATA_VERSION, Ruler, Sample
from .sources import Sources
from .tasks import Task

__all__ = ["PreparedRuler", "SampleCache"]

_FORMAT = 1


class SampleCache:
    """Samples on disk, one file each, whole or not there. Any number of processes may share a directory.

    Args:
        directory: where; made when the first sample is stored.
        identity: everything besides task, length and index that decides a sample.
    """

    def __init__(self, directory: str | os.PathLike[str], identity: Any) -> None:
        self.directory = Path(directory)
        self._identity = identity

    def path(self, task: Task, max_length: int, index: int) -> Path:
        """The file of a sample, whether it is there or not."""
        key = [_FORMAT, self._identity, asdict(task), max_length, index]
        name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        return self.directory / name[:2] / name

    def load(self, task: Task, max_length: int, index: int) -> Sample | None:
        """The stored sample; None where there is none, or its file is broken."""
        try:
            data = zlib.decompress(self.path(task, max_length, index).read_bytes())
            header, _, rest = data.partition(b"\n")
            fields = json.loads(header)
            digest, size = fields.pop("digest"), fields.pop("body_bytes")
            ids = array("i", rest[size:])
            body = rest[:size].decode("utf-8")
            fields |= {"outputs": tuple(fields["outputs"]), "depths": tuple(fields["depths"])}
            sample = Sample(**fields, body=body, prompt_ids=tuple(ids))
        except (OSError, zlib.error, ValueError, KeyError, TypeError):
            return None
        return sample if sample.digest == digest else None

    def store(self, task: Task, sample: Sample) -> None:
        """Keep a sample.

        Raises:
            UserError: when the directory cannot be written to.
        """
        fields = {
            name: getattr(sample, name)
            for name in ("task", "max_length", "index", "answer_prefix", "outputs", "reserve", "depths")
        }
        body = sample.body.encode("utf-8")
        header = json.dumps(fields | {"digest": sample.digest, "body_bytes": len(body)}).encode()
        data = zlib.compress(header + b"\n" + body + array("i", sample.prompt_ids).tobytes(), level=1)
        try:
            with atomic_file(self.path(task, sample.max_length, sample.index)) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            raise UserError(f"cannot write to --cache {self.directory}: {error.strerror or error}") from error


class PreparedRuler(Ruler):
    """:class:`.data.Ruler` with several processes and a cache; the samples are the same.

    Args:
        workers: processes that make samples; with 1 this process makes them.
        cache: directory that keeps samples for the next run, or None.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        sources: Sources,
        seed: int = 42,
        max_new_tokens: int | None = None,
        splice: bool = True,
        workers: int = 1,
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(encoder, sources, seed, max_new_tokens, splice)
        self.workers, self.cache_directory = workers, cache
        self._caches: dict[str, SampleCache] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._closing: Event | None = None

    def sample(self, task: Task, max_length: int, index: int) -> Sample:
        cache = self._cache(task)
        if cache is not None and (found := cache.load(task, max_length, index)) is not None:
            return found
        made = super().sample(task, max_length, index)
        if cache is not None:
            cache.store(task, made)
        return made

    def samples(self, task: Task, max_length: int, indices: Sequence[int]) -> list[Sample]:
        cache = self._cache(task)
        found: dict[int, Sample] = {}
        if cache is not None:
            found = {i: sample for i in indices if (sample := cache.load(task, max_length, i)) is not None}
        missing = [index for index in indices if index not in found]
        if self.workers == 1 or len(missing) < 2 * self.workers:
            found |= {index: self.sample(task, max_length, index) for index in missing}
        else:
            found |= zip(missing, self._in_pool(task, max_length, missing), strict=True)
        return [found[index] for index in indices]

    def close(self) -> None:
        """End the worker processes, each after the sample that it is at."""
        if self._pool is not None and self._closing is not None:
            self._closing.set()
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _in_pool(self, task: Task, max_length: int, indices: Sequence[int]) -> list[Sample]:
        if self._pool is None:
            # Spawned: a fork of a process with torch's or CUDA's threads may hang.
            context = multiprocessing.get_context("spawn")
            self._closing = context.Event()
            arguments = (self.encoder, self.sources, self.seed, self.max_new_tokens, self.splice, 1)
            self._pool = ProcessPoolExecutor(
                self.workers,
                mp_context=context,
                initializer=_start_worker,
                initargs=(self._closing, *arguments, self.cache_directory),
            )
        chunk = max(1, len(indices) // (4 * self.workers))
        calls = [(task, max_length, index) for index in indices]
        try:
            with _quiet_workers():
                made = self._pool.map(_make_sample, calls, chunksize=chunk)
            return list(made)
        except BrokenProcessPool as error:
            self._pool = None
            raise UserError(
                "a process that prepares samples died, most likely for lack of memory; use fewer --workers"
            ) from error

    def _cache(self, task: Task) -> SampleCache | None:
        if self.cache_directory is None:
            return None
        if task.name not in self._caches:
            identity = {
                "data_version": DATA_VERSION,
                "seed": self.seed,
                "reserve": self.max_new_tokens,
                "tokenizer": self.encoder.digest,
                "sources": self.sources.digests([task]),
            }
            self._caches[task.name] = SampleCache(self.cache_directory, identity)
        return self._caches[task.name]


_worker: PreparedRuler | None = None
_closing: Event | None = None


def _start_worker(closing: Event, *arguments: Any) -> None:
    global _worker, _closing
    end_with_parent()
    _worker, _closing = PreparedRuler(*arguments), closing


def _make_sample(call: tuple[Task, int, int]) -> Sample:
    assert _worker is not None and _closing is not None
    # Not a signal: a process that dies while it hands over a sample leaves the other end waiting for the rest of it.
    if _closing.is_set():
        raise CancelledError
    return _worker.sample(*call)


@contextlib.contextmanager
def _quiet_workers() -> Iterator[None]:
    """Processes started in the block use one thread of the tokenizer's own each, since there are enough of them, and
    leave Ctrl-C, which a terminal sends to all, to this one: they inherit that it is blocked. It waits for the end of
    the block, since a pool that is interrupted while it starts processes may never end."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    interrupted = threading.Event()
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    # The mask is one thread's, and any other may be given the signal. Only the main thread can be interrupted.
    main = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda *_: interrupted.set()) if main else None
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
        if main:
            signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    if interrupted.is_set():
        raise KeyboardInterrupt
