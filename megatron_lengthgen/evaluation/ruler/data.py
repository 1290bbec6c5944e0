"""RULER samples for one tokenizer."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.prompt import PromptEncoder, prompt_digest

from . import cwe, fwe, niah, qa, vt
from .documents import Documents
from .essays import Essays
from .fit import Filler, Fitted, fit, largest
from .question import Question, Rendering
from .sources import Sources
from .splice import Splicer
from .tasks import CommonWords, FrequentWords, Niah, QuestionAnswering, Task, VariableTracking
from .templates import NOISE

__all__ = ["DATA_VERSION", "Ruler", "Sample"]

#: A length this many times what the first sample needs at least has room for every sample.
_ALIKE = 8
#: A prompt that leaves more of the length unused than this is filled as far as the task permits.
_FULL = 0.97
#: Documents that are tried for the rest of a length.
_TRIED = 200
#: The prompt on which a task's splicing is tried.
_PROBE_LENGTH, _PROBE_SIZE = 4096, 120

#: Raise when the same seed would give other prompts than before.
DATA_VERSION = 3


@dataclass(frozen=True)
class Sample:
    """One question.

    Attributes:
        max_length: the length that it fills, in tokens, with room for the answer.
        body, answer_prefix: the user's text, and the start of the answer that the model continues.
        outputs: the references.
        prompt_ids: token ids of the complete prompt.
        reserve: tokens kept free for the answer.
        depths: share of the haystack before each needle that holds an answer.
    """

    task: str
    max_length: int
    index: int
    body: str
    answer_prefix: str
    outputs: tuple[str, ...]
    prompt_ids: tuple[int, ...]
    reserve: int
    depths: tuple[float, ...] = field(default=())

    @property
    def length(self) -> int:
        """Tokens of prompt and answer together, as RULER's ``length``."""
        return len(self.prompt_ids) + self.reserve

    @property
    def digest(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of the ids."""
        return prompt_digest(self.prompt_ids)


class Ruler:
    """Makes samples: ``sample(task, max_length, index)`` depends on the seed and on these three alone.

    Args:
        encoder: turns text into ids.
        sources: word lists, and what else the tasks need.
        seed: RULER's default is 42.
        max_new_tokens: tokens to generate if not the task's own number. A smaller number leaves the prompts as they
            are, a larger one takes its room from the haystack.
        splice: put prompts together from the ids of their pieces where the tokenizer permits it; the ids are the same.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        sources: Sources,
        seed: int = 42,
        max_new_tokens: int | None = None,
        splice: bool = True,
    ) -> None:
        self.encoder, self.sources = encoder, sources
        self.seed, self.max_new_tokens, self.splice = seed, max_new_tokens, splice
        self._splicer = Splicer(encoder) if splice else None
        self._spliced: dict[str, bool] = {}
        self._guesses: dict[tuple[str, int], int] = {}
        self._needle_sizes: dict[str, float] = {}
        self._examples: dict[str, vt.Example] = {}

    def new_tokens(self, task: Task) -> int:
        """Tokens that a model may generate in this task."""
        return self.max_new_tokens or task.tokens_to_generate

    def samples(self, task: Task, max_length: int, indices: Sequence[int]) -> list[Sample]:
        """Several samples of a task at a length."""
        return [self.sample(task, max_length, index) for index in indices]

    def sample(self, task: Task, max_length: int, index: int) -> Sample:
        """Sample ``index`` of a task at a length.

        Raises:
            UserError: when the length has no room for the question and the answer, or the data set has no such
                question.
        """
        reserve = self._reserve(task)
        measured, size = self._fitted(task, max_length, index)
        rendering, ids = measured.prompt(size)
        return Sample(
            task=task.name,
            max_length=max_length,
            index=index,
            body=rendering.body,
            answer_prefix=rendering.answer_prefix,
            outputs=rendering.outputs,
            prompt_ids=ids,
            reserve=reserve,
            depths=rendering.depths,
        )

    def haystack(self, task: Niah, max_length: int, index: int) -> tuple[str, niah.Draw]:
        """The text of a needle sample without the question around it, and what was drawn.

        Raises:
            UserError: as :meth:`sample`.
        """
        measured, size = self._fitted(task, max_length, index)
        question = measured.question
        assert isinstance(question, niah.Needles)
        pieces, _ = niah.context(task, question.drawn, size, question.essays, question.words)
        return "".join(pieces), question.drawn

    def _fitted(self, task: Task, max_length: int, index: int) -> tuple["_Measured", int]:
        """A question, and the size of its haystack at a length."""
        reserve = self._reserve(task)
        budget = max_length - reserve
        measured = _Measured(self._question(task, max_length, index), self.encoder, self._splicer_of(task))
        fitted = self._fit(task, max_length, measured, budget)
        if fitted.tokens > budget:
            raise _too_small(task, max_length, fitted.tokens, reserve)
        return _fill(measured, fitted, budget, int(_FULL * max_length) - reserve)

    def check(self, task: Task, max_length: int, samples: int) -> None:
        """Refuse a length that is too small for any of the first ``samples`` samples.

        Raises:
            UserError: naming the smallest length that works for all of them.
        """
        if (least := self._least(task, max_length, samples)) > max_length:
            reserve = self._reserve(task)
            raise _too_small(task, max_length, least - reserve, reserve)

    def check_all(self, tasks: Sequence[Task], lengths: Sequence[int], samples: int) -> None:
        """Refuse what cannot be made of the first ``samples`` samples of tasks at lengths, before any is made.

        Raises:
            UserError: naming all of it, and for each task the smallest length that works.
        """
        faults = []
        for task in tasks:
            if (count := self._available(task, samples)) < samples:
                faults.append(f"{task.name} has {count} questions, not {samples}: use --samples {count} or fewer")
            least = {length: self._least(task, length, count) for length in lengths}
            if small := [length for length in lengths if least[length] > length]:
                works = max(least[length] for length in small)
                which = ", ".join(map(str, small))
                which = f"length {which} is" if len(small) == 1 else f"lengths {which} are"
                faults.append(f"{which} too small for {task.name}: use at least {works}")
        if faults:
            raise UserError("; ".join(faults) + "; or leave out what cannot be made")

    def _available(self, task: Task, samples: int) -> int:
        """How many of ``samples`` samples there are."""
        return min(samples, len(self._documents(task).questions)) if isinstance(task, QuestionAnswering) else samples

    def _least(self, task: Task, max_length: int, samples: int) -> int:
        """``max_length``, or the smallest length above it that has room for each of the first ``samples`` samples."""
        reserve, length = self._reserve(task), max_length
        # Other lengths have other questions, so a length that is named is tried first.
        while (needed := self._shortest(task, length, samples)) + reserve > length:
            length = needed + reserve
        return length

    def _shortest(self, task: Task, max_length: int, samples: int) -> int:
        """Tokens of the longest among the shortest prompts of the first ``samples`` samples."""

        def count(index: int) -> int:
            question = self._question(task, max_length, index)
            return _Measured(question, self.encoder, self._splicer_of(task)).count(question.minimum)

        first = count(0)
        # Questions of one task differ in length, but not so much.
        if _ALIKE * (first + self._reserve(task)) <= max_length:
            return first
        return max(map(count, range(samples)))

    def _reserve(self, task: Task) -> int:
        return max(self.new_tokens(task), task.tokens_to_generate)

    def _question(self, task: Task, max_length: int, index: int) -> Question:
        key = ("ruler", self.seed, task.name, max_length, index)
        words = self.sources.words
        if isinstance(task, Niah):
            return niah.Needles(task, niah.draw(task, words, key), self._essays(task), words)
        if isinstance(task, VariableTracking):
            return vt.draw(task, self._worked_example(task), key)
        if isinstance(task, CommonWords):
            return cwe.Words(task, words, key, max_length)
        if isinstance(task, FrequentWords):
            return fwe.CodedWords(task, key, max_length - self._reserve(task))
        assert isinstance(task, QuestionAnswering)
        return qa.draw(task, self._documents(task), key, index)

    def _essays(self, task: Niah) -> Essays | None:
        if task.haystack == "essay" and self.sources.essays is None:
            raise UserError(f"{task.name} needs essay text: give --essays")
        return self.sources.essays

    def _documents(self, task: QuestionAnswering) -> Documents:
        found = self.sources.squad if task.dataset == "squad" else self.sources.hotpotqa
        if found is None:
            raise UserError(f"{task.name} needs its data set: give --{task.dataset}")
        return found

    def _fit(self, task: Task, max_length: int, measured: "_Measured", budget: int) -> Fitted:
        if isinstance(task, Niah):
            found = fit(measured.count, self._filler(task), budget)
            if found.tokens > budget or found.tokens + max_length - budget >= _FULL * max_length:
                return found
            return largest(measured.count, measured.question.minimum, budget, found.size)
        cell = (task.name, max_length)
        if cell not in self._guesses:
            # Always that of the first sample, so that nothing depends on which sample is made first.
            first = self._question(task, max_length, 0)
            found = largest(_Measured(first, self.encoder, self._splicer_of(task)).count, first.minimum, budget)
            self._guesses[cell] = found.size
        return largest(measured.count, measured.question.minimum, budget, self._guesses[cell])

    def _splicer_of(self, task: Task) -> Splicer | None:
        """The splicer, if a small prompt of the task comes out the same spliced and whole."""
        if self._splicer is None:
            return None
        if task.name not in self._spliced:
            # Length and index are arbitrary, and the same in every process.
            question = self._question(task, _PROBE_LENGTH, 0)
            rendering = question.render(max(question.minimum, _PROBE_SIZE))
            whole = self.encoder.encode(rendering.body, rendering.answer_prefix)
            self._spliced[task.name] = self._splicer.ids(rendering) == tuple(whole)
        return self._splicer if self._spliced[task.name] else None

    def _worked_example(self, task: VariableTracking) -> vt.Example:
        if task.name not in self._examples:
            key = ("ruler", self.seed, task.name)
            self._examples[task.name] = vt.example(task, key, lambda text: self.encoder.count([text])[0])
        return self._examples[task.name]

    def _filler(self, task: Niah) -> Filler:
        if task.haystack == "essay":
            return self._essay_filler
        needles = task.distinct_keys * task.values
        per_unit = self._noise_tokens if task.haystack == "noise" else self._needle_tokens(task)
        return niah.UniformFiller(per_unit, minimum=needles)

    @functools.cached_property
    def _essay_filler(self) -> niah.EssayFiller:
        assert self.sources.essays is not None
        return niah.EssayFiller(self.sources.essays, self.encoder.count)

    @functools.cached_property
    def _noise_tokens(self) -> float:
        few, many = self.encoder.count(["\n".join([NOISE] * 8), "\n".join([NOISE] * 40)])
        return (many - few) / 32

    def _needle_tokens(self, task: Niah) -> float:
        if task.name not in self._needle_sizes:
            words = self.sources.words
            drawn = niah.draw(task, words, ("ruler", self.seed, task.name, "size"))
            texts = ["".join(niah.context(task, drawn, size, None, words)[0]) for size in (100, 300)]
            few, many = self.encoder.count(texts)
            self._needle_sizes[task.name] = (many - few) / 200
        return self._needle_sizes[task.name]


