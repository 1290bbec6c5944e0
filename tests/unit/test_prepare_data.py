"""Text to indexed datasets, held against Megatron's reader and the tokenizer's own `encode`."""

import errno
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.training import corpus, corpus_output, corpus_sources
from megatron_lengthgen.training.corpus import BadRecord, Document, documents, find_sources, prepare

TOOL = Path(__file__).parents[2] / "tools" / "prepare_data.py"
EOD = "<|endoftext|>"
TEXTS = ["The first document.\nIt has two lines.", "Zweites Dokument: äöü ß 漢字 🙂", "third", "  a b  c \t d\r\n"]


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer with an eos token, and a BOS that it adds when special tokens are asked for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", EOD], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(TEXTS * 3 + ["the quick brown fox jumps over the lazy dog"] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    path = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token=EOD).save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def reference(tokenizer_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tokenizer_dir)


def read(prefix: Path) -> list[list[int]]:
    """The documents of a dataset, by Megatron's own reader."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[i].tolist() for i in range(len(dataset))]


def ids(reference: Any, text: str, **options: Any) -> list[int]:
    options = {"add_special_tokens": False, "split_special_tokens": True} | options
    return [*reference(text, **options).input_ids, reference.eos_token_id]


def jsonl(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
    return path


def left(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_every_document_is_the_tokenizers_ids_and_eod(tmp_path: Path, tokenizer_dir: Path, reference: Any) -> None:
    (tmp_path / "in").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "in" / f"{number}.txt").write_bytes(text.encode())
    lines = jsonl(tmp_path / "x.jsonl", [{"text": text, "other": 1} for text in reversed(TEXTS)])
    report = prepare([lines, tmp_path / "in"], tmp_path / "out" / "data", tokenizer=tokenizer_dir)
    expected = [ids(reference, text) for text in [*reversed(TEXTS), *TEXTS]]
    assert read(tmp_path / "out" / "data") == expected
    assert (report.documents, report.tokens) == (len(expected), sum(map(len, expected)))
    assert [source["documents"] for source in report.sources] == [4, 1, 1, 1, 1]
    assert left(tmp_path / "out") == ["data.bin", "data.idx", "data.report.json"]
    stored = json.loads((tmp_path / "out" / "data.report.json").read_text())
    assert stored == report.to_dict()
    digest = subprocess.run(["sha256sum", lines], capture_output=True, text=True, check=True).stdout.split()[0]
    assert stored["sources"][0]["files"][0]["sha256"] == digest
    assert stored["tokenizer"]["eod_id"] == reference.eos_token_id


def test_number_of_workers_changes_no_byte(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_sources, "UNIT_BYTES", 700)
    records: list[Any] = [{"text": f"{TEXTS[i % 4]} {'fox ' * (i * 7 % 50)}{i}"} for i in range(300)]
    records[40], records[77] = {"text": ""}, {"no": "text"}
    source = jsonl(tmp_path / "x.jsonl", records)
    reports = [
        prepare([source], tmp_path / str(workers), tokenizer=tokenizer_dir, workers=workers) for workers in (1, 2)
    ]
    for end in (".bin", ".idx"):
        assert (tmp_path / f"1{end}").read_bytes() == (tmp_path / f"2{end}").read_bytes()
    assert reports[0].bad_records == reports[1].bad_records
    assert [(r["line"], r["kind"]) for r in reports[0].bad_records] == [(41, "empty"), (78, "missing_key")]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    texts=st.lists(st.text(st.characters(codec="utf-8"), max_size=60), min_size=1, max_size=12),
    ascii_only=st.booleans(),
    newline=st.sampled_from(["\n", "\r\n"]),
    last=st.booleans(),
)
def test_any_text_comes_back(
    tmp_path: Path,
    tokenizer_dir: Path,
    reference: Any,
    texts: list[str],
    ascii_only: bool,
    newline: str,
    last: bool,
) -> None:
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    path = tmp_path / "x.jsonl"
    path.write_bytes((newline.join(lines) + (newline if last else "")).encode())
    good = [text for text in texts if text.strip()]
    found = list(documents(find_sources([path])[0]))
    assert [record.text for record in found if isinstance(record, Document)] == good
    assert [record.line for record in found] == list(range(1, len(texts) + 1))
    if good:
        prepare([path], tmp_path / "out", tokenizer=tokenizer_dir, force=True)
        assert read(tmp_path / "out") == [ids(reference, text) for text in good]
        back = [reference.decode(document[:-1]) for document in read(tmp_path / "out")]
        assert back == good


def test_gzip_is_read_as_plain(tmp_path: Path, tokenizer_dir: Path) -> None:
    plain = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "t.txt.gz").write_bytes(gzip.compress(TEXTS[0].encode()))
    prepare([plain], tmp_path / "plain", tokenizer=tokenizer_dir)
    prepare([tmp_path / "x.jsonl.gz", tmp_path / "t.txt.gz"], tmp_path / "zip", tokenizer=tokenizer_dir)
    assert read(tmp_path / "zip") == [*read(tmp_path / "plain"), read(tmp_path / "plain")[0]]


def test_damaged_gzip_is_refused(tmp_path: Path, tokenizer_dir: Path) -> None:
    whole = gzip.compress("".join(json.dumps({"text": str(i) * 50}) + "\n" for i in range(5000)).encode())
    (tmp_path / "in").mkdir()
    for name, content in (("cut", whole[:-20]), ("flipped", whole[:-6] + b"\0\0" + whole[-4:]), ("no", b"{}")):
        path = tmp_path / "in" / f"{name}.jsonl.gz"
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"{name}\.jsonl\.gz is a damaged gzip file after line \d+"):
            prepare([path], tmp_path / "out" / "data", tokenizer=tokenizer_dir)
        assert left(tmp_path / "out") == []


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


@pytest.mark.usefixtures("offline")
def test_datasets_inputs(tmp_path: Path, tokenizer_dir: Path, reference: Any) -> None:
    import datasets

    rows = datasets.Dataset.from_dict({"body": [*TEXTS, None, ""] * 30, "id": list(range(180))})
    rows.to_parquet(tmp_path / "x.parquet")
    (tmp_path / "folder").mkdir()
    rows.to_parquet(tmp_path / "folder" / "train-0.parquet")
    rows.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": rows, "test": rows.select([0])}).save_to_disk(tmp_path / "dict")
    expected = [ids(reference, text) for text in TEXTS * 30]
    for name in ("x.parquet", "folder", "saved", "dict"):
        report = prepare([tmp_path / name], tmp_path / f"{name}-out", tokenizer=tokenizer_dir, text_key="body")
        assert read(tmp_path / f"{name}-out") == expected
        assert report.counts == {"not_a_string": 30, "empty": 30}
        assert report.bad_records[0] | {"detail": ""} == {
            "file": str(tmp_path / name),
            "line": 5,
            "kind": "not_a_string",
            "detail": "",
        }
        assert prepare([tmp_path / name], tmp_path / f"{name}-out", tokenizer=tokenizer_dir, text_key="body").reused
    prepare([tmp_path / "dict"], tmp_path / "test-out", tokenizer=tokenizer_dir, text_key="body", split="test")
    assert read(tmp_path / "test-out") == expected[:1]
    with pytest.raises(UserError, match="no column 'text'; choose one of body, id"):
        prepare([tmp_path / "x.parquet"], tmp_path / "o", tokenizer=tokenizer_dir)
    for name in ("x.parquet", "dict"):
        with pytest.raises(UserError, match=r"could not be loaded.*split"):
            prepare([tmp_path / name], tmp_path / "o", tokenizer=tokenizer_dir, text_key="body", split="nosuch")
    with pytest.raises(UserError, match="nosuch-dataset is no file here and no dataset"):
        prepare(["nosuch-dataset"], tmp_path / "o", tokenizer=tokenizer_dir)


BROKEN = [
    (b'{"text": "cut', "broken_json", "Unterminated string"),
    (b"[1]", "not_an_object", "a list where an object"),
    (b'{"body": "x", "id": 1}', "missing_key", "no 'text' among the keys 'body', 'id'"),
    (b'{"text": null}', "not_a_string", "'text' is null"),
    (b'{"text": 3.5}', "not_a_string", "'text' is a number"),
    (b'{"text": ["x"]}', "not_a_string", "'text' is a list"),
    (b'{"text": "caf\xe9"}', "not_utf8", "byte 0xe9 at offset 13"),
    (b'{"text": "\\ud83d"}', "lone_surrogate", "U+D83D"),
    (b'{"text": ""}', "empty", "no text"),
    (b'{"text": " \\n"}', "empty", "white space"),
    (b'{"a":' * 100_000, "broken_json", "recursion"),
    (b'{"text": ' + b"9" * 5000 + b"}", "broken_json", "limit"),
]


@pytest.mark.parametrize(("line", "kind", "detail"), BROKEN, ids=[f"{b[1]}-{i}" for i, b in enumerate(BROKEN)])
def test_bad_line_is_named(
    tmp_path: Path, tokenizer_dir: Path, reference: Any, line: bytes, kind: str, detail: str
) -> None:
    good = b'{"text": "good"}\n'
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n" + good + line + b"\n" + good)
    report = prepare([path], tmp_path / "out", tokenizer=tokenizer_dir)
    assert read(tmp_path / "out") == [ids(reference, "good")] * 3
    assert report.counts == {"blank_line": 1, kind: 1}
    (record,) = report.bad_records
    assert (record["file"], record["line"], record["kind"]) == (str(path), 4, kind)
    assert detail in record["detail"]
    with pytest.raises(UserError, match=rf"x\.jsonl:4: {kind}: "):
        prepare([path], tmp_path / "strict" / "out", tokenizer=tokenizer_dir, on_bad_line="fail")
    assert left(tmp_path / "strict") == []


def test_blank_lines_do_not_fail_a_strict_run(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"text": "good"}\n \n')
    report = prepare([path], tmp_path / "out", tokenizer=tokenizer_dir, on_bad_line="fail")
    assert (report.documents, report.counts, report.bad_records) == (1, {"blank_line": 2}, [])


def test_bad_text_files_are_named(tmp_path: Path, tokenizer_dir: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "latin.txt").write_bytes("eins\nzwei\nfünf".encode("latin-1"))
    (tmp_path / "utf16.txt").write_text("text", encoding="utf-16")
    (tmp_path / "empty.txt").touch()
    report = prepare([tmp_path], tmp_path / "out" / "x", tokenizer=tokenizer_dir)
    assert report.documents == 1
    records = {Path(r["file"]).name: (r["kind"], r["detail"]) for r in report.bad_records}
    assert set(records) == {"latin.txt", "utf16.txt", "empty.txt"}
    assert records["latin.txt"][0] == "not_utf8" and "on line 3" in records["latin.txt"][1]
    assert "UTF-16" in records["utf16.txt"][1]
    assert records["empty.txt"][0] == "empty"


@pytest.mark.parametrize("content", [b"", b"\n\n", b'{"body": "x"}\n'])
def test_no_document_at_all(tmp_path: Path, tokenizer_dir: Path, content: bytes) -> None:
    (tmp_path / "x.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=r"no document.*nothing was written"):
        prepare([tmp_path / "x.jsonl"], tmp_path / "out" / "x", tokenizer=tokenizer_dir)
    assert left(tmp_path / "out") == []


def test_wrong_key_stops_early(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "HOPELESS", 100)
    monkeypatch.setattr(corpus_sources, "UNIT_BYTES", 1000)
    path = jsonl(tmp_path / "x.jsonl", [{"body": "x"}] * 5000 + [{"text": "x"}])
    with pytest.raises(UserError, match=r"no document.*1\d\d missing_key.*among the keys 'body'"):
        prepare([path], tmp_path / "out", tokenizer=tokenizer_dir)


def test_oversized_records_are_named(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_sources, "MAX_DOCUMENT_BYTES", 1000)
    monkeypatch.setattr(corpus_sources, "UNIT_BYTES", 64)
    path = jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": "b" * 5000}, {"text": "c"}])
    (tmp_path / "big.txt").write_text("d" * 1001)
    (tmp_path / "fits.txt").write_text("d" * 1000)
    found = list(documents(find_sources([path, tmp_path / "big.txt", tmp_path / "fits.txt"])[0]))
    kinds = [r.kind if isinstance(r, BadRecord) else r.text[:1] for r in found]
    assert kinds == ["a", "too_large", "c", "too_large", "d"]
    assert [r.line for r in found] == [1, 2, 3, 0, 0]


def test_directories_are_read_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/2.txt", "a/10.jsonl", "c.json", "readme.md", ".hidden.txt", "a.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text('{"text": "x"}\n')
    sources, ignored = find_sources([tmp_path])
    assert [source.location.removeprefix(f"{tmp_path}/") for source in sources] == [
        "a.txt",
        "a/10.jsonl",
        "a/2.txt",
        "b.txt",
    ]
    assert [source.kind for source in sources] == ["text", "jsonl", "text", "text"]
    assert ignored == [f"{tmp_path}/c.json", f"{tmp_path}/readme.md"]
    assert find_sources([tmp_path / "c.json"])[0][0].kind == "jsonl"


def test_special_tokens_in_text(tmp_path: Path, tokenizer_dir: Path, reference: Any) -> None:
    texts = [f"before {EOD} after", "plain", "<s>"]
    path = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    report = prepare([path], tmp_path / "text", tokenizer=tokenizer_dir)
    eod = reference.eos_token_id
    assert [document.count(eod) for document in read(tmp_path / "text")] == [1, 1, 1]
    assert read(tmp_path / "text") == [ids(reference, text) for text in texts]
    assert report.documents_with_special_tokens == 2
    prepare([path], tmp_path / "token", tokenizer=tokenizer_dir, special_tokens="token")
    assert [document.count(eod) for document in read(tmp_path / "token")] == [2, 1, 1]
    assert read(tmp_path / "token") == [ids(reference, text, split_special_tokens=False) for text in texts]
    prepare([path], tmp_path / "bos", tokenizer=tokenizer_dir, add_special_tokens=True)
    assert read(tmp_path / "bos") == [ids(reference, text, add_special_tokens=True) for text in texts]
    assert all(document[0] == reference.bos_token_id for document in read(tmp_path / "bos"))


def word_tokenizer(path: Path, words: int, **options: Any) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(words)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options).save_pretrained(path)
    return path


def test_eod_is_needed_and_can_be_named(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "w1 w2"}, {"text": "unknown words"}])
    tokenizer = word_tokenizer(tmp_path / "tokenizer", 10)
    with pytest.raises(UserError, match="no eos token; name the one that ends a document with --eod-token"):
        prepare([path], tmp_path / "out", tokenizer=tokenizer)
    with pytest.raises(UserError, match="'<eod>' is no token of"):
        prepare([path], tmp_path / "out", tokenizer=tokenizer, eod_token="<eod>")
    report = prepare([path], tmp_path / "out", tokenizer=tokenizer, eod_token="w7")
    assert read(tmp_path / "out") == [[1, 2, 7]]
    assert [(r["line"], r["kind"]) for r in report.bad_records] == [(2, "not_tokenized")]
    assert "UNK" in report.bad_records[0]["detail"]


def test_text_without_tokens_is_empty(tmp_path: Path) -> None:
    """A normalizer can leave nothing of a text."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "<eod>": 1}))
    tokenizer.normalizer = normalizers.Replace("x", "")
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eod>").save_pretrained(tmp_path / "tokenizer")
    path = jsonl(tmp_path / "x.jsonl", [{"text": "x"}, {"text": "a x a"}])
    report = prepare([path], tmp_path / "out", tokenizer=tmp_path / "tokenizer")
    assert read(tmp_path / "out") == [[0, 0, 1]]
    assert [(r["line"], r["kind"]) for r in report.bad_records] == [(1, "empty")]


