"""HELMET's files read, its questions drawn and its prompts made; and what is said of bad files."""

import json
import random
import resource
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from helmet_files import Files, make_files, read_lines, write_lines
from ruler_fixtures import ESSAY, tokenizer
from transformers import PreTrainedTokenizerFast

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Answer
from megatron_lengthgen.evaluation.helmet import draw
from megatron_lengthgen.evaluation.helmet.cut import cut_to_fit
from megatron_lengthgen.evaluation.helmet.data import Helmet
from megatron_lengthgen.evaluation.helmet.datasets import CATEGORIES, DATASETS, LONGEST, parse_datasets
from megatron_lengthgen.evaluation.helmet.extend import helmet_extend
from megatron_lengthgen.evaluation.helmet.files import Archive, present
from megatron_lengthgen.evaluation.helmet.hub import HubSets
from megatron_lengthgen.evaluation.helmet.shorten import OMITTED, Shortener
from megatron_lengthgen.evaluation.prompt import PromptEncoder, load_tokenizer

LENGTH = 4096
ICL_LABELS = {"trec_coarse": 6, "trec_fine": 50, "banking77": 77, "clinic150": 151, "nlu": 68}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("helmet"), [LENGTH])


def make_helmet(files: Files, *, chat: bool = False, **more: Any) -> Helmet:
    hub = HubSets({name: str(path) for name, path in files.sets.items()})
    encoder = PromptEncoder(tokenizer(bos=True), chat=chat)
    return Helmet(Archive.at(str(files.data), None), hub, encoder, lengths=[LENGTH, 2 * LENGTH], **more)


@pytest.fixture(scope="module")
def helmet(files: Files) -> Helmet:
    return make_helmet(files)


# -- drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_rows_come_in_the_order_of_datasets(count: int) -> None:
    from datasets import Dataset

    rows = Dataset.from_dict({"at": list(range(count))})
    assert draw.order(count, 5) == rows.shuffle(seed=5)["at"][:]
    if count > 1:
        split = rows.train_test_split(test_size=0.1, seed=42)
        assert draw.parts(count, 0.1, 42) == (split["train"]["at"][:], split["test"]["at"][:])


def test_demonstrations_follow_from_the_question() -> None:
    keys = ["a", "b", "a", "c", "d", "b"] * 3
    first = draw.demonstrations(keys, 3, draw.text_seed("what?"))
    assert first == draw.demonstrations(keys, 3, draw.text_seed("what?"))
    assert len({keys[at] for at in first}) == 3
    drawn = {tuple(draw.demonstrations(keys, 3, draw.text_seed(text))) for text in map(str, range(20))}
    assert len(drawn) > 10
    assert len(draw.demonstrations(["a", "a"], 2, 1)) == 1


def test_a_text_s_seed_is_that_of_its_sha256() -> None:
    # int(sha256(b"abc").hexdigest(), 16) % 2**31, from the published digest of "abc".
    assert draw.text_seed("abc") == 0xF20015AD % 2**31
    assert draw.text_seed("abc", 42) == (0xF20015AD + 42) % 2**31


@pytest.mark.parametrize("count", [1, 6, 13, 100])
def test_balanced_rows(count: int) -> None:
    labels = [number % 6 if number < 50 else 0 for number in range(80)]
    rows = draw.balanced(labels, count, 3)
    assert len(rows) == count
    for start in range(0, count - 5, 6):
        assert sorted(labels[row] for row in rows[start : start + 6]) == list(range(6))
    # No row comes again before all of its label have come.
    for label in range(6):
        of_label = [row for row in rows if labels[row] == label]
        size = labels.count(label)
        assert len(set(of_label[-(len(of_label) % size) :])) == len(of_label) % size or not len(of_label) % size


# -- prompts ----------------------------------------------------------------------------------------------------------


