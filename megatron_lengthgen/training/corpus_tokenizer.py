"""A Hugging Face fast tokenizer, made small enough to send to worker processes, and the encoding of units there."""

import collections
import hashlib
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training.corpus_sources import BadRecord, Document, Unit, parse

__all__ = ["EncodedUnit", "TokenizerSpec", "encode_units", "encoder", "load_tokenizer"]


@dataclass(frozen=True)
class TokenizerSpec:
    """All that a worker needs; picklable, and independent of `transformers` and torch, whose import is slow and large.

    ``json`` is the tokenizer of the `tokenizers` library, without truncation and padding. ``cardinality`` is the
    largest token id plus one. ``special_tokens`` says what the string of a special token inside a text becomes:
    ``text``, the tokens of its letters, or ``token``, the special token itself.
    """

    name: str
    json: str
    cardinality: int
    eod: int
    eod_token: str
    special_strings: tuple[str, ...]
    special_tokens: Literal["text", "token"] = "text"
    add_special_tokens: bool = False

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class EncodedUnit:
    """Token ids of a unit's documents, one after another; ``lengths`` counts those of each, its EOD included.

    ``special`` counts the documents that contain the string of a special token.
    """

    source: int
    weight: int
    ids: numpy.ndarray
    lengths: list[int]
    bad: list[BadRecord]
    special: int


def load_tokenizer(
    name: str | os.PathLike[str],
    *,
    eod_token: str | None = None,
    special_tokens: Literal["text", "token"] = "text",
    add_special_tokens: bool = False,
) -> TokenizerSpec:
    """Load the fast tokenizer of a local directory or hub id.

    Raises:
        UserError: it cannot be loaded, is not a fast one, or has no end-of-document token.
    """
    name = os.fspath(name)
    local = Path(name).exists()
    if not local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise UserError(f"no such tokenizer directory: {name}.")

    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local)
    except (
        Exception
    ) as error:  # transformers raises OSError, ValueError, KeyError and the tokenizers library's bare Exception
        reason = " ".join(str(error).split())[:300].rstrip(".")
        raise UserError(f"cannot load a tokenizer from {name}: {reason}.") from error
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(f"{name} has only a slow tokenizer; save a fast one (tokenizer.json) and name its directory.")
    vocabulary = tokenizer.get_vocab()
    eod = eod_token if eod_token is not None else tokenizer.eos_token
    if eod is None:
        raise UserError(f"the tokenizer {name} has no eos token; name the one that ends a document with --eod-token.")
    if eod not in vocabulary:
        near = ", ".join(map(str, tokenizer.all_special_tokens[:8])) or "none"
        raise UserError(f"{eod!r} is no token of {name}; its special tokens are {near} (choose with --eod-token).")
    backend = tokenizer.backend_tokenizer
    # Lengths and padding are the trainer's business; a document is kept whole.
    backend.no_truncation()
    backend.no_padding()
    return TokenizerSpec(
        name=name,
        json=backend.to_str(),
        cardinality=max(vocabulary.values()) + 1,
        eod=vocabulary[eod],
        eod_token=eod,
        special_strings=tuple(sorted(str(t) for t in backend.get_added_tokens_decoder().values() if t.special)),
        special_tokens=special_tokens,
        add_special_tokens=add_special_tokens,
    )