@pytest.mark.parametrize(("words", "dtype"), [(65498, numpy.uint16), (65499, numpy.int32), (70_000, numpy.int32)])
def test_large_vocabularies_fit(tmp_path: Path, words: int, dtype: type) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": f"w0 w{words - 1}"}])
    tokenizer = word_tokenizer(tmp_path / "tokenizer", words, eos_token="<eod>")
    report = prepare([path], tmp_path / "out", tokenizer=tokenizer)
    assert read(tmp_path / "out") == [[0, words - 1, words]]
    assert report.dtype == dtype.__name__


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["nosuch.txt"], r"no such file or directory: nosuch\.txt"),
        (["./nosuch"], "no such file or directory"),
        (["x.jsonl.zst"], "decompress it"),
        (["nothing"], "holds no .txt"),
        (["fifo"], "neither a regular file nor a directory"),
        ([], "no input given"),
    ],
)
def test_bad_inputs(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, inputs: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.jsonl.zst").touch()
    Path("nothing").mkdir()
    os.mkfifo("fifo")
    with pytest.raises(UserError, match=message):
        prepare(inputs, "out", tokenizer=tokenizer_dir)


def test_bad_tokenizers_outputs_and_workers(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "x"}])
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no such tokenizer directory"):
        prepare([path], tmp_path / "out", tokenizer=tmp_path / "nosuch")
    with pytest.raises(UserError, match="cannot load a tokenizer from"):
        prepare([path], tmp_path / "out", tokenizer=tmp_path / "empty")
    with pytest.raises(UserError, match="cannot make the output directory"):
        prepare([path], path / "out", tokenizer=tokenizer_dir)
    with pytest.raises(UserError, match="must end in a name"):
        prepare([path], f"{tmp_path}/", tokenizer=tokenizer_dir)
    with pytest.raises(UserError, match="--workers must be 1 or more, got 0"):
        prepare([path], tmp_path / "out", tokenizer=tokenizer_dir, workers=0)
    with pytest.raises(UserError, match="--split train chooses a split"):
        prepare([path], tmp_path / "out", tokenizer=tokenizer_dir, split="train")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable_output(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "x"}])
    (tmp_path / "closed").mkdir(mode=0o500)
    with pytest.raises(UserError, match="no permission to write"):
        prepare([path], tmp_path / "closed" / "out", tokenizer=tokenizer_dir)