def test_prompts_are_made_of_the_rows(files: Files, helmet: Helmet) -> None:
    dataset = DATASETS["kilt_nq"]
    rows = read_lines(files.data / dataset.file_at(LENGTH))
    demos = read_lines(files.data / dataset.demo_file)
    keys = random.Random(42).sample(sorted({row["question"] for row in rows}), 3)
    assert helmet.size(dataset, LENGTH) == sum(row["question"] in keys for row in rows) == 6

    def passages(row: dict[str, Any]) -> str:
        return "\n\n".join("Document (Title: {title}): {text}".format(**ctx) for ctx in row["ctxs"])

    row = rows[1]
    order = draw.order(len(demos), draw.text_seed(row["question"]))[:2]
    shown = "".join(
        f"{passages(demos[at])}\n\nQuestion: {demos[at]['question']}\nAnswer: {demos[at]['answers'][0]}\n\n"
        for at in order
    )
    question = helmet.sample(dataset, LENGTH, 1)
    assert question.body.endswith(f"[answer]\n\n{shown}{passages(row)}\n\nQuestion: {row['question']}")
    assert question.answer_prefix == "\nAnswer:" and question.outputs == tuple(row["answers"])
    assert question.depths == (1.0,) and question.cut_tokens == 0
    assert question.length == len(question.prompt_ids) + 20 <= LENGTH
    assert helmet.encoder.decode(question.prompt_ids) == question.body + question.answer_prefix


def test_a_question_is_not_its_own_demonstration(helmet: Helmet) -> None:
    for name in ("kilt_popqa", "msmarco_rerank_psg", "infbench_qa_eng"):
        for index in range(helmet.size(DATASETS[name], LENGTH)):
            example = helmet.example(DATASETS[name], LENGTH, index)
            shown = example.values["demo" if name == "infbench_qa_eng" else "demos"]
            mark = "Query: " if name.startswith("msmarco") else "Question: "
            assert shown.count(mark) == 2 and f"{mark}{example.question}\n" not in shown


def test_popqa_asks_of_what_few_look_up(files: Files, tmp_path: Path) -> None:
    other = make_files(tmp_path, [LENGTH])
    dataset = DATASETS["kilt_popqa"]
    path = other.data / dataset.file_at(LENGTH)
    rows = read_lines(path)
    for row in rows[:2]:
        row["s_pop"] = 1000
    write_lines(path, rows)
    found = make_helmet(other)
    asked = {found.example(dataset, LENGTH, at).kept["id"] for at in range(found.size(dataset, LENGTH))}
    assert asked == {row["id"] for row in rows[2:]}


def test_ranked_demonstrations(helmet: Helmet) -> None:
    example = helmet.example(DATASETS["msmarco_rerank_psg"], LENGTH, 0)
    for shown in example.values["demos"].strip().split("\n\nQuery: ")[1:]:
        assert shown.split("\n")[1].startswith("Ranking: ") and shown.split("\n\n")[0].count(" > ") == 3
    assert "[ID: " in example.context and "Title" not in example.context
    by_label = sorted(example.kept["qrel"], key=lambda pair: -int(pair[1]))
    assert example.gold == " > ".join(pair[0] for pair in by_label)


@pytest.mark.parametrize("name", ICL_LABELS)
def test_classification_by_examples(files: Files, helmet: Helmet, name: str) -> None:
    dataset = DATASETS[f"icl_{name}"]
    split = files.sets["trec" if "trec" in name else name] / "train.jsonl"
    field = {"trec_coarse": "coarse_label", "trec_fine": "fine_label", "clinic150": "intent"}.get(name, "label")
    true = {row["text"]: row[field] for row in read_lines(split)}
    numbers: set[tuple[str, ...]] = set()
    for index in range(2):
        example = helmet.example(dataset, LENGTH, index)
        items = [item.rsplit("\nlabel: ", 1) for item in example.context.split("\n\n")]
        assert len(items) == dataset.size(LENGTH)
        codes: dict[int, set[str]] = {}
        for text, code in items:
            codes.setdefault(true[text], set()).add(code)
        # Each label has one number, another for each question, and the answer is in it.
        assert all(len(code) == 1 for code in codes.values()) and len(codes) == ICL_LABELS[name]
        assert sorted(int(code) for (code,) in codes.values()) == list(range(ICL_LABELS[name]))
        assert {example.gold} == codes[example.kept[field]]
        numbers.add(tuple(code for _, code in items[:40]))
    assert len(numbers) == 2


