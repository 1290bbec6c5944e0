"""Whether a tokenizer and a model belong together, as far as their vocabularies tell.

A model often has a few more rows than its tokenizer has tokens: rows are padded to multiples of 64 or 128, or reserved
(Qwen2.5-7B: 152,064 rows for 151,665 tokens, gpt-oss: 201,088 for 200,019). So fewer tokens alone are no mistake, and
the tokenizer that lies with the model says more, where there is one.
"""

from typing import Any

from megatron_lengthgen.errors import UserError

from .prompt import PromptEncoder

__all__ = ["check_fit", "check_same", "unused_rows"]

#: Rows beyond the tokenizer's that may be padding: so many, or this share of all where that is more.
_PADDING, _PADDING_SHARE = 1024, 0.02


def check_same(given: Any, given_name: str, own: Any, own_name: str) -> None:
    """Refuse a tokenizer that gives text other ids than the model's own does.

    Special tokens may differ, since a fine-tuned model often renames reserved ones, and no text holds them.

    Args:
        given, own: Hugging Face tokenizers; ``own`` lies with the model.
        given_name, own_name: where they lie.

    Raises:
        UserError: naming both, and a token that has another id.
    """
    special = _special(given) | _special(own)
    theirs, ours = _text_ids(given, special), _text_ids(own, special)
    if theirs == ours:
        return
    token = min(theirs.items() ^ ours.items(), key=lambda item: (item[1], item[0]))[0]
    raise UserError(
        f"--tokenizer {given_name} is not the model's: {token!r} is {_says(theirs.get(token))} there and "
        f"{_says(ours.get(token))} in {own_name}, which lies with the model; give --tokenizer {own_name}"
    )


def check_fit(encoder: PromptEncoder, name: str, rows: int) -> None:
    """Refuse a tokenizer with ids that the model has no rows for.

    Special tokens that no prompt holds may lie beyond (Llama 2's tokenizer is often given a padding token).

    Args:
        encoder: the tokenizer as prompts are made with it.
        name: where it lies.
        rows: of the model's embedding, without padding where that is known.

    Raises:
        UserError: naming both numbers.
    """
    text = _text_ids(encoder.tokenizer, _special(encoder.tokenizer))
    highest = max(*text.values(), *encoder.encode("a", "a"))
    if highest >= rows:
        raise UserError(
            f"--tokenizer {name} has ids up to {highest}, but the model's vocabulary has {rows}: give the tokenizer "
            "that the model was trained with"
        )


def unused_rows(encoder: PromptEncoder, name: str, rows: int) -> str | None:
    """A warning where more of the model's rows than padding explains have no token, else None.

    Args: as for :func:`check_fit`.
    """
    tokens = max(encoder.tokenizer.get_vocab().values()) + 1
    if rows - tokens <= max(_PADDING, _PADDING_SHARE * rows):
        return None
    return (
        f"WARNING: --tokenizer {name} has {tokens} tokens, and the model a vocabulary of {rows}, {rows - tokens} more: "
        "if it is not the tokenizer that the model was trained with, all scores are wrong"
    )


def _special(tokenizer: Any) -> set[str]:
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_tokens, *(str(token) for token in added.values() if token.special)}


def _text_ids(tokenizer: Any, special: set[str]) -> dict[str, int]:
    """Ids by token, without special tokens."""
    return {token: id for token, id in tokenizer.get_vocab().items() if token not in special}


def _says(id: int | None) -> str:
    return "no token" if id is None else f"token {id}"