def test_a_second_start_reuses_or_refuses(tmp_path: Path, tokenizer_dir: Path, reference: Any) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    out = tmp_path / "out"
    first = prepare([path], out, tokenizer=tokenizer_dir)
    stamp = (tmp_path / "out.bin").stat().st_ino
    again = prepare([path], out, tokenizer=tokenizer_dir, workers=2)
    os.utime(path, (1, 1))  # same content, other time
    touched = prepare([path], out, tokenizer=tokenizer_dir)
    assert (first.reused, again.reused, touched.reused) == (False, True, True)
    assert (tmp_path / "out.bin").stat().st_ino == stamp
    with pytest.raises(UserError, match=r"made differently \(special_tokens was 'text' and is 'token'\)"):
        prepare([path], out, tokenizer=tokenizer_dir, special_tokens="token")
    with pytest.raises(UserError, match="on_bad_line was 'skip' and is 'fail'"):
        prepare([path], out, tokenizer=tokenizer_dir, on_bad_line="fail")
    with pytest.raises(UserError, match="tokenizer was"):
        prepare([path], out, tokenizer=tokenizer_dir, eod_token="<s>")
    jsonl(path, [{"text": text.swapcase()} for text in TEXTS])
    with pytest.raises(UserError, match=rf"input {path} changed"):
        prepare([path], out, tokenizer=tokenizer_dir)
    assert not prepare([path], out, tokenizer=tokenizer_dir, force=True).reused
    assert read(out) == [ids(reference, text.swapcase()) for text in TEXTS]
    (tmp_path / "out.report.json").write_text("{}")
    with pytest.raises(UserError, match="cannot be read as a report"):
        prepare([path], out, tokenizer=tokenizer_dir)
    (tmp_path / "out.report.json").unlink()
    with pytest.raises(UserError, match="without a report of ours"):
        prepare([path], out, tokenizer=tokenizer_dir)
    (tmp_path / "out.bin").unlink()
    (tmp_path / "out.idx").unlink()
    assert not prepare([path], out, tokenizer=tokenizer_dir).reused