def test_longer_than_helmets_own() -> None:
    assert DATASETS["icl_nlu"].size(4 * 131072) == 4 * 8296 and DATASETS["json_kv"].size(262144) == 3600
    assert DATASETS["ruler_niah_mv"].file_at(262144) == "ruler/niah_multivalue/validation_262144.jsonl"
    for name, length in (("kilt_nq", 262144), ("icl_nlu", 5000), ("narrativeqa", 262144)):
        with pytest.raises(UserError, match=f"{name} has no data for length {length}: HELMET's lengths are 4K, 8K"):
            DATASETS[name].size(length)


def test_recall_beyond_the_archive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files that are made for 256K are read as HELMET's own; needles fill the length and are not cut."""
    longer = 2 * LONGEST
    PreTrainedTokenizerFast(tokenizer_object=tokenizer(bos=True).backend_tokenizer, bos_token="<s>").save_pretrained(
        tmp_path / "tokenizer"
    )
    (tmp_path / "essays").mkdir()
    (tmp_path / "essays" / "one.txt").write_text(ESSAY * 3)
    options = Namespace(
        data=str(tmp_path / "data"),
        lengths="256k",
        tokenizer=str(tmp_path / "tokenizer"),
        rows=3,
        essays=str(tmp_path / "essays"),
    )
    helmet_extend(options)
    names = [d.name for d in DATASETS.values() if d.category == "recall"]
    before = {name: (tmp_path / "data" / DATASETS[name].file_at(longer)).read_bytes() for name in names}
    archive = Archive.at(options.data, None)
    assert present(archive, parse_datasets(["recall"]), [longer], False)[1] == []
    data = Helmet(archive, HubSets({}), PromptEncoder(load_tokenizer(options.tokenizer)), lengths=[longer])
    for name in names:
        dataset = DATASETS[name]
        assert data.size(dataset, longer) == 3
        for index in range(3):
            question = data.sample(dataset, longer, index)
            assert all(output in question.example.context for output in question.outputs)
            if name != "json_kv":  # whose pairs are counted, as in HELMET, and not its tokens
                assert question.cut_tokens == 0
                assert 0.97 * longer <= question.length <= longer
    rows = [json.loads(line) for line in before["json_kv"].splitlines()]
    for row in rows:
        pairs = json.loads(row["context"].removeprefix("JSON data:\n"))
        assert len(pairs) == row["num_kvs"] == 3600 and pairs[row["question"]] == row["answer"]
        assert list(pairs).index(row["question"]) == round(row["depth"] * 3599)
        assert all(pairs[key] == value and key != row["question"] for key, value in row["demos"])
    assert [row["depth"] for row in rows] == [0, 0.2, 0.4]

    (tmp_path / "data" / DATASETS["json_kv"].file_at(longer)).unlink()
    helmet_extend(options)
    assert "kept" in capsys.readouterr().err
    for name in names:
        assert (tmp_path / "data" / DATASETS[name].file_at(longer)).read_bytes() == before[name]
    with pytest.raises(UserError, match="--lengths has 131072, and HELMET's archive has files up to 131072"):
        helmet_extend(Namespace(**vars(options) | {"lengths": "128k,256k"}))
    with pytest.raises(UserError, match=r"test_k7200_dep6\.jsonl is missing.* helmet-extend makes it"):
        present(archive, parse_datasets(["json_kv"]), [4 * LONGEST], False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "--rows must be positive, got 0"),
        ({"lengths": "256kb"}, "--lengths takes whole numbers of tokens"),
        ({"lengths": "4k"}, r"--lengths has 4096, and HELMET's archive has files up to 131072: give longer ones"),
        ({"tokenizer": "/nowhere"}, "--tokenizer /nowhere does not exist"),
        ({"essays": "/nowhere"}, "--essays /nowhere does not exist"),
    ],
)
def test_recall_beyond_the_archive_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "essay.txt").write_text(ESSAY)
    usual = {"lengths": "256k", "rows": 1, "tokenizer": str(tmp_path / "tokenizer")}
    usual |= {"data": str(tmp_path / "data"), "essays": str(tmp_path / "essay.txt")}
    with pytest.raises(UserError, match=message):
        helmet_extend(Namespace(**usual | changes))
    assert not (tmp_path / "data").exists()


