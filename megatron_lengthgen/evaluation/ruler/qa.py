"""Question answering: the documents that hold the answer among others.

Source: NVIDIA/RULER ``scripts/data/synthetic/qa.py``: sample ``i`` asks question ``i`` of the data set; documents come
from the same article first (SQuAD), then from all others; where all documents are too few, they repeat.

RULER finds a number of documents for question 0, and takes ten away from it until another question fits. Here each
sample has as many as fit, and where a long one leaves much of a length unused, others take its place: of 4,096 tokens
of HotpotQA a prompt then uses 97 % and more, and RULER's 57 % and more (measured with SmolLM2's tokenizer).
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass

from megatron_lengthgen.errors import UserError

from .documents import Documents
from .question import Rendering, around
from .streams import Distinct, shuffled, stream
from .tasks import QuestionAnswering
from .templates import DOCUMENT, QUESTION_ANSWERING, QUESTION_ANSWERING_PREFIX

__all__ = ["Asked", "draw"]


@dataclass(frozen=True, eq=False)
class Asked:
    """A drawn question; its size is the number of documents.

    Args:
        data: documents and questions.
        index: which question.
        key: the stream key of the sample.
        passed_over: documents that are not to be taken.
    """

    data: Documents
    index: int
    key: tuple[str | int, ...]
    passed_over: frozenset[int] = frozenset()

    @property
    def minimum(self) -> int:
        """The documents that hold the answer."""
        return len(self.data.questions[self.index].documents)

    def render(self, size: int) -> Rendering:
        question, texts = self.data.questions[self.index], self.data.texts
        if size < len(texts):
            chosen = self._chosen(size)
        else:
            chosen = list(itertools.islice(itertools.cycle(range(len(texts))), size))
        chosen = shuffled(chosen, *self.key, "order")
        context = [piece for i, at in enumerate(chosen, 1) for piece in (DOCUMENT.format(i=i), texts[at] + "\n\n")]
        context[-1] = texts[chosen[-1]]
        return Rendering(
            around(QUESTION_ANSWERING, context, query=question.text), QUESTION_ANSWERING_PREFIX, question.answers
        )

    def past_next(self, size: int) -> "Asked | None":
        """The same question with the same first ``size`` documents, and without the one that is next; None where there
        is no next one, or documents repeat."""
        if size + 1 >= len(self.data.texts) or len(chosen := self._chosen(size + 1)) <= size:
            return None
        return dataclasses.replace(self, passed_over=self.passed_over | {chosen[-1]})

    def _chosen(self, size: int) -> list[int]:
        """The first ``size`` documents, or all that may be taken where they are fewer."""
        chosen = [*self.data.questions[self.index].documents, *self._same_article][: max(size, self.minimum)]
        others = len(self.data.texts) - len(self._not_others)
        return chosen + self._others.first(min(size - len(chosen), others))

    @functools.cached_property
    def _same_article(self) -> list[int]:
        order = shuffled(self.data.questions[self.index].same_article, *self.key, "same article")
        return [at for at in order if at not in self.passed_over]

    @functools.cached_property
    def _not_others(self) -> set[int]:
        question = self.data.questions[self.index]
        return {*question.documents, *question.same_article, *self.passed_over}

    @functools.cached_property
    def _others(self) -> Distinct[int]:
        rng = stream(*self.key, "others")
        return Distinct(lambda: rng.randrange(len(self.data.texts)), self._not_others)


def draw(task: QuestionAnswering, data: Documents, key: tuple[str | int, ...], index: int) -> Asked:
    """The question of sample ``index``.

    Raises:
        UserError: when the data set has no such question.
    """
    if index >= len(data.questions):
        count = len(data.questions)
        raise UserError(
            f"{task.name} has {count} questions, so no sample {index}: use --samples {count} or fewer, "
            "or leave the task out"
        )
    return Asked(data, index, key)
