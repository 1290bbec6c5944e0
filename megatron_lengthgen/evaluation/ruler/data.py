"""RULER samples for one tokenizer."""

import functools
import hashlib
from array import array
from dataclasses import dataclass, field

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.prompt import PromptEncoder

from . import niah
from .essays import Essays
from .fit import Filler, fit
from .tasks import Niah
from .templates import NOISE
from .words import WordLists

__all__ = ["DATA_VERSION", "Ruler", "Sample"]

#: Raise when the same seed would give other prompts than before.
DATA_VERSION = 1


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
        return hashlib.sha256(array("q", self.prompt_ids).tobytes()).hexdigest()[:16]


class Ruler:
    """Makes samples: ``sample(task, max_length, index)`` depends on the seed and on these three alone.

    Args:
        encoder: turns text into ids.
        words: word lists for keys.
        essays: essay text; may be None if no task needs it.
        seed: RULER's default is 42.
        max_new_tokens: tokens to generate if not the task's own number. A smaller number leaves the prompts as they
            are, a larger one takes its room from the haystack.
    """

    def __init__(
        self,
        encoder: PromptEncoder,
        words: WordLists,
        essays: Essays | None = None,
        seed: int = 42,
        max_new_tokens: int | None = None,
    ) -> None:
        self.encoder, self.words, self.essays = encoder, words, essays
        self.seed, self.max_new_tokens = seed, max_new_tokens

    def new_tokens(self, task: Niah) -> int:
        """Tokens that a model may generate in this task."""
        return self.max_new_tokens or task.tokens_to_generate

    def sample(self, task: Niah, max_length: int, index: int) -> Sample:
        """Sample ``index`` of a task at a length.

        Raises:
            UserError: when the length has no room for the question and the answer.
        """
        drawn = niah.draw(task, self.words, ("ruler", self.seed, task.name, max_length, index))
        reserve = max(self.new_tokens(task), task.tokens_to_generate)
        budget = max_length - reserve

        def encode(size: int) -> list[int]:
            text, _ = niah.context(task, drawn, size, self.essays, self.words)
            return self.encoder.encode(*niah.question(task, drawn, text))

        fitted = fit(encode, self._filler(task), budget)
        if len(fitted.ids) > budget:
            raise UserError(
                f"length {max_length} is too small for {task.name}: its shortest prompt has {len(fitted.ids)} tokens, "
                f"and {reserve} are kept for the answer; use at least {len(fitted.ids) + reserve}"
            )
        text, depths = niah.context(task, drawn, fitted.size, self.essays, self.words)
        body, answer_prefix = niah.question(task, drawn, text)
        return Sample(
            task=task.name,
            max_length=max_length,
            index=index,
            body=body,
            answer_prefix=answer_prefix,
            outputs=drawn.outputs,
            prompt_ids=tuple(fitted.ids),
            reserve=reserve,
            depths=tuple(depths),
        )

    def _filler(self, task: Niah) -> Filler:
        if task.haystack == "essay":
            return self._essay_filler
        needles = task.distinct_keys * task.values
        per_unit = self._noise_tokens if task.haystack == "noise" else self._needle_tokens(task)
        return niah.UniformFiller(per_unit, minimum=needles)

    @functools.cached_property
    def _essay_filler(self) -> niah.EssayFiller:
        if self.essays is None:
            raise UserError("this task needs essay text: give --essays")
        return niah.EssayFiller(self.essays, self.encoder.count)

    @functools.cached_property
    def _noise_tokens(self) -> float:
        few, many = self.encoder.count(["\n".join([NOISE] * 8), "\n".join([NOISE] * 40)])
        return (many - few) / 32

    def _needle_tokens(self, task: Niah) -> float:
        if task.name not in self._needle_sizes:
            drawn = niah.draw(task, self.words, ("ruler", self.seed, task.name, "size"))
            texts = [niah.context(task, drawn, size, None, self.words)[0] for size in (100, 300)]
            few, many = self.encoder.count(texts)
            self._needle_sizes[task.name] = (many - few) / 200
        return self._needle_sizes[task.name]

    @functools.cached_property
    def _needle_sizes(self) -> dict[str, float]:
        return {}