def test_recall_beyond_the_archive_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "essay.txt").write_text(ESSAY)
    # Short lengths would do, were they not HELMET's own.
    monkeypatch.setattr("megatron_lengthgen.evaluation.helmet.extend.LONGEST", 8191)
    options = Namespace(
        lengths="8k",
        rows=2,
        tokenizer=str(tmp_path / "tokenizer"),
        data=str(tmp_path / "data"),
        essays=str(tmp_path / "essay.txt"),
    )
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Room for two rows of some files, and for one of others.
    resource.setrlimit(resource.RLIMIT_FSIZE, (25_000, before[1]))
    try:
        with pytest.raises(
            UserError, match=r"cannot write .*jsonl: File too large; files that are whole stay, so mend"
        ):
            helmet_extend(options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)

    def files() -> dict[Path, list[Any]]:
        paths = [path for path in (tmp_path / "data").rglob("*") if path.is_file()]
        return {path: [json.loads(line) for line in path.read_text().splitlines()] for path in paths}

    kept = files()
    assert 0 < len(kept) < 4 and all(len(rows) == 2 for rows in kept.values())
    helmet_extend(options)
    assert len(files()) == 4 and files().items() >= kept.items()


def test_long_texts(files: Files, helmet: Helmet) -> None:
    dataset = DATASETS["narrativeqa"]
    # Of three texts one is too short to be asked about.
    assert helmet.size(dataset, LENGTH) == 2
    example = helmet.example(dataset, LENGTH, 0)
    assert example.context.endswith(OMITTED) and example.shortened > 120_000
    assert helmet.encoder.count([example.context])[0] == pytest.approx(LENGTH - 300, abs=3)
    assert example.values["demo"].count("Question: ") == 2
    choice = helmet.example(DATASETS["infbench_choice_eng"], LENGTH, 1)
    letter = str(choice.gold[0])
    assert f"{letter}. {choice.gold[1].split('. ')[1]}" in choice.values["options"].split("\n")
    assert choice.values["options"] == "A. Ann\nB. Bob\nC. Cem\nD. Dora"
    cases = [helmet.example(DATASETS["multi_lexsum"], LENGTH, at) for at in range(3)]
    assert [case.kept["id"] for case in cases] == ["case1", "case2", "case3"]  # case0 has no short summary


def test_a_shortener_counts_as_helmet_does() -> None:
    made = tokenizer(bos=True)
    text = ESSAY[:2000]
    ids = made(text)["input_ids"]
    found, left_out = Shortener(made, [50]).shorten(text, 50)
    mark = len(made(OMITTED)["input_ids"])
    assert found == text[: made(text, return_offsets_mapping=True)["offset_mapping"][50 - mark][1]] + OMITTED
    assert left_out == len(ids) - 50 + mark
    assert Shortener(made, [len(ids)]).shorten(text, len(ids)) == (text, 0)


