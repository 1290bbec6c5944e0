"""Question answering: the documents that hold the answer among others.

Source: NVIDIA/RULER ``scripts/data/synthetic/qa.py``: sample ``i`` asks question ``i`` of the data set; documents come
from the same article first (SQuAD), then from all others; where all documents are too few, they repeat.
"""

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
    """

    data: Documents
    index: int
    key: tuple[str | int, ...]

    @property
    def minimum(self) -> int:
        """The documents that hold the answer."""
        return len(self.data.questions[self.index].documents)

    def render(self, size: int) -> Rendering:
        question, texts = self.data.questions[self.index], self.data.texts
        if size < len(texts):
            chosen = [*question.documents, *self._same_article[: size - self.minimum]]
            chosen += self._others.first(size - len(chosen))
        else:
            chosen = list(itertools.islice(itertools.cycle(range(len(texts))), size))
        chosen = shuffled(chosen, *self.key, "order")
        context = [piece for i, at in enumerate(chosen, 1) for piece in (DOCUMENT.format(i=i), texts[at] + "\n\n")]
        context[-1] = texts[chosen[-1]]
        return Rendering(
            around(QUESTION_ANSWERING, context, query=question.text), QUESTION_ANSWERING_PREFIX, question.answers
        )

    @functools.cached_property
    def _same_article(self) -> list[int]:
        return shuffled(self.data.questions[self.index].same_article, *self.key, "same article")

    @functools.cached_property
    def _others(self) -> Distinct[int]:
        question, rng = self.data.questions[self.index], stream(*self.key, "others")
        return Distinct(lambda: rng.randrange(len(self.data.texts)), {*question.documents, *question.same_article})


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