class _Measured:
    """A question with the exact number of tokens of its prompts, found by splicing or else by encoding the text."""

    def __init__(self, question: Question, encoder: PromptEncoder, splicer: Splicer | None) -> None:
        self.question, self._encoder, self._splicer = question, encoder, splicer

    def of(self, question: Question) -> "_Measured":
        """Another question, measured alike."""
        return _Measured(question, self._encoder, self._splicer)

    def count(self, size: int) -> int:
        rendering = self.question.render(size)
        spliced = None if self._splicer is None else self._splicer.count(rendering)
        return len(self._encoder.encode(rendering.body, rendering.answer_prefix)) if spliced is None else spliced

    def prompt(self, size: int) -> tuple[Rendering, tuple[int, ...]]:
        rendering = self.question.render(size)
        spliced = None if self._splicer is None else self._splicer.ids(rendering)
        if spliced is None:
            return rendering, tuple(self._encoder.encode(rendering.body, rendering.answer_prefix))
        return rendering, spliced


def _fill(measured: _Measured, fitted: Fitted, budget: int, wanted: int) -> tuple[_Measured, int]:
    """Where a document too long leaves fewer than ``wanted`` tokens used, others that fit in its place."""
    size, tokens = fitted.size, fitted.tokens
    for _ in range(_TRIED):
        question = measured.question
        if tokens >= wanted or not isinstance(question, qa.Asked):
            break
        if tokens < (count := measured.count(size + 1)) <= budget:
            size, tokens = size + 1, count
        elif (other := question.past_next(size)) is not None:
            measured = measured.of(other)
        else:
            break
    return measured, size


def _too_small(task: Task, max_length: int, tokens: int, reserve: int) -> UserError:
    return UserError(
        f"length {max_length} is too small for {task.name}: its shortest prompt has {tokens} tokens, "
        f"and {reserve} are kept for the answer; use at least {tokens + reserve}"
    )