@pytest.mark.parametrize("place", ["middle", "end"])
def test_a_prompt_that_does_not_fit_keeps_its_question(place: str) -> None:
    encoder = PromptEncoder(tokenizer(bos=True))
    context = f"first {ESSAY} last"
    whole = len(encoder.encode(f"Read: {context}\n\nWhy?", ""))

    def encode(text: str) -> list[int]:
        return encoder.encode(f"Read: {text}\n\nWhy?", "")

    cut = cut_to_fit(encode, encoder.tokenizer, context, 150, place, "it")
    assert len(cut.ids) <= 150 <= len(cut.ids) + 3 and encoder.decode(cut.ids).endswith("\n\nWhy?")
    assert cut.tokens == pytest.approx(whole - len(cut.ids), abs=3)
    assert cut.context.startswith("first ") and cut.context.endswith(" last") == (place == "middle")
    assert cut_to_fit(encode, encoder.tokenizer, context, whole, place, "it").tokens == 0
    with pytest.raises(
        UserError, match="it does not fit: without its context the prompt already has more than 5 tokens"
    ):
        cut_to_fit(encode, encoder.tokenizer, context, 5, place, "it")


def test_a_cut_says_which_references_it_lost(files: Files, tmp_path: Path) -> None:
    row = {"query": "k", "type_needle_v": "numbers", "outputs": ["1234", "777", "absent"]}
    filler = " ".join(["It is safe."] * 2000)
    write_lines(
        tmp_path / f"ruler/niah_multivalue/validation_{LENGTH}.jsonl",
        [row | {"context": f"777 {filler} 1234 {filler} end"}],
    )
    encoder = PromptEncoder(tokenizer())
    found = {}
    for place in ("middle", "end"):
        made = Helmet(Archive.at(str(tmp_path), None), HubSets(), encoder, lengths=[LENGTH], place=place)
        question = made.sample(DATASETS["ruler_niah_mv"], LENGTH, 0)
        found[place] = question.lost
        record = made.record(DATASETS["ruler_niah_mv"], question, Answer("777", 2, False))
        assert record["cut_tokens"] == question.cut_tokens > 0 and record["lost_references"] == 1
        assert question.length <= LENGTH and question.body.endswith("mentioned in the provided text?")
    assert found == {"middle": 1, "end": 1}


def test_chat_prompts_end_with_the_assistants_turn(files: Files) -> None:
    chat = PromptEncoder(tokenizer(), chat=True)
    helmet = make_helmet(files)
    helmet = Helmet(helmet.archive, helmet.hub, PromptEncoder(tokenizer()), chat={"alce_asqa": chat}, lengths=[LENGTH])
    cited, plain = (helmet.sample(DATASETS[name], LENGTH, 0) for name in ("alce_asqa", "kilt_nq"))
    assert cited.answer_prefix == "" and chat.decode(cited.prompt_ids).endswith("assistant\n")
    assert plain.answer_prefix == "\nAnswer:" and helmet.chats(DATASETS["alce_asqa"])
    record = helmet.record(DATASETS["alce_asqa"], cited, Answer("So [1].", 3, False))
    assert record["output"] == "So [1]."
    assert helmet.request(DATASETS["alce_asqa"], cited).stop_ids == chat.stop_ids


def test_a_new_line_stops_where_it_should(helmet: Helmet) -> None:
    newline = set(helmet.encoder.tokenizer.encode("\n", add_special_tokens=False))
    for name, dataset in DATASETS.items():
        stop = helmet.request(dataset, helmet.sample(dataset, LENGTH, 0)).stop_ids
        expected = dataset.category in ("rag", "rerank", "icl")
        assert (newline <= stop) == expected, name
        assert helmet.encoder.stop_ids <= stop
    dataset = DATASETS["kilt_nq"]
    question = helmet.sample(dataset, LENGTH, 0)
    record = helmet.record(dataset, question, Answer(f" {question.outputs[0]}\nQuestion: more", 20, True))
    assert record["pred"] == f" {question.outputs[0]}" and record["finish"] == "stop" and record["score"] == 1.0