def encoder(spec: TokenizerSpec, dtype: type[numpy.number], text_key: str) -> Callable[[Unit], EncodedUnit]:
    """A function that parses and tokenizes a unit; ``dtype`` is that of the ids."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(spec.json)
    tokenizer.encode_special_tokens = spec.special_tokens == "text"
    prefix = os.path.commonprefix(spec.special_strings)  # noqa: RUF071 - characters are meant
    pattern = re.compile("|".join(map(re.escape, spec.special_strings)))

    def has_special(text: str) -> bool:
        # The prefix that all of them share, often "<|", is found far faster than any of several hundred strings.
        return bool(spec.special_strings) and prefix in text and pattern.search(text) is not None

    def token_ids(documents: list[Document], bad: list[BadRecord]) -> Iterator[tuple[Document, list[int]]]:
        try:
            texts = [document.text for document in documents]
            encodings = tokenizer.encode_batch_fast(texts, add_special_tokens=spec.add_special_tokens)
        except Exception as error:  # bare, for example a word that a vocabulary without unknown token lacks
            if len(documents) == 1:
                bad.append(_bad(documents[0], "not_tokenized", str(error)))
                return
            for document in documents:
                yield from token_ids([document], bad)
            return
        for document, encoding in zip(documents, encodings, strict=True):
            if ids := encoding.ids:
                yield document, ids
            else:
                bad.append(_bad(document, "empty", "the tokenizer makes no token of it"))

    def encode(unit: Unit) -> EncodedUnit:
        good: list[Document] = []
        bad: list[BadRecord] = []
        for record in parse(unit, text_key):
            if isinstance(record, Document):
                good.append(record)
            else:
                bad.append(record)
        pieces, lengths, special = [], [], 0
        for document, ids in token_ids(good, bad):
            # A post-processor that adds the eos itself must not make two of it.
            if not (spec.add_special_tokens and ids[-1] == spec.eod):
                ids.append(spec.eod)
            pieces.append(numpy.array(ids, dtype=dtype))
            lengths.append(len(ids))
            special += has_special(document.text)
        joined = numpy.concatenate(pieces) if pieces else numpy.empty(0, dtype)
        bad.sort(key=lambda record: record.line)
        return EncodedUnit(unit.source, unit.weight, joined, lengths, bad, special)

    return encode


def _bad(document: Document, kind: str, detail: str) -> BadRecord:
    return BadRecord(document.location, document.line, kind, detail)


_encode: Callable[[Unit], EncodedUnit]


def _start_worker(spec: TokenizerSpec, dtype: type[numpy.number], text_key: str) -> None:
    global _encode
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops the workers
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _encode = encoder(spec, dtype, text_key)


def _die_with_parent() -> None:
    # A worker holds both ends of its queue, so it would wait for ever for a parent that was killed.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode_in_worker(unit: Unit) -> EncodedUnit:
    return _encode(unit)


def encode_units(
    stream: Iterator[Unit], spec: TokenizerSpec, dtype: type[numpy.number], text_key: str, workers: int
) -> Generator[EncodedUnit, None, None]:
    """Encode ``stream`` in ``workers`` processes; results come in the order of ``stream``, a bounded number in flight.

    With one worker the caller's process does the work. The tokenizer's own threads are off: processes take their place.

    Raises:
        UserError: a worker process was killed.
    """
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        if workers == 1:
            yield from map(encoder(spec, dtype, text_key), stream)
        else:
            yield from _encode_in_processes(stream, spec, dtype, text_key, workers)
    finally:
        if before is None:
            os.environ.pop("TOKENIZERS_PARALLELISM", None)
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def _encode_in_processes(
    stream: Iterator[Unit], spec: TokenizerSpec, dtype: type[numpy.number], text_key: str, workers: int
) -> Generator[EncodedUnit, None, None]:
    # spawn: a fork would copy torch's and the progress bar's threads in an unknown state.
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=_start_worker, initargs=(spec, dtype, text_key)
    )
    pending: collections.deque[tuple[Unit, Future[EncodedUnit]]] = collections.deque()
    window = 4 * workers
    unit = None
    try:
        for unit in stream:
            pending.append((unit, pool.submit(_encode_in_worker, unit)))
            while pending and (len(pending) >= window or pending[0][1].done()):
                unit, future = pending.popleft()
                yield future.result()
        while pending:
            unit, future = pending.popleft()
            yield future.result()
    except BrokenProcessPool as error:
        near = f" near {unit.location}, line {unit.records[0].line if unit.records else 0}" if unit else ""
        raise UserError(
            f"a worker process died{near}, most likely for want of memory; use fewer --workers or smaller documents."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
