"""Text to Megatron's indexed datasets (``PREFIX.bin`` and ``PREFIX.idx``), with a report of all that happened.

Each document is tokenized whole, followed by the end-of-document token, and stored as one sequence and one document by
Megatron's own ``IndexedDatasetBuilder`` (megatron/core/datasets/indexed_dataset.py). The order is that of the input
whatever the number of processes, so the files are the same byte for byte.

The string of a special token inside a text (a web page that speaks of ``<|endoftext|>``) stays text by default: an EOD
means the end of a document to Megatron (``--reset-attention-mask``, ``--eod-mask-loss``), and no text should be able to
forge one. Where the text carries control tokens on purpose, such as rendered chat templates, ask for
``special_tokens="token"``, which is what a bare call of a Hugging Face tokenizer does.
"""

import dataclasses
import errno
import hashlib
import importlib.metadata
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.files import write_json
from megatron_lengthgen.training.corpus_inputs import find_sources
from megatron_lengthgen.training.corpus_output import Output, Stage, file_size, is_disk_full, locked
from megatron_lengthgen.training.corpus_sources import BadRecord, Document, Source, documents, units
from megatron_lengthgen.training.corpus_tokenizer import TokenizerSpec, encode_units, load_tokenizer

__all__ = ["BadRecord", "Document", "Progress", "Report", "documents", "find_sources", "prepare"]

