"""HELMET's measures, against other statements of the same and cases worked out by hand."""

import math
import re
import string
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lengthgen.evaluation.helmet.alce_metrics import (
    clean,
    qampari_items,
    qampari_recall_top5,
    remove_citations,
    str_em,
)
from megatron_lengthgen.evaluation.helmet.citations import citation_scores, statements
from megatron_lengthgen.evaluation.helmet.datasets import DATASETS
from megatron_lengthgen.evaluation.helmet.examples import Example
from megatron_lengthgen.evaluation.helmet.judged import NoVerdict, read_verdict
from megatron_lengthgen.evaluation.helmet.porter import stem
from megatron_lengthgen.evaluation.helmet.ranking import ndcg, parse_ranking
from megatron_lengthgen.evaluation.helmet.rouge import common_subsequence, rouge_l
from megatron_lengthgen.evaluation.helmet.scoring import first_line, score
from megatron_lengthgen.evaluation.helmet.text_metrics import normalise, parse_answer, ruler_recall, text_metrics

PHRASES = st.lists(
    st.sampled_from(
        ["The", "a", "cats", "cat.", "runs", "running", "Zoë", "x-ray", ",", "an", "12", "Answer:", "\n", "yes"]
    ),
    max_size=8,
).map(" ".join)


# -- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, an owl & a dog!", "cat owl dog"),
        ("theatre another", "theatre another"),
        ("U.S.A.", "usa"),
        ("Zoë's “quoted” word", "zoës “quoted” word"),  # only ASCII punctuation goes
        ("a.b", "ab"),
        (" \t\n", ""),
        ("İstanbul", "i̇stanbul"),
    ],
)
def test_normalised_text(text: str, normal: str) -> None:
    assert normalise(text) == normal


def slow_normal(text: str) -> list[str]:
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return [word for word in re.sub(r"\b(a|an|the)\b", " ", kept).split() if word]


