"""SQuAD and HotpotQA: documents, and questions with the documents that answer them.

Source of the rules: NVIDIA/RULER ``scripts/data/synthetic/qa.py`` (documents sorted, each once; questions in the order
of the file; of SQuAD v2.0 only those that have an answer).
"""

import functools
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError

__all__ = ["DatasetQuestion", "Documents", "load_hotpotqa", "load_squad"]


@dataclass(frozen=True)
class DatasetQuestion:
    """A question.

    Attributes:
        answers: the references, of which one is enough.
        documents: indices of the documents that belong to it.
        same_article: indices of other documents from the same article.
    """

    text: str
    answers: tuple[str, ...]
    documents: tuple[int, ...]
    same_article: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Documents:
    """A data set: its documents in sorted order, and its questions."""

    texts: tuple[str, ...]
    questions: tuple[DatasetQuestion, ...]

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of everything."""
        asked = [[q.text, q.answers, q.documents, q.same_article] for q in self.questions]
        return hashlib.sha256(json.dumps([self.texts, asked]).encode()).hexdigest()


def load_squad(source: str) -> Documents:
    """SQuAD from one of its own JSON files (dev-v2.0.json; v1.1 too), or rows with the columns that it has in
    ``datasets`` (``title``, ``context``, ``question``, ``answers``): a file of them, as a JSON array or as JSON lines,
    or the validation split of a ``datasets`` id or directory.

    Raises:
        UserError: when the source is missing, unreadable or of another form.
    """
    return _load("--squad", source, None, _squad_file, _squad_rows)


def load_hotpotqa(source: str) -> Documents:
    """HotpotQA from its own JSON file (hotpot_dev_distractor_v1.json), or rows with the columns that it has in
    ``datasets`` (``question``, ``answer``, ``context``): a file of them, as a JSON array or as JSON lines, or the
    validation split of a ``datasets`` id or directory.

    Raises:
        UserError: when the source is missing, unreadable or of another form.
    """
    return _load("--hotpotqa", source, "distractor", _hotpotqa, _hotpotqa)


def _load(option: str, source: str, config: str | None, from_file: Any, from_rows: Any) -> Documents:
    path = Path(source)
    try:
        found = from_file(_values(path)) if path.is_file() else from_rows(_rows(option, source, config))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {option} {source}: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(
            f"{option} {source} is not of the form of that data set ({type(error).__name__}: {error}); "
            "give its own JSON file, its rows as JSON, or a datasets id"
        ) from error
    if not found.questions:
        raise UserError(f"{option} {source} holds no question with an answer")
    return found


def _values(path: Path) -> list[Any]:
    """What a JSON file holds: the elements of an array, or the values of JSON lines."""
    text, at = path.read_text(encoding="utf-8"), 0
    values: list[Any] = []
    while (at := _space(text, at)) < len(text):
        value, at = json.JSONDecoder().raw_decode(text, at)
        values.append(value)
    return values[0] if len(values) == 1 and isinstance(values[0], list) else values


def _space(text: str, start: int) -> int:
    """Where white space that begins at ``start`` ends."""
    match = re.compile(r"\s*").match(text, start)
    assert match is not None
    return match.end()


def _rows(option: str, source: str, config: str | None) -> Iterable[dict[str, Any]]:
    """Rows of the validation split; of a directory whose files name no split, all rows."""
    path = Path(source)
    if not path.is_dir() and (path.is_absolute() or path.suffix in (".json", ".jsonl") or source.startswith(".")):
        raise UserError(f"{option} {source} does not exist; give the data set's own JSON file or a datasets id")
    from datasets import load_dataset

    try:
        splits = load_dataset(source, None if path.is_dir() else config)
    except Exception as error:
        raise UserError(
            f"{option}: cannot load {source} through datasets ({str(error).splitlines()[0]}); "
            "give the data set's own JSON file"
        ) from error
    return splits["validation"] if "validation" in splits else next(iter(splits.values()))


def _index(texts: Iterable[str]) -> tuple[tuple[str, ...], dict[str, int]]:
    ordered = tuple(sorted(set(texts)))
    return ordered, {text: at for at, text in enumerate(ordered)}


#: An article: its paragraphs, each a text and its questions with their answers.
_Article = Sequence[tuple[str, Sequence[tuple[str, Sequence[str]]]]]


def _squad(articles: Sequence[_Article]) -> Documents:
    texts, at = _index(text for article in articles for text, _ in article)
    questions = []
    for article in articles:
        whole = tuple(dict.fromkeys(at[text] for text, _ in article))
        for text, asked in article:
            others = tuple(other for other in whole if other != at[text])
            questions += [DatasetQuestion(q, tuple(answers), (at[text],), others) for q, answers in asked if answers]
    return Documents(texts, tuple(questions))


def _squad_file(values: list[Any]) -> Documents:
    if not values or "data" not in values[0]:
        return _squad_rows(values)
    return _squad(
        [
            [
                (
                    paragraph["context"],
                    [
                        (qa["question"], [answer["text"] for answer in qa["answers"]])
                        for qa in paragraph["qas"]
                        if not qa.get("is_impossible", False)
                    ],
                )
                for paragraph in article["paragraphs"]
            ]
            for article in values[0]["data"]
        ]
    )


def _squad_rows(rows: Iterable[dict[str, Any]]) -> Documents:
    articles: dict[str, dict[str, list[tuple[str, Sequence[str]]]]] = {}
    for row in rows:
        asked = articles.setdefault(row["title"], {}).setdefault(row["context"], [])
        asked.append((row["question"], row["answers"]["text"]))
    return _squad([list(article.items()) for article in articles.values()])


def _hotpotqa(rows: Iterable[dict[str, Any]]) -> Documents:
    asked = [
        (row["question"], row["answer"], [f"{title}\n{''.join(lines)}" for title, lines in _pages(row["context"])])
        for row in rows
    ]
    texts, at = _index(page for _, _, pages in asked for page in pages)
    return Documents(
        texts,
        tuple(
            DatasetQuestion(text, (answer,), tuple(dict.fromkeys(at[page] for page in pages)))
            for text, answer, pages in asked
        ),
    )


def _pages(context: Any) -> Iterable[tuple[str, Sequence[str]]]:
    """Title and sentences of each page: pairs in HotpotQA's own file, two columns in ``datasets``."""
    return zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
