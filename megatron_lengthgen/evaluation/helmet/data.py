"""HELMET's questions for one tokenizer."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Answer, Request
from megatron_lengthgen.evaluation.lengths import length_name
from megatron_lengthgen.evaluation.prompt import PromptEncoder, prompt_digest

from .cite import load_cite
from .cut import cut_to_fit
from .datasets import Dataset
from .examples import Example, Examples
from .files import Archive
from .hub import HubSets
from .icl import load_icl
from .lexsum import load_multi_lexsum
from .rag import load_rag
from .recall import load_json_kv, load_needles
from .rerank import load_rerank
from .scoring import first_line, score
from .shorten import Shortener
from .stories import load_infbench, load_narrativeqa, text_limit
from .templates import TEMPLATES
from .text_metrics import flat

__all__ = ["DATA_VERSION", "Helmet", "Question"]

#: Raise when the same data would give other prompts than before.
DATA_VERSION = 1


@dataclass(frozen=True)
class Question:
    """One question as a model gets it.

    Attributes:
        max_length: the length that it fills, in tokens, with room for the answer.
        body, answer_prefix: the user's text, and the start of the answer that the model continues.
        prompt_ids: token ids of the complete prompt.
        reserve: tokens kept free for the answer.
        cut_tokens: tokens of the context that did not fit.
        lost: references that were in the context before that, and are no longer.
    """

    task: str
    max_length: int
    index: int
    example: Example
    body: str
    answer_prefix: str
    prompt_ids: tuple[int, ...]
    reserve: int
    cut_tokens: int
    lost: int

    @property
    def outputs(self) -> tuple[str, ...]:
        """The references."""
        return tuple(flat(self.example.gold))

    @property
    def depths(self) -> tuple[float, ...]:
        """Share of the context before the answer, where the data say it."""
        return () if self.example.depth is None else (self.example.depth,)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together."""
        return len(self.prompt_ids) + self.reserve

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the ids."""
        return prompt_digest(self.prompt_ids)


class Helmet:
    """Makes questions: ``sample(dataset, length, index)`` depends on the data and on these three alone.

    Args:
        archive, hub: where the data are.
        encoder: turns text into ids, without a chat template.
        chat: the same with one, and for which data sets; None for none.
        cut_tokenizer: counts the tokens of texts that the benchmark itself cuts; HELMET's is Llama 2's.
        lengths: the lengths that will be asked for.
        max_new_tokens: tokens to generate if not the data set's own number. The prompts stay as they are.
        samples: questions of each data set if not HELMET's number.
        place: where a context that does not fit is cut, see :mod:`.cut`.
    """

    def __init__(
        self,
        archive: Archive,
        hub: HubSets,
        encoder: PromptEncoder,
        *,
        chat: Mapping[str, PromptEncoder] | None = None,
        cut_tokenizer: Any = None,
        lengths: Sequence[int],
        max_new_tokens: int | None = None,
        samples: int | None = None,
        place: str = "middle",
    ) -> None:
        self.archive, self.hub, self.encoder = archive, hub, encoder
        self._chat = chat or {}
        self._cut_tokenizer = cut_tokenizer or encoder.tokenizer
        self._lengths, self._max_new_tokens, self._samples, self._place = lengths, max_new_tokens, samples, place
        self._examples: dict[tuple[str, int], Examples] = {}
        self._shorteners: dict[str, Shortener] = {}
        self._newlines: frozenset[int] | None = None

    # -- the data -----------------------------------------------------------------------------------------------------

    def size(self, dataset: Dataset, length: int) -> int:
        """How many questions there are."""
        return self._load(dataset, length).count

    def example(self, dataset: Dataset, length: int, index: int) -> Example:
        """Question ``index`` before it meets a tokenizer.

        Raises:
            UserError: when the data are not of HELMET's form.
        """
        examples = self._load(dataset, length)
        with _form(dataset, length, f", question {index},"):
            made = examples.make(index)
            if not isinstance(made.context, str) or not all(isinstance(text, str) for text in flat(made.gold)):
                raise TypeError("its context or a reference is no text")
            return made

    def _load(self, dataset: Dataset, length: int) -> Examples:
        if (dataset.name, length) not in self._examples:
            with _form(dataset, length):
                self._examples[dataset.name, length] = self._read(dataset, length, self.asked(dataset))
        return self._examples[dataset.name, length]

    def _read(self, dataset: Dataset, length: int, samples: int) -> Examples:
        if dataset.name == "json_kv":
            return load_json_kv(self.archive, dataset, length, samples)
        if dataset.category == "icl":
            return load_icl(self.hub, dataset, length, samples)
        if dataset.category in ("longqa", "summ"):
            if dataset.name not in self._shorteners:
                limits = [text_limit(dataset, each) for each in self._lengths]
                self._shorteners[dataset.name] = Shortener(self._cut_tokenizer, limits)
            load = {"narrativeqa": load_narrativeqa, "multi_lexsum": load_multi_lexsum}.get(dataset.name, load_infbench)
            return load(self.hub, dataset, length, samples, self._shorteners[dataset.name])
        from_files = {"recall": load_needles, "rag": load_rag, "rerank": load_rerank, "cite": load_cite}
        return from_files[dataset.category](self.archive, dataset, length, samples)

    def asked(self, dataset: Dataset) -> int:
        """Different questions that are asked at most."""
        return self._samples or dataset.samples

    def chats(self, dataset: Dataset) -> bool:
        """Whether its prompts are in the chat template."""
        return self._chat.get(dataset.name, self.encoder).chat

    # -- prompts ------------------------------------------------------------------------------------------------------

    def new_tokens(self, dataset: Dataset) -> int:
        """Tokens that a model may generate."""
        return self._max_new_tokens or dataset.new_tokens

    def sample(self, dataset: Dataset, length: int, index: int) -> Question:
        """Question ``index`` of a data set at a length.

        Raises:
            UserError: when it does not fit even without its context.
        """
        example = self.example(dataset, length, index)
        template, encoder = TEMPLATES[dataset.name], self._chat.get(dataset.name, self.encoder)
        prefix = "" if encoder.chat else template.between + template.system.format(**example.values)
        reserve = max(self.new_tokens(dataset), dataset.new_tokens)

        def body(context: str) -> str:
            return template.user.format(context=context, **example.values)

        cut = cut_to_fit(
            lambda context: encoder.encode(body(context), prefix),
            encoder.tokenizer,
            example.context,
            length - reserve,
            self._place,
            f"question {index} of {dataset.name} at length {length}",
        )
        before, after = example.context.lower(), cut.context.lower()
        lost = sum(gold.lower() in before and gold.lower() not in after for gold in flat(example.gold))
        return Question(
            dataset.name, length, index, example, body(cut.context), prefix, cut.ids, reserve, cut.tokens, lost
        )

    def samples(self, dataset: Dataset, length: int, indices: Sequence[int]) -> list[Question]:
        """Several questions of a data set at a length."""
        return [self.sample(dataset, length, index) for index in indices]

    # -- answers ------------------------------------------------------------------------------------------------------

    def request(self, dataset: Dataset, question: Question) -> Request:
        """What an engine is to continue."""
        stop = self._chat.get(dataset.name, self.encoder).stop_ids
        if dataset.stop_at_newline:
            stop |= self._newline_ids()
        return Request(question.prompt_ids, self.new_tokens(dataset), stop)

    def _newline_ids(self) -> frozenset[int]:
        """Tokens that are a new line and white space. One with letters before its new line goes on: what follows that
        line is dropped from the text."""
        if self._newlines is None:
            count = len(self.encoder.tokenizer)
            texts = self.encoder.tokenizer.batch_decode([[i] for i in range(count)], clean_up_tokenization_spaces=False)
            self._newlines = frozenset(i for i, text in enumerate(texts) if "\n" in text and not text.strip())
        return self._newlines

    def record(self, dataset: Dataset, question: Question, answer: Answer) -> dict[str, Any]:
        """What a record holds besides what the runner knows."""
        text = first_line(answer.text) if dataset.stop_at_newline else answer.text
        scored = score(dataset, question.example, text, question.answer_prefix.lstrip("\n"))
        return {
            "pred": text,
            "finish": "stop" if text != answer.text or not answer.cut else "length",
            "score": scored.metrics[dataset.metric],
            "output": scored.output,
            "parsed_output": scored.parsed,
            "metrics": scored.metrics,
            "question": question.example.question,
            "group": question.example.group,
            "cut_tokens": question.cut_tokens,
            "lost_references": question.lost,
            "shortened_tokens": question.example.shortened,
        }


@contextlib.contextmanager
def _form(dataset: Dataset, length: int, which: str = "") -> Iterator[None]:
    """Turns what data of another form lead to into a :class:`UserError` that says where they lie."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        place = f" ({dataset.file_at(length)})" if dataset.file else ""
        raise UserError(
            f"{dataset.name} at {length_name(length)}{place}{which} is not of the form of HELMET's data "
            f"({type(error).__name__}: {error}); is this another version of the data?"
        ) from error