@pytest.mark.parametrize("renamed", [0, 1, 2])
def test_renames_cut_short_are_finished(tmp_path: Path, tokenizer_dir: Path, renamed: int) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / "o").mkdir()
    out = corpus_output.Output(tmp_path / "o" / "out")
    prepare([path], out.prefix, tokenizer=tokenizer_dir)
    content = out.bin.read_bytes()
    stage = corpus_output.Stage(out)
    pairs = [(out.bin, stage.bin), (out.idx, stage.idx), (out.report, stage.report)]
    for final, staged in pairs[renamed:]:
        final.rename(staged)
    report = prepare([path], out.prefix, tokenizer=tokenizer_dir)
    assert report.reused and "finished writing" in report.notes[0]
    assert out.bin.read_bytes() == content
    assert left(tmp_path / "o") == ["out.bin", "out.idx", "out.report.json"]


def test_a_failed_redo_keeps_the_old_output(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    prepare([path], tmp_path / "out", tokenizer=tokenizer_dir)
    before = {name: (tmp_path / name).read_bytes() for name in left(tmp_path) if name.startswith("out")}
    path.write_text("no JSON")
    with pytest.raises(UserError, match="no document"):
        prepare([path], tmp_path / "out", tokenizer=tokenizer_dir, force=True)
    assert {name: (tmp_path / name).read_bytes() for name in left(tmp_path) if name != "x.jsonl"} == before


def test_two_runs_do_not_share_an_output(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": "x"}])
    with open(tmp_path / ".out.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run is writing"):
            prepare([path], tmp_path / "out", tokenizer=tokenizer_dir)
        assert not (tmp_path / "out.idx").exists()
    prepare([path], tmp_path / "out", tokenizer=tokenizer_dir)  # the file alone, of a dead run, is no lock


def command(*arguments: object) -> list[str]:
    return [sys.executable, str(TOOL), *map(str, arguments)]


def test_a_killed_run_leaves_no_index_and_the_next_one_cleans_up(
    tmp_path: Path, tokenizer_dir: Path, reference: Any
) -> None:
    source = tmp_path / "x.jsonl"
    line = json.dumps({"text": "the quick brown fox " * 40}) + "\n"
    source.write_text(line * 60_000)
    out = tmp_path / "out"
    with subprocess.Popen(
        command(source, "--output", out / "data", "--tokenizer", tokenizer_dir, "--workers", 2),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    ) as process:
        while not any(path.stat().st_size for path in out.glob(".data.*.bin.tmp")):
            assert process.poll() is None, "the run ended before it could be killed"
            time.sleep(0.01)
        workers = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert workers
    _, alive = psutil.wait_procs(workers, timeout=20)
    assert alive == []
    assert not list(out.glob("*.idx")) and not list(out.glob("data.*"))
    assert list(out.glob(".data.*"))
    source.write_text(line * 3)
    report = prepare([source], out / "data", tokenizer=tokenizer_dir)
    assert "removed" in report.notes[0]
    assert read(out / "data") == [ids(reference, "the quick brown fox " * 40)] * 3
    assert left(out) == ["data.bin", "data.idx", "data.report.json"]


def test_a_killed_worker_is_an_error_not_a_hang(tmp_path: Path, tokenizer_dir: Path) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text((json.dumps({"text": "the quick brown fox " * 40}) + "\n") * 30_000)

    others = psutil.Process().children()  # this process may have saved a checkpoint, whose writer stays

    def kill(state: corpus.Progress) -> None:
        for child in psutil.Process().children():
            # The resource tracker of multiprocessing is a child too.
            if child not in others and "spawn_main" in " ".join(child.cmdline()):
                child.kill()

    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match=r"a worker process died near .*x\.jsonl"):
        prepare([source], tmp_path / "out" / "data", tokenizer=tokenizer_dir, workers=2, progress=kill)
    assert left(tmp_path / "out") == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Any:
    path = tmp_path / "disk"
    path.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], capture_output=True, text=True)
    if mount.returncode:
        pytest.skip(f"mounting a tmpfs is not permitted: {mount.stderr.strip()}")
    yield path
    subprocess.run(["umount", "-l", path], check=True)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_full_disk_is_one_sentence(tmp_path: Path, tokenizer_dir: Path, small_disk: Path, workers: int) -> None:
    source = tmp_path / "x.jsonl"
    source.write_text((json.dumps({"text": "the quick brown fox " * 40}) + "\n") * 10_000)
    with pytest.raises(UserError, match=rf"the disk that holds {small_disk} is full: .* free.*about .* are needed"):
        prepare([source], small_disk / "data", tokenizer=tokenizer_dir, workers=workers)
    assert left(small_disk) == []


