"""Tokenizers that are not the model's: larger, smaller, or other than the one that lies with it."""

import json
import runpy
import shutil
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hf_models import add_tokenizer, make_model
from ruler_fixtures import tiny_llama, tokenizer
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from megatron_lengthgen.checkpoint import importing
from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation import engine
from megatron_lengthgen.evaluation.prompt import PromptEncoder
from megatron_lengthgen.evaluation.vocabulary import check_fit, check_same, unused_rows

TOOL = Path(__file__).parents[2] / "tools" / "eval_longctx.py"


def words(count: int, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of ``count`` words."""
    inner = Tokenizer(WordLevel({f"w{token}": token for token in range(count)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="w1", **special)


# -- by the size of the vocabulary ------------------------------------------------------------------------------------


def test_ids_must_have_rows() -> None:
    encoder = PromptEncoder(tokenizer())
    size = len(encoder.tokenizer)
    check_fit(encoder, "DIR", size)
    with pytest.raises(
        UserError, match=rf"^--tokenizer DIR has ids up to {size - 1}, but the model's vocabulary has 9"
    ):
        check_fit(encoder, "DIR", 9)
    with pytest.raises(UserError, match=rf"the model's vocabulary has {size - 1}: give the tokenizer that"):
        check_fit(encoder, "DIR", size - 1)


def test_special_tokens_that_no_prompt_holds_need_none() -> None:
    made = tokenizer()
    size = len(made)
    made.add_special_tokens({"pad_token": "<pad>"})
    check_fit(PromptEncoder(made), "DIR", size)
    made.add_tokens([AddedToken("<turn>", special=True)])
    made.chat_template = "{% for m in messages %}<turn>{{ m['content'] }}</s>{% endfor %}<turn>"
    check_fit(PromptEncoder(made), "DIR", size)
    with pytest.raises(UserError, match=f"ids up to {size + 1}, "):
        check_fit(PromptEncoder(made, chat=True), "DIR", size)
    made.add_tokens(["haystack"])
    with pytest.raises(UserError, match=f"ids up to {size + 2}, "):
        check_fit(PromptEncoder(made), "DIR", size)


@pytest.mark.parametrize(
    ("tokens", "rows", "warned"),
    [
        (49152, 49152, False),
        (151665, 152064, False),  # Qwen2.5-7B
        (200019, 201088, False),  # gpt-oss
        (31000, 32024, False),
        (31000, 32025, True),
        (32000, 49152, True),
        (195000, 201088, True),
    ],
)
def test_many_rows_without_a_token_are_warned_of(tokens: int, rows: int, warned: bool) -> None:
    class Sized:
        @staticmethod
        def get_vocab() -> dict[str, int]:
            return {"a": 0, "b": tokens - 1}

    encoder = Namespace(tokenizer=Sized())
    warning = unused_rows(encoder, "DIR", rows)  # type: ignore[arg-type]
    assert (warning is not None) == warned
    assert not warning or f"has {tokens} tokens, and the model a vocabulary of {rows}, {rows - tokens} more" in warning


# -- against the tokenizer that lies with the model -------------------------------------------------------------------


def test_vocabularies_that_give_text_other_ids() -> None:
    check_same(tokenizer(), "A", tokenizer(bos=True), "B")
    renamed = words(50, bos_token="w7")
    check_same(renamed, "A", words(50), "B")
    renamed.add_special_tokens({"additional_special_tokens": ["<tool>"]})
    check_same(renamed, "A", words(50), "B")
    with pytest.raises(
        UserError, match=r"^--tokenizer A is not the model's: 'w50' is token 50 there and no token in B,"
    ):
        check_same(words(60), "A", words(50), "B")
    with pytest.raises(UserError, match=r"'w50' is no token there and token 50 in B, .*; give --tokenizer B$"):
        check_same(words(50), "A", words(60), "B")
    swapped = Tokenizer(WordLevel({"w0": 0, "w1": 1, "w3": 2, "w2": 3}, unk_token="w0"))
    with pytest.raises(UserError, match="'w2' is token 3 there and token 2 in B"):
        check_same(PreTrainedTokenizerFast(tokenizer_object=swapped, eos_token="w1"), "A", words(4), "B")


# -- from the command line --------------------------------------------------------------------------------------------


def check(model: dict[str, Any], given: Path | None) -> None:
    usual = {"checkpoint": None, "hf": None, "openai": None, "chat_template": "off", "stop_token": []}
    arguments = Namespace(**usual | model, tokenizer=given and str(given))
    engine.check_vocabulary(arguments, engine.make_encoder(arguments))


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 1,003 words with its tokenizer."""
    directory = tmp_path_factory.mktemp("published")
    make_model(directory)
    add_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def imported(published: Path, tmp_path_factory: pytest.TempPathFactory, megatron_single: Callable[[int], None]) -> Path:
    directory = tmp_path_factory.mktemp("imported") / "checkpoint"
    importing.import_model(published, directory)
    return directory


@pytest.mark.parametrize("kind", ["hf", "checkpoint"])
def test_a_tokenizer_and_a_model(
    kind: str, published: Path, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A checkpoint remembers where its tokenizer was, so a copy of it would find that one.
    model = imported if kind == "checkpoint" else Path(shutil.copytree(published, tmp_path / "model"))
    own = model if kind == "hf" else model / "hf"
    for name, made in (("other", tokenizer()), ("larger", words(1010)), ("smaller", words(900)), ("same", words(1003))):
        made.save_pretrained(tmp_path / name)
    for name in ("other", "larger", "smaller"):
        with pytest.raises(
            UserError, match=rf"--tokenizer {tmp_path / name} is not the model's: .* in {own}, which lies"
        ):
            check({kind: str(model)}, tmp_path / name)
    check({kind: str(model)}, tmp_path / "same")
    check({kind: str(model)}, own)

    # Without a tokenizer of its own, or with a broken one, the model tells by its size alone.
    (own / "tokenizer.json").write_text("{")
    check({kind: str(model)}, tmp_path / "smaller")
    for file in own.glob("tokenizer*"):
        file.unlink()
    check({kind: str(model)}, tmp_path / "other")
    with pytest.raises(
        UserError, match=rf"--tokenizer {tmp_path / 'larger'} has ids up to 1009, .* vocabulary has 1003:"
    ):
        check({kind: str(model)}, tmp_path / "larger")
    assert "WARNING" not in capsys.readouterr().err


def test_much_too_small_a_tokenizer_is_warned_of_once_per_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_llama(4000).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    capsys.readouterr()
    check({"hf": str(tmp_path / "model")}, tmp_path / "tokenizer")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: --tokenizer ") and "a vocabulary of 4000" in line
    monkeypatch.setenv("RANK", "1")
    check({"hf": str(tmp_path / "model")}, tmp_path / "tokenizer")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("command", ["ruler", "helmet"])
def test_nothing_is_begun_with_a_wrong_tokenizer(
    command: str, published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer().save_pretrained(tmp_path / "other")
    task = ["niah_single_1"] if command == "ruler" else ["json_kv", "--data", str(helmet_data(tmp_path))]
    arguments = [command, "--hf", published, "--tokenizer", tmp_path / "other", "--output", tmp_path / "run"]
    monkeypatch.setattr(sys, "argv", ["x", *map(str, arguments), "--lengths", "4k", "--tasks", *task])
    with pytest.raises(UserError, match="is not the model's"):
        runpy.run_path(str(TOOL))["main"]()
    assert not (tmp_path / "run").exists()


def helmet_data(directory: Path) -> Path:
    file = directory / "data" / "json_kv" / "test_k50_dep6.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({"context": "", "question": "", "answer": "", "demos": []}) + "\n")
    return directory / "data"