FORMAT = 1
# So many bad records without one document are a wrong --text-key or a wrong file, not a corpus with flaws.
HOPELESS = 10_000


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands. ``done`` and ``total`` are bytes of input."""

    done: int
    total: int
    documents: int
    tokens: int
    bad: int


@dataclass
class Report:
    """What ``PREFIX.report.json`` holds.

    ``sources`` lists each input with its files (size, SHA-256) and counts; ``counts`` counts bad records by kind, blank
    lines included; ``bad_records`` names each, without blank lines. ``reused`` (not stored): nothing had to be done.
    """

    documents: int
    tokens: int
    dtype: str
    options: dict[str, Any]
    tokenizer: dict[str, Any]
    sources: list[dict[str, Any]]
    ignored_files: list[str]
    counts: dict[str, int]
    bad_records: list[dict[str, Any]]
    documents_with_special_tokens: int
    output: dict[str, int]
    seconds: float
    tokens_per_second: float
    workers: int
    versions: dict[str, str]
    format: int = FORMAT
    reused: bool = field(default=False, compare=False)
    notes: list[str] = field(default_factory=list, compare=False)

    def to_dict(self) -> dict[str, Any]:
        stored = dataclasses.asdict(self)
        del stored["reused"], stored["notes"]
        return stored

    @property
    def bad(self) -> int:
        return len(self.bad_records)


def prepare(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    tokenizer: str | os.PathLike[str],
    text_key: str = "text",
    split: str | None = None,
    workers: int = 1,
    on_bad_line: Literal["skip", "fail"] = "skip",
    eod_token: str | None = None,
    special_tokens: Literal["text", "token"] = "text",
    add_special_tokens: bool = False,
    force: bool = False,
    progress: Callable[[Progress], None] = lambda _: None,
) -> Report:
    """Tokenize ``inputs`` into the indexed dataset ``output`` (a prefix), or find that this is done already.

    Args:
        inputs: Files, directories and dataset names, see :func:`find_sources`.
        output: Prefix of ``.bin``, ``.idx`` and ``.report.json``, which appear only when complete.
        tokenizer: Directory or hub id of a Hugging Face fast tokenizer.
        text_key: Key, or column, that holds the text.
        split: Split of a dataset, ``train`` if None.
        workers: Processes that tokenize.
        on_bad_line: ``skip`` reports a record without usable text and goes on, ``fail`` stops at the first.
        eod_token: Token that ends a document; the tokenizer's eos token if None.
        special_tokens: What the string of a special token inside a text becomes, see the module's docstring.
        add_special_tokens: Let the tokenizer add what it adds around a text (BOS, say).
        force: Replace an output that is there.
        progress: Called after each unit of work.

    Raises:
        UserError: bad input, nothing to write, an output that is there but was made differently, or a full disk.
    """
    if workers < 1:
        raise UserError(f"--workers must be 1 or more, got {workers}.")
    target = Output(output)
    sources, ignored = find_sources(inputs, split=split, text_key=text_key)
    target.check()
    spec = load_tokenizer(
        tokenizer, eod_token=eod_token, special_tokens=special_tokens, add_special_tokens=add_special_tokens
    )
    options = {
        "text_key": text_key,
        "split": split,
        "on_bad_line": on_bad_line,
        "special_tokens": special_tokens,
        "add_special_tokens": add_special_tokens,
    }
    free, written = target.free(), Counter[str]()
    try:
        with locked(target) as notes:
            if not force and (report := _complete(target, options, spec, sources)):
                report.notes = notes
                return report
            stage = Stage(target)
            try:
                report = _build(stage, sources, ignored, spec, options, workers, progress, written)
                write_json(stage.report, report.to_dict())
                stage.publish()
            finally:
                stage.remove()
            report.notes = notes
            return report
    except OSError as error:
        if is_disk_full(error):
            raise UserError(_disk_full(target, free, written)) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EFBIG):
            raise UserError(f"cannot write {target.prefix}: {error.strerror}.") from error
        raise


def _build(
    stage: Stage,
    sources: list[Source],
    ignored: list[str],
    spec: TokenizerSpec,
    options: dict[str, Any],
    workers: int,
    progress: Callable[[Progress], None],
    written: Counter[str],
) -> Report:
    """Tokenize into the stage's .bin and .idx. ``written`` tells the caller the bytes in total, read and written."""
    from megatron_lengthgen import backends

    backends.prepare()
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(spec.cardinality)
    per_source = [Counter[str](documents=0, tokens=0, bad=0) for _ in sources]
    counts, bad, special = Counter[str](), [], 0
    total, done, n_documents, n_tokens = sum(source.size() for source in sources), 0, 0, 0
    written["total"] = total
    started = time.monotonic()
    stream = encode_units(units(sources, options["text_key"]), spec, dtype, options["text_key"], workers)
    builder = IndexedDatasetBuilder(str(stage.bin), dtype=dtype)
    try:
        for unit in stream:
            start = 0
            for length in unit.lengths:
                builder.add_document(unit.ids[start : start + length], [length])
                start += length
            for record in unit.bad:
                counts[record.kind] += 1
                if record.harmless:
                    continue
                if options["on_bad_line"] == "fail":
                    raise UserError(f"{record} (repair it, or go on without it with --on-bad-line skip).")
                bad.append(record)
                per_source[unit.source]["bad"] += 1
            done, n_documents, n_tokens = done + unit.weight, n_documents + len(unit.lengths), n_tokens + start
            special += unit.special
            per_source[unit.source].update(documents=len(unit.lengths), tokens=start)
            written.update(read=unit.weight, written=start * unit.ids.itemsize)
            if not n_documents and len(bad) >= HOPELESS:
                break
            progress(Progress(done, total, n_documents, n_tokens, len(bad)))
        if not n_documents:
            raise UserError(_nothing(counts, bad))
        builder.finalize(str(stage.idx))
    finally:
        stream.close()  # ends the workers, also after an error
        _close(builder.data_file)
    seconds = time.monotonic() - started
    return Report(
        documents=n_documents,
        tokens=n_tokens,
        dtype=dtype.__name__,
        options=options,
        tokenizer=_identity(spec),
        sources=[_source(source, count) for source, count in zip(sources, per_source, strict=True)],
        ignored_files=ignored,
        counts=dict(counts),
        bad_records=[_record(record) for record in bad],
        documents_with_special_tokens=special,
        output={"bin_bytes": stage.bin.stat().st_size, "idx_bytes": stage.idx.stat().st_size},
        seconds=round(seconds, 3),
        tokens_per_second=round(n_tokens / max(seconds, 1e-9), 1),
        workers=workers,
        versions={
            name: _version(name) for name in ("megatron-lengthgen", "megatron-core", "transformers", "tokenizers")
        },
    )


