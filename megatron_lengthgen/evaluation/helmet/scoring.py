"""From an answer to HELMET's measures.

Source: princeton-nlp/HELMET ``data.py`` (each set's ``post_process``), ``eval_alce.py`` and ``eval.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .alce_metrics import clean, qampari_recall_top5, remove_citations, str_em
from .datasets import Dataset
from .examples import Example
from .ranking import ndcg, parse_ranking
from .text_metrics import flat, parse_answer, ruler_recall, text_metrics

__all__ = ["Scored", "first_line", "score"]


@dataclass(frozen=True)
class Scored:
    """Args:
    output: the answer as HELMET scores it: after the start of the answer, where the model was given that.
    parsed: what was read out of it.
    metrics: HELMET's measures, each in [0, 1].
    """

    output: str
    parsed: str | list[str]
    metrics: Mapping[str, float]


def first_line(text: str) -> str:
    """The answer where a new line ends it."""
    return text.split("\n", 1)[0]


def score(dataset: Dataset, example: Example, text: str, prefix: str) -> Scored:
    """Score an answer; an empty one scores zero in every measure.

    Args:
        text: what the model generated.
        prefix: the start of the answer that its prompt ended with; empty with a chat template.
    """
    output = prefix + text
    parsed, metrics = _SCORERS[dataset.name](example, output)
    return Scored(output, parsed, metrics if text.strip() else dict.fromkeys(metrics, 0.0))


_Result = tuple[str | list[str], dict[str, float]]


def _best(example: Example, output: str, mark: str) -> _Result:
    """Each measure is the better of that of the whole output and that of what follows the mark."""
    parsed = parse_answer(output, mark)
    whole, part = text_metrics(output, example.gold), text_metrics(parsed, example.gold)
    return parsed, {name: max(whole[name], part[name]) for name in whole}


def _marked(mark: str) -> Callable[[Example, str], _Result]:
    return lambda example, output: _best(example, output, mark)


def _needles(example: Example, output: str) -> _Result:
    return output, {"ruler_recall": ruler_recall(output, flat(example.gold))}


def _label(example: Example, output: str) -> _Result:
    parsed = parse_answer(output, "label:")
    return parsed, text_metrics(parsed, example.gold)


def _ranks(example: Example, output: str) -> _Result:
    ranking = parse_ranking(output)
    relevance = {document: int(label) for document, label in example.kept["qrel"]}
    # HELMET keeps five digits of each.
    return ranking, {"NDCG@10": round(ndcg(ranking, relevance, 10), 5)}


def _choice(example: Example, output: str) -> _Result:
    parsed, metrics = _best(example, output, "Answer:")
    # Of the two references the second is the letter with its option, and the output may hold that anywhere.
    named = float(flat(example.gold)[1].lower() in output.lower())
    return parsed, metrics | {"exact_match": max(metrics["exact_match"], named), "substring_exact_match": named}


def _asqa(example: Example, output: str) -> _Result:
    text = remove_citations(clean(output))
    return text, {"str_em": str_em(text, [group for group in example.gold if not isinstance(group, str)])}


def _qampari(example: Example, output: str) -> _Result:
    text = remove_citations(clean(output))
    answers = [aliases for aliases in example.gold if not isinstance(aliases, str)]
    return text, {"qampari_rec_top5": qampari_recall_top5(text, answers)}


_SCORERS: Mapping[str, Callable[[Example, str], _Result]] = {
    **dict.fromkeys(("ruler_niah_mk_2", "ruler_niah_mk_3", "ruler_niah_mv"), _needles),
    "json_kv": _marked("corresponding value:"),
    **dict.fromkeys(("kilt_nq", "kilt_triviaqa", "kilt_hotpotqa", "kilt_popqa"), _marked("Answer:")),
    "msmarco_rerank_psg": _ranks,
    "alce_asqa": _asqa,
    "alce_qampari": _qampari,
    **dict.fromkeys(("narrativeqa", "infbench_qa_eng", "infbench_sum_eng"), _marked("Answer:")),
    "infbench_choice_eng": _choice,
    "multi_lexsum": _marked("Summary:"),
    **dict.fromkeys(("icl_trec_coarse", "icl_trec_fine", "icl_banking77", "icl_clinic150", "icl_nlu"), _label),
}