def slow_lcs(a: Sequence[str], b: Sequence[str]) -> int:
    table = [[0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i, x in enumerate(a):
        for j, y in enumerate(b):
            table[i + 1][j + 1] = table[i][j] + 1 if x == y else max(table[i][j + 1], table[i + 1][j])
    return table[-1][-1]


@settings(deadline=None, max_examples=300)
@given(PHRASES, st.lists(PHRASES, min_size=1, max_size=3))
def test_measures_of_text_are_the_best_over_references(prediction: str, references: list[str]) -> None:
    found = text_metrics(prediction, references)
    predicted = slow_normal(prediction)
    truths = [slow_normal(reference) for reference in references]
    assert found["exact_match"] == any(predicted == truth for truth in truths)
    assert found["substring_exact_match"] == any(" ".join(truth) in " ".join(predicted) for truth in truths)
    f1 = []
    for truth in truths:
        rest, same = list(truth), 0
        for word in predicted:
            if word in rest:
                rest.remove(word)
                same += 1
        whole = {" ".join(predicted), " ".join(truth)} & {"yes", "no", "noanswer"}
        precision, recall = same / max(len(predicted), 1), same / max(len(truth), 1)
        f1.append(0 if not same or (whole and predicted != truth) else 2 * precision * recall / (precision + recall))
    assert found["f1"] == pytest.approx(max(f1))


def test_measures_of_text_by_hand() -> None:
    found = text_metrics("It was the United States, I think.", ["USA", "United States of America", "united states"])
    assert (found["exact_match"], found["substring_exact_match"]) == (0.0, 1.0)
    assert found["f1"] == pytest.approx(2 * 2 / (6 + 2))
    assert text_metrics("yes it is", "yes")["f1"] == 0.0 and text_metrics("Yes.", "yes")["f1"] == 1.0
    # Groups of aliases count like single references.
    assert text_metrics("beta", [["alpha"], ["beta", "gamma"]])["exact_match"] == 1.0
    assert ruler_recall("I saw 12 and ABC", ["12", "abc", "99", "aBc"]) == 0.75


@given(st.lists(st.sampled_from("abcd"), max_size=80), st.lists(st.sampled_from("abcde"), max_size=80))
def test_common_subsequence_is_that_of_the_table(a: list[str], b: list[str]) -> None:
    assert common_subsequence(a, b) == common_subsequence(b, a) == slow_lcs(a, b)


def test_rouge_by_hand() -> None:
    # Stems: police kill the gunman | the gunman kill police. Longest in common: "the gunman".
    f1, recall = rouge_l("The gunman kills police", "Police killed the gunman!")
    assert (f1, recall) == (0.5, 0.5)
    # Words of three letters are not stemmed, those of four are; letters outside a to z part words.
    assert rouge_l("was", "wa") == (0.0, 0.0) and rouge_l("runs", "run")[0] == 1.0
    assert rouge_l("café", "caf")[0] == 1.0
    assert rouge_l("", "a") == rouge_l("a", "") == rouge_l("!", "?") == (0.0, 0.0)
    f1, recall = rouge_l("a b c d", "a c")
    assert recall == 1.0 and f1 == pytest.approx(2 * 0.5 / 1.5)


# Words of Porter's paper, and from "sky" on where NLTK goes its own way.
STEMS = """
caresses caress, ponies poni, agreed agre, plastered plaster, motoring motor, conflated conflat, hopping hop,
falling fall, filing file, relational relat, digitizer digit, formaliti formal, electriciti electr, adoption adopt,
controll control, roll roll, rate rate, cease ceas, sky sky, dies die, flies fli, died die, spied spi,
enjoy enjoy, happy happi, dying die, skies sky, theologi theolog, awfulli aw, is is, news news, ies i
"""


@pytest.mark.parametrize("pair", [pair.strip() for pair in STEMS.split(",")])
def test_stems(pair: str) -> None:
    word, stemmed = pair.split()
    assert stem(word) == stemmed


@settings(max_examples=300)
@given(PHRASES, st.sampled_from(["Answer:", "label:", "Corresponding value:"]))
def test_parsed_answers_are_those_of_helmets_patterns(text: str, mark: str) -> None:
    def strip_mark(found: str) -> str:
        return re.sub(f"^{re.escape(mark)}", "", found.strip(), flags=re.IGNORECASE).strip()

    for pattern in (f"(?:{mark})(.*)(?:\n|$)", "(?:^)(.*)(?:\n|$)"):
        if match := re.search(pattern, text, re.IGNORECASE):
            assert parse_answer(text, mark) == strip_mark(match[1])
            break


def test_parsed_answers_by_hand() -> None:
    assert parse_answer("Well.\nanswer: Paris \nAnswer: Rome") == "Paris"
    assert parse_answer("Answer: answer: Paris") == "Paris"
    assert parse_answer("Paris\nmore") == "Paris" and parse_answer("\nParis") == "" and parse_answer("") == ""


# -- rankings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ranking"),
    [
        ("Ranking: ID3 > ID1 > ID2", ["3", "1", "2"]),
        ("[ID: 12]>[ID: 7] >3", ["12", "7", "3"]),
        ("Ranking: 4 > 4 > 2 > 4", ["4", "2"]),  # a repeated document keeps its first place
        ("1 > 2\n3 > 4 > 5", ["3", "4", "5"]),  # the longest chain
        ("11 > 2 and 33 > 4", ["11", "2"]),  # of two as long the first
        ("12345 and 1 > 2", ["12345"]),  # length is in characters
        ("7", ["7"]),
        ("none of them", ["none of them"]),
        ("", [""]),
    ],
)
def test_rankings(text: str, ranking: list[str]) -> None:
    assert parse_ranking(text) == ranking


def slow_ndcg(ranking: list[str], relevance: dict[str, int], k: int) -> float:
    gain = sum(relevance.get(ranking[i], 0) / math.log(i + 2, 2) for i in range(min(k, len(ranking))))
    best = sorted(relevance.values())[::-1]
    ideal = sum(best[i] / math.log(i + 2, 2) for i in range(min(k, len(best))))
    return gain / ideal if ideal else 0.0


@given(
    st.permutations([str(i) for i in range(14)]),
    st.lists(st.integers(0, 3), min_size=12, max_size=12),
    st.integers(1, 14),
)
def test_ndcg_is_its_formula(ranking: list[str], labels: list[int], k: int) -> None:
    relevance = {str(i): label for i, label in enumerate(labels)}
    assert ndcg(ranking[:k], relevance, 10) == pytest.approx(slow_ndcg(ranking[:k], relevance, 10))


def test_ndcg_by_hand() -> None:
    relevance = {"a": 3, "b": 1, "c": 0}
    ideal = 3 + 1 / math.log2(3)
    assert ndcg(["a", "b"], relevance, 10) == pytest.approx(1.0)
    assert ndcg(["b", "a"], relevance, 10) == pytest.approx((1 + 3 / math.log2(3)) / ideal)
    # An unknown document holds its place, and the cut is at k.
    assert ndcg(["x", "a"], relevance, 10) == pytest.approx(3 / math.log2(3) / ideal)
    assert ndcg(["x", "a"], relevance, 1) == 0.0
    assert ndcg(["a"], {"a": 0}, 10) == 0.0 and ndcg([""], relevance, 10) == 0.0


# -- citations --------------------------------------------------------------------------------------------------------


def test_alces_strings() -> None:
    text = clean("Born in 1966 [1][2].\n\nIn The Hague [3].<|im_end|>")
    assert text == "Born in 1966 [1][2]. In The Hague [3]."
    assert remove_citations(text) == "Born in 1966. In The Hague."
    assert str_em(remove_citations(text), [["1966", "66th"], ["the Hague"], ["Delft"]]) == pytest.approx(2 / 3)
    assert qampari_items("a, The b , c.,") == ["a", "The b", "c."]
    answers = [["Alpha"], ["beta", "b"], ["gamma"], ["d"], ["e"], ["f"], ["g"]]
    assert qampari_recall_top5("alpha, the B, delta.", answers) == 2 / 5
    assert qampari_recall_top5("alpha, b, gamma, d, e, f, g", answers) == 1.0
    # An item must be the answer, not hold it.
    assert qampari_recall_top5("the alphabet", answers) == 0.0 and qampari_recall_top5("", answers) == 0.0


DOCUMENTS = [
    {"title": t, "text": x} for t, x in (("One", "red"), ("Two", "blue"), ("Three", "red blue"), ("Four", "grey"))
]


def entails(passage: str, claim: str) -> bool:
    """A passage entails a claim when it has all its colours."""
    return all(word in passage for word in claim.rstrip(".").split() if word in ("red", "blue", "grey", "green"))


@pytest.mark.parametrize(
    ("said", "recall", "precision"),
    [
        (["It is red [1]."], 1.0, 1.0),
        (["It is red [2]."], 0.0, 0.0),
        (["It is red blue [1][2]."], 1.0, 1.0),  # neither alone, each needed
        (["It is red [1][4]."], 1.0, 0.5),  # the second adds nothing
        (["It is red [1][3]."], 1.0, 1.0),  # either alone would do
        (["It is red blue [4][1][2]."], 1.0, 2 / 3),
        (["It is green [1].", "It is red [1]."], 0.5, 0.5),
        (["It is red.", "It is blue [2]."], 0.5, 1.0),  # nothing cited costs recall only
        (["It is red [1][9]."], 0.0, 0.0),  # a document that is not there
        (["It is red [0]."], 0.0, 0.0),
        (["It is grey [1][2][3][4]."], 0.0, 0.0),  # three citations count, the fourth would help
        ([], 0.0, 0.0),
    ],
)
def test_citations(said: list[str], recall: float, precision: float) -> None:
    assert citation_scores(said, DOCUMENTS, entails) == (pytest.approx(recall), pytest.approx(precision))


def test_what_is_to_be_supported() -> None:
    pytest.importorskip("punkt")
    assert statements("1. It is red [1]. So is Dr. Blue [2].", "q", listed=False)[-1] == "So is Dr. Blue [2]."
    assert statements("A [1], B [2].", "Which?", listed=True) == ["Which? A [1]", "Which? B [2]"]


# -- whole answers ----------------------------------------------------------------------------------------------------


def scored(name: str, text: str, gold: object, prefix: str = "Answer:", **kept: object) -> dict[str, float]:
    return dict(score(DATASETS[name], Example("q", "", gold, kept=kept), text, prefix).metrics)  # type: ignore[arg-type]


def test_each_data_set_reads_answers_in_its_own_way() -> None:
    # The whole output counts as well as the parsed line: here only the whole has it.
    assert scored("kilt_nq", " I say\nParis", ["Paris"])["substring_exact_match"] == 1.0
    assert scored("infbench_qa_eng", " Paris\nand much more of it", ["Paris"])["rougeL_f1"] == 1.0
    # A label must stand alone on its line.
    assert scored("icl_nlu", " 12\n\n7", "12", "label:")["exact_match"] == 1.0
    assert scored("icl_nlu", " 12 or 7", "12", "label:")["exact_match"] == 0.0
    assert scored("icl_nlu", "The label: 12", "12", "")["exact_match"] == 1.0
    assert scored("json_kv", "corresponding value: ab", "ab", "")["exact_match"] == 1.0
    # A letter, the option after its letter, but not the option alone.
    gold = ["B", "B. The cat"]
    assert [
        scored("infbench_choice_eng", text, gold)["exact_match"]
        for text in (" B", " b.", " It is B. the cat", " cat", " C")
    ] == [1.0, 1.0, 1.0, 0.0, 0.0]
    ranks = [["5", "1"], ["6", "0"]]
    assert scored("msmarco_rerank_psg", " 6 > 5", "", "Ranking:", qrel=ranks)["NDCG@10"] == round(1 / math.log2(3), 5)
    # With the start of the answer before it, the first item of a list is never one of QAMPARI's; so it is in HELMET.
    assert scored("alce_qampari", " x, y", [["x"], ["y"]])["qampari_rec_top5"] == 0.5
    assert scored("alce_qampari", "x, y", [["x"], ["y"]], "")["qampari_rec_top5"] == 1.0


@pytest.mark.parametrize("name", DATASETS)
def test_an_empty_answer_scores_zero(name: str) -> None:
    # Each reference is in the start of the answer, or normalises to nothing.
    gold: object = [["Answer"], ["the"]] if name.startswith("alce") else ["Answer", "the"]
    metrics = scored(name, " \n", gold, "Answer:", qrel=[["answer", "1"]])
    assert metrics[DATASETS[name].metric] == 0.0 and not any(metrics.values())


def test_a_new_line_ends_an_answer() -> None:
    assert first_line("a b\nc") == "a b" and first_line("\nc") == ""


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('Fine. {"fluency": 1, "x": [1]}', {"fluency": 1}),
        ('{"fluency": 0} no, {"fluency": 1}', {"fluency": 1}),
        ('```json\n{"a": {"b": 1}, "fluency": 1}\n```', {"fluency": 1}),
        ('{"fluency": "1"}', None),
        ('{"fluency": true}', None),
        ('{"fluent": 1}', None),
        ("{fluency: 1}", None),
        ("", None),
    ],
)
def test_verdicts(text: str, verdict: dict[str, float] | None) -> None:
    if verdict is None:
        with pytest.raises(NoVerdict):
            read_verdict(text, ("fluency",))
    else:
        assert read_verdict(text, ("fluency",)) == verdict