def test_tasks_by_name() -> None:
    assert [d.name for d in parse_datasets(["icl_nlu", "rerank"])] == ["msmarco_rerank_psg", "icl_nlu"]
    assert len(parse_datasets(["all"])) == 21 and len(CATEGORIES) == 7
    with pytest.raises(UserError, match=r"unknown HELMET category or data set 'reall' \(did you mean 'recall'"):
        parse_datasets(["reall"])
    with pytest.raises(UserError, match="--tasks names nothing"):
        parse_datasets([])


# -- bad files --------------------------------------------------------------------------------------------------------


def test_a_missing_file(files: Files, tmp_path: Path) -> None:
    broken = make_files(tmp_path, [LENGTH])
    path = broken.data / DATASETS["kilt_nq"].file_at(LENGTH)
    renamed = path.with_name(path.name.replace("k20", "k20v2"))
    path.rename(renamed)
    archive = Archive.at(str(broken.data), None)
    wanted = parse_datasets(["rag", "rerank"])
    with pytest.raises(UserError) as error:
        present(archive, wanted, [LENGTH], skip_missing=False)
    said = str(error.value)
    assert said.startswith(f"{path} is missing, which kilt_nq at 4K needs")
    assert f"beside it lies {renamed.name}: was it renamed?" in said
    assert "what can run: --tasks rerank,kilt_triviaqa,kilt_hotpotqa,kilt_popqa" in said
    kept, left_out = present(archive, wanted, [LENGTH], skip_missing=True)
    assert [d.name for d in kept] == [d.name for d in wanted if d.name != "kilt_nq"]
    assert len(left_out) == 1 and left_out[0].startswith("kilt_nq: ")
    with pytest.raises(UserError, match="kilt_nq at 4K needs"):
        present(archive, wanted[:1], [LENGTH], skip_missing=True)
    (tmp_path / "prompts/asqa_revised.json").unlink()
    with pytest.raises(UserError, match=r"prompts/asqa_revised.json of HELMET's repository is needed: give --helmet"):
        present(archive, parse_datasets(["cite"]), [LENGTH], skip_missing=False)
    with pytest.raises(UserError, match="--data /nowhere is not a directory"):
        Archive.at("/nowhere", None)


def test_lines_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / f"ruler/niah_multikey_2/validation_{LENGTH}.jsonl"
    good = {"query": "k", "type_needle_v": "number", "context": "c", "outputs": ["1"]}
    encoder = PromptEncoder(tokenizer())

    def read() -> int:
        helmet = Helmet(Archive.at(str(tmp_path), None), HubSets(), encoder, lengths=[LENGTH])
        return helmet.size(DATASETS["ruler_niah_mk_2"], LENGTH)

    write_lines(path, [good, good])
    assert read() == 2
    with open(path, "a", encoding="utf-8") as file:
        file.write('\n{"query": "k", \n')
    with pytest.raises(UserError, match=r"validation_4096.jsonl, line 4 is not JSON"):
        read()
    write_lines(path, [good, {key: value for key, value in good.items() if key != "type_needle_v"}])
    with pytest.raises(
        UserError, match="line 2: no field type_needle_v among context, outputs, query; is this another v"
    ):
        read()
    write_lines(path, [{key: value for key, value in good.items() if key != "outputs"}])
    with pytest.raises(UserError, match="line 1: no field answer or outputs among"):
        read()
    path.write_text("[1]\n", encoding="utf-8")
    with pytest.raises(UserError, match="line 1 is not a JSON object"):
        read()
    path.write_text("", encoding="utf-8")
    with pytest.raises(UserError, match="holds no rows"):
        read()