def _close(file: Any) -> None:
    """Close without a second error: a file that met a full disk tries to write its buffer again."""
    try:
        file.close()
    except OSError:
        return


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _identity(spec: TokenizerSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "sha256": spec.sha256,
        "cardinality": spec.cardinality,
        "eod_token": spec.eod_token,
        "eod_id": spec.eod,
    }


def _source(source: Source, count: Counter[str]) -> dict[str, Any]:
    return {
        "location": source.location,
        "kind": source.kind,
        "identity": source.identity,
        "files": [dataclasses.asdict(file) for file in source.read],
        **count,
    }


def _record(record: BadRecord) -> dict[str, Any]:
    return {"file": record.location, "line": record.line, "kind": record.kind, "detail": record.detail}


def _nothing(counts: Counter[str], bad: list[BadRecord]) -> str:
    if not bad:
        return "the input holds no document at all; nothing was written."
    summary = ", ".join(f"{number} {kind}" for kind, number in counts.most_common())
    return f"no document among the input's records ({summary}; the first: {bad[0]}); nothing was written."


def _disk_full(target: Output, free: int, written: Counter[str]) -> str:
    message = f"the disk that holds {target.directory.absolute()} is full: {_size(free)} were free at the start"
    if written["read"]:
        # The data so far, scaled to the whole input; 20 bytes of index for each document come on top.
        need = written["written"] * written["total"] // written["read"]
        message += f" and about {_size(max(need, free + 1))} are needed"
    return message + "; free some space or choose another --output (nothing is left of this run)."


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def _complete(target: Output, options: dict[str, Any], spec: TokenizerSpec, sources: list[Source]) -> Report | None:
    """The report of a complete output made from the same inputs with the same options; None where there is no output.

    Raises:
        UserError: there is an output, and it is another one.
    """
    sizes = file_size(target.bin), file_size(target.idx)
    if file_size(target.report) is None:
        if sizes != (None, None):
            raise UserError(f"{target.prefix}.bin or .idx is there without a report of ours; --force replaces it.")
        return None
    if None in sizes:
        return None
    try:
        stored = json.loads(target.report.read_text(encoding="utf-8"))
        if stored["format"] != FORMAT:
            raise ValueError(f"format {stored['format']}")
        report = Report(**stored, reused=True)
        different = _differences(report, options, spec, sources)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{target.report} cannot be read as a report ({error}); --force replaces the output."
        ) from error
    if (report.output["bin_bytes"], report.output["idx_bytes"]) != sizes:
        different.append("the sizes of .bin and .idx")
    if different:
        raise UserError(
            f"{target.prefix} is there and was made differently ({'; '.join(different)}); "
            "use --force to replace it, or another --output."
        )
    return report


def _differences(report: Report, options: dict[str, Any], spec: TokenizerSpec, sources: list[Source]) -> list[str]:
    different = [
        f"{key} was {report.options.get(key)!r} and is {value!r}"
        for key, value in options.items()
        if report.options.get(key) != value
    ]
    mine = _identity(spec)
    if any(report.tokenizer[key] != mine[key] for key in ("sha256", "eod_id")):
        different.append(f"tokenizer was {report.tokenizer['name']} and is {spec.name}, or its EOD or content changed")
    if len(report.sources) != len(sources):
        different.append(f"{len(report.sources)} inputs then, {len(sources)} now")
    else:
        for stored, source in zip(report.sources, sources, strict=True):
            if not _same(stored, source):
                different.append(f"input {source.location} changed")
                break
    return different


def _same(stored: dict[str, Any], source: Source) -> bool:
    """Whether a source is what it was: by size and modification time or, where these moved, by content."""
    if (stored["kind"], stored["identity"], len(stored["files"])) != (source.kind, source.identity, len(source.files)):
        return False
    for file, path in zip(stored["files"], source.files, strict=True):
        stat = path.stat()
        if stat.st_size != file["bytes"]:
            return False
        if (str(path.absolute()), stat.st_mtime_ns) == (file["path"], file["mtime_ns"]):
            continue
        with open(path, "rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != file["sha256"]:
                return False
    return True