@pytest.mark.parametrize("end", ["idx", "report"])
def test_a_disk_full_at_the_end(tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """The tokens fit, what comes after them does not."""
    path = jsonl(tmp_path / "x.jsonl", [{"text": "x"}])

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if end == "report":
        monkeypatch.setattr(corpus, "write_json", full)
    else:
        from megatron.core.datasets import indexed_dataset

        monkeypatch.setattr(indexed_dataset._IndexWriter, "write", full)
    with pytest.raises(UserError, match="is full"):
        prepare([path], tmp_path / "out" / "data", tokenizer=tokenizer_dir)
    assert left(tmp_path / "out") == []


def test_command_line(tmp_path: Path, tokenizer_dir: Path) -> None:
    path = jsonl(tmp_path / "x.jsonl", [{"text": text} for text in TEXTS])
    path.write_text(path.read_text() + "broken\n")
    options = ("--output", tmp_path / "out", "--tokenizer", tokenizer_dir, "--workers", 1)
    done = subprocess.run(command(path, *options), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"skipped {path}:5: broken_json" in done.stdout
    assert "4 documents" in done.stdout
    again = subprocess.run(command(path, *options), capture_output=True, text=True)
    assert again.returncode == 0 and "already complete, nothing to do" in again.stdout
    failed = subprocess.run(command("nosuch.jsonl", *options), capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.splitlines()[-1] == "error: no such file or directory: nosuch.jsonl."