def test_labels_that_do_not_match(tmp_path: Path) -> None:
    rows = [{"text": "a", "coarse_label": 0}, {"text": "b", "coarse_label": 6}]
    write_lines(tmp_path / "train.jsonl", rows)
    write_lines(tmp_path / "test.jsonl", rows)
    encoder = PromptEncoder(tokenizer())

    def read(dataset: str) -> int:
        helmet = Helmet(Archive(None, None), HubSets({"trec": str(tmp_path)}), encoder, lengths=[LENGTH])
        return helmet.size(DATASETS[dataset], LENGTH)

    with pytest.raises(UserError, match="trec, split train, row 1: coarse_label is 6, not a number from 0 to 5"):
        read("icl_trec_coarse")
    with pytest.raises(UserError, match="no field fine_label among coarse_label, text"):
        read("icl_trec_fine")
    write_lines(tmp_path / "train.jsonl", [{"text": "a", "coarse_label": "ABBR"}])
    with pytest.raises(UserError, match="coarse_label is 'ABBR', not a number"):
        read("icl_trec_coarse")


def test_sets_from_the_hub(tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    from datasets import Dataset, DatasetDict

    rows = read_lines(files.sets["trec"] / "test.jsonl")
    splits = DatasetDict({"test": Dataset.from_list(rows)})
    splits.save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "parquet").mkdir()
    splits["test"].to_parquet(str(tmp_path / "parquet" / "test.parquet"))
    for folder in ("saved", "parquet"):
        found = HubSets.parse([f"trec={tmp_path / folder}"]).rows("trec", "test", ("text",))
        assert list(found) == rows
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: (_ for _ in ()).throw(ConnectionError("no network")))
    with pytest.raises(
        UserError, match=r"cannot load nlu \(xingkun.*no network.*--set nlu=DIR, with a file train.jsonl"
    ):
        HubSets().rows("nlu", "train", ("text",))
    for option, message in (
        ("trek=x", "did you mean 'trec'"),
        ("trec", "--set takes NAME=PATH"),
        ("trec=", "got 'trec='"),
    ):
        with pytest.raises(UserError, match=message):
            HubSets.parse([option])
    with pytest.raises(UserError, match="--set trec=/nowhere is not a directory"):
        HubSets({"trec": "/nowhere"}).rows("trec", "test", ())


def test_an_answer_that_is_no_option(tmp_path: Path, files: Files) -> None:
    source = files.sets["infinitebench"] / "longbook_choice_eng.jsonl"
    rows = read_lines(source)
    for row in rows:
        row["answer"] = ["Eve"]
    write_lines(tmp_path / "longbook_choice_eng.jsonl", rows)
    encoder = PromptEncoder(tokenizer())
    helmet = Helmet(Archive(None, None), HubSets({"infinitebench": str(tmp_path)}), encoder, lengths=[LENGTH])
    with pytest.raises(UserError, match="has the answer 'Eve' among the options"):
        helmet.example(DATASETS["infbench_choice_eng"], LENGTH, 0)


@pytest.mark.parametrize(
    ("name", "field", "value", "words"),
    [
        ("kilt_nq", "ctxs", [{"body": "x"}], r"dep6.jsonl\), question 0, is not .* \(KeyError: 'title'\)"),
        ("kilt_popqa", "s_pop", "many", r"dep6.jsonl\) is not .*TypeError"),
        ("msmarco_rerank_psg", "ctxs", [{"id": "1", "text": "x", "label": "high"}], "'high'"),
        ("json_kv", "demos", ["a"], "ValueError"),
        ("json_kv", "answer", None, "NoneType"),
        ("ruler_niah_mk_2", "context", None, "its context or a reference is no text"),
    ],
)
def test_rows_of_another_form(tmp_path: Path, name: str, field: str, value: Any, words: str) -> None:
    files = make_files(tmp_path, [8192])
    path = files.data / DATASETS[name].file_at(8192)
    write_lines(path, [row | {field: value} for row in read_lines(path)])
    with pytest.raises(UserError, match=f"^{name} at 8K .*{words}.*is this another version of the data"):
        make_helmet(files).example(DATASETS[name], 8192, 0)
