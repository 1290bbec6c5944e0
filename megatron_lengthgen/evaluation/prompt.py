"""From text to the token ids that a model is given, and back."""

import functools
import hashlib
import json
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lengthgen.errors import UserError

__all__ = ["PromptEncoder", "load_tokenizer", "prompt_digest"]


def prompt_digest(prompt_ids: Sequence[int]) -> str:
    """First 16 hexadecimal digits of the SHA-256 of the ids, by which a stored answer knows its prompt again."""
    return hashlib.sha256(array("q", prompt_ids).tobytes()).hexdigest()[:16]


def load_tokenizer(source: str) -> Any:
    """A Hugging Face tokenizer from a local directory or hub id.

    Raises:
        UserError: when there is none.
    """
    path = Path(source)
    if path.exists() and not any((path / name).exists() for name in _TOKENIZER_FILES):
        raise UserError(f"--tokenizer {source} holds no tokenizer ({', '.join(_TOKENIZER_FILES)})")
    if not path.exists() and (path.is_absolute() or source.count("/") != 1 or source.startswith(".")):
        raise UserError(f"--tokenizer {source} does not exist; give a directory saved by save_pretrained or a hub id")
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except Exception as error:
        raise UserError(f"cannot load a tokenizer from {source}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "tekken.json")


class PromptEncoder:
    """Encodes prompts as an inference server would see them.

    The special tokens that the tokenizer puts before a text come first, once: a chat template that already writes the
    BOS gets no second one. What it puts *after* a text (an EOS) is left out, since the answer continues the prompt.

    Args:
        tokenizer: a Hugging Face tokenizer.
        chat: wrap the user's text in the tokenizer's chat template; the answer prefix follows the assistant's header.
        stop_files: model directories or hub ids whose ``generation_config.json``, or else ``config.json``, names
            further end-of-text tokens.
        stop_tokens: further tokens that end an answer, as text.

    Raises:
        UserError: when ``chat`` is asked of a tokenizer without a chat template, or with one that does not come to the
            assistant's turn, or a stop token is not in the vocabulary.
    """

    def __init__(
        self, tokenizer: Any, chat: bool = False, stop_files: Sequence[str] = (), stop_tokens: Sequence[str] = ()
    ) -> None:
        if chat and not getattr(tokenizer, "chat_template", None):
            raise UserError("--chat-template on, but the tokenizer has no chat template; use --chat-template off")
        self.tokenizer = tokenizer
        self.chat = chat
        if chat:
            self._check_template(bool(stop_tokens))
        plain = self._encode("a")
        special = list(tokenizer.encode("a", add_special_tokens=True))
        at = next((i for i in range(len(special)) if special[i : i + len(plain)] == plain), 0)
        self._leading = special[:at]
        self.stop_ids = self._stop_ids(stop_files, stop_tokens)

    def _encode(self, text: str) -> list[int]:
        # verbose=False: a long prompt is the point here, not a mistake to warn about.
        return list(self.tokenizer.encode(text, add_special_tokens=False, verbose=False))

    def text(self, body: str, answer_prefix: str) -> str:
        """The complete prompt as text (without the special tokens that :meth:`encode` puts before it)."""
        if not self.chat:
            return body + answer_prefix
        return self._render(body) + answer_prefix

    def _render(self, body: str, answer: str | None = None, generate: bool = True) -> str:
        """The chat template of one question, and of its answer if there is one."""
        messages = [{"role": "user", "content": body}]
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generate and answer is None
        )

    def _check_template(self, stops_named: bool) -> None:
        """Refuse a template that fails, loses the question, or does not come to the assistant's turn."""
        mark, answer = "zqxj", "jxqz"
        try:
            prompt, bare = self._render(mark), self._render(mark, generate=False)
        except Exception as error:
            # A template is a program: it may raise what it likes.
            raise UserError(
                f"the tokenizer's chat template fails on a user's message ({_reason(error)}); use --chat-template off, "
                "or another tokenizer"
            ) from error
        if mark not in prompt:
            raise UserError(
                "the tokenizer's chat template does not keep a user's text; use --chat-template off, or another "
                "tokenizer"
            )
        try:
            whole = self._render(mark, answer)
        except Exception as error:
            if stops_named:
                return
            raise UserError(
                f"the tokenizer's chat template fails on an assistant's message ({_reason(error)}), so what ends an "
                "answer is not known: name it with --stop-token"
            ) from error
        # Where the assistant has a header, asking for its turn must write it. Some formats have none.
        if prompt == bare and whole.startswith(prompt) and whole[len(prompt) :].partition(answer)[0].strip():
            raise UserError(
                "the tokenizer's chat template does not begin the assistant's turn (add_generation_prompt changes "
                "nothing); use --chat-template off, or another tokenizer"
            )

    def encode(self, body: str, answer_prefix: str) -> list[int]:
        """Token ids of the complete prompt."""
        return self.lead(self._encode(self.text(body, answer_prefix)))

    def lead(self, ids: list[int]) -> list[int]:
        """``ids`` of a whole prompt with the special tokens before them, once."""
        shared = min(len(self._leading), len(ids))
        return ids if shared and ids[:shared] == self._leading else self._leading + ids

    @functools.cached_property
    def frame(self) -> tuple[str, str] | None:
        """What :meth:`text` writes before the body, and between it and the answer prefix; None where a chat template
        does more to a body than to stand around it."""
        mark = "zqxj"
        parts = self.text(mark, "").split(mark)
        # Bodies begin with a letter and end with a mark of punctuation, so a template that trims them changes nothing.
        probe = "Some text.\n\nTwo  words, and an end?"
        if len(parts) != 2 or self.text(probe, " It") != f"{parts[0]}{probe}{parts[1]} It":
            return None
        return parts[0], parts[1]

    def encode_texts(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of each text, without special tokens."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)
        return encoded["input_ids"]

    def count(self, texts: list[str]) -> list[int]:
        """Number of tokens of each text, without special tokens."""
        return [len(ids) for ids in self.encode_texts(texts)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of generated ids, without special tokens."""
        # Clean-up would drop spaces before punctuation, and so change what is scored.
        return self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    @property
    def leading(self) -> tuple[int, ...]:
        """Special tokens that every prompt starts with."""
        return tuple(self._leading)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of what decides the ids: vocabulary, rules, special tokens, and the chat template if it is used."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        rules = backend.to_str() if backend is not None else json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
        template = self.tokenizer.chat_template if self.chat else None
        return hashlib.sha256(json.dumps([rules, self._leading, template]).encode()).hexdigest()

    def _stop_ids(self, stop_files: Sequence[str], stop_tokens: Sequence[str]) -> frozenset[int]:
        found = {self.tokenizer.eos_token_id}
        for source in stop_files:
            found.update(_declared_ends(source))
        if self.chat:
            found.add(self._turn_end())
        vocabulary = self.tokenizer.get_vocab()
        for token in stop_tokens:
            if token not in vocabulary:
                raise UserError(f"--stop-token {token!r} is not in the tokenizer's vocabulary")
            found.add(vocabulary[token])
        return frozenset(id for id in found if id is not None)

    def _turn_end(self) -> int | None:
        """The special token that the chat template writes after an assistant's answer, blanks between them apart."""
        answer = "zqxj"
        try:
            tail = self._render("a", answer).rpartition(answer)[2]
        except Exception:
            # The template takes no assistant's message; _check_template saw to it that the token is named.
            return None
        added = self.tokenizer.get_added_vocab().values()
        for token in self._encode(tail):
            if token in added:
                return token
            if self.tokenizer.decode([token]).strip():
                break
        return None


def _declared_ends(source: str) -> list[int]:
    """Ids of the end-of-text tokens that a model's files name; the generation's file wins over the model's."""
    from transformers.utils import cached_file

    for name in ("generation_config.json", "config.json"):
        # None where a directory, or the cache of a hub id, does not hold the file.
        found = cached_file(
            source,
            name,
            _raise_exceptions_for_missing_entries=False,
            _raise_exceptions_for_connection_errors=False,
            _raise_exceptions_for_gated_repo=False,
        )
        if found is None:
            continue
        file = Path(found)
        try:
            value = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
        except (json.JSONDecodeError, AttributeError) as error:
            raise UserError(f"{file} is not a JSON object: {error}") from error
        values = [each for each in (value if isinstance(value, list) else [value]) if each is not None]
        if strange := [each for each in values if type(each) is not int]:
            raise UserError(f"{file} has eos_token_id {strange[0]!r}, which is no token id; mend that file")
        if values:
            return values
    return []
