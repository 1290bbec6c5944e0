"""HELMET from the command line to reports and its own result files; a judge, citations, and a run that is continued."""

import http.server
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helmet_files import Files, make_files, read_lines
from ruler_fixtures import save_model, tokenizer

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Request
from megatron_lengthgen.evaluation.helmet import command
from megatron_lengthgen.evaluation.helmet.chat import ChatClient
from megatron_lengthgen.evaluation.helmet.datasets import CATEGORIES, DATASETS
from megatron_lengthgen.evaluation.helmet.entailment import Seq2SeqEntailment
from megatron_lengthgen.evaluation.prompt import PromptEncoder
from megatron_lengthgen.evaluation.report import summarise
from megatron_lengthgen.evaluation.run_store import RunStore
from megatron_lengthgen.evaluation.statistics import wilson

LENGTH = 4096
TOOL = Path(__file__).parents[2] / "tools" / "eval_longctx.py"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("helmet"), [LENGTH, 2 * LENGTH])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("eval_longctx", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Parrot:
    """Answers every question with the same text; counts what it is asked."""

    data_parallel_rank, data_parallel_size, is_first_model_rank = 0, 1, True

    def __init__(self, text: str) -> None:
        self.text, self.asked = text, 0
        self.encoder = PromptEncoder(tokenizer())

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, list[int]]]:
        for position, request in enumerate(requests):
            self.asked += 1
            ids = self.encoder.encode_texts([self.text])[0]
            end = next((at for at, token in enumerate(ids) if token in request.stop_ids), len(ids))
            yield position, ids[: min(end, request.max_new_tokens)]


def start(
    monkeypatch: pytest.MonkeyPatch,
    model: Path,
    files: Files,
    output: Path,
    *more: str,
    engine: Any = None,
    lengths: str = "4k",
) -> None:
    if engine is not None:
        monkeypatch.setattr("megatron_lengthgen.evaluation.engine.make_generator", lambda *_: engine)
    usual = ["helmet", "--hf", str(model), "--output", str(output), "--dtype", "fp32", "--lengths", lengths]
    monkeypatch.setattr(sys, "argv", ["eval_longctx.py", *usual, *files.options(), *more])
    load_tool().main()


class Server:
    """A judge that answers what it is told to, and remembers what it was asked."""

    def __init__(self, answers: Sequence[str | int]) -> None:
        self.answers, self.asked = list(answers), []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append((self.path, body, self.headers.get("Authorization")))
                answer = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                status, text = (answer, "no") if isinstance(answer, int) else (200, answer)
                reply = json.dumps({"choices": [{"message": {"content": text}}]}).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(reply)))
                self.end_headers()
                self.wfile.write(reply)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Any]:
    servers: list[Server] = []

    def make(*answers: str | int) -> Server:
        servers.append(Server(answers))
        return servers[-1]

    yield make
    for server in servers:
        server.server.shutdown()
        server.server.server_close()


def test_every_data_set_with_a_model(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = ["--tasks", "all", "--samples", "1", "--max-new-tokens", "2", "--name", "tiny"]
    start(monkeypatch, model, files, run, *options)
    said = capsys.readouterr()
    assert "HELMET's figures are with Llama 2's" in said.err and f"{run / 'helmet'}" in said.out
    summary = json.loads((run / "summary.json").read_text())
    assert summary["benchmark"] == "HELMET" and summary["complete"]
    # Each KILT question comes at two depths, and is one of HELMET's samples.
    expected = {d.name: 2 if d.category == "rag" else 1 for d in DATASETS.values()}
    assert {cell["task"]: cell["samples"] for cell in summary["cells"]} == expected
    # Without a judge and an entailment model the mean lacks one category, and has others in part.
    assert summary["mean_label"] == "mean (6 of 7 categories, partly cite, longqa)"
    by_category = {part["category"]: part for part in summary["categories"]}
    assert set(by_category) == set(CATEGORIES) - {"summ"}
    assert (by_category["cite"]["tasks"], by_category["cite"]["of"]) == (2, 6)
    text = (run / "summary.md").read_text()
    assert "narrativeqa (rougeL_f1, not in the mean)" in text and "partial: 2 of 6 measures" in text
    assert "| icl_nlu | 4K | 1 of 1 | " in text and "Contexts cut to fit: 10 of 25" in text
    results = {path.name: json.loads(path.read_text()) for path in (run / "helmet").glob("*.json")}
    assert len(results) == 21
    name = "kilt_popqa_3_v1_popqa_test_1000_k20_dep6_in4096_size1_shots2_sampFalsemax2min0t0.0p1.0_chatFalse_42.json"
    [row, _] = results[name]["data"]
    assert row["output"].startswith("Answer:") and row["answer"][0].split()[1] == str(row["id"])
    assert set(results[name]["averaged_metrics"]) >= {"substring_exact_match", "input_len", "output_len"}
    scores = json.loads((run / "helmet" / f"{name}.score").read_text())
    assert scores == results[name]["averaged_metrics"] and scores["output_len"] <= 2
    cited = "alce_asqa_8_v1_asqa_eval_gtr_top2000_in4096_size1_shots2_sampFalsemax2min0t0.0p1.0_chatFalse_42.json"
    assert {"docs", "qa_pairs", "question", "output"} <= set(results[cited]["data"][0])
    assert not (run / "helmet" / f"{cited}.score").exists()
    assert "icl_nlu_250shot_balance_v1__in4096_size1_shots0" in " ".join(results)
    assert "narrativeqa_3796_v1__in4096" in " ".join(results)


def test_a_right_and_an_empty_answer(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = DATASETS["kilt_hotpotqa"]
    answer = read_lines(files.data / dataset.file_at(LENGTH))[0]["answers"][0]
    parrot = Parrot(f" {answer}\nand more")
    options = ["--tasks", "kilt_hotpotqa,recall"]
    start(monkeypatch, model, files, tmp_path / "a", *options, engine=parrot, lengths="4k,8k")
    records = RunStore(tmp_path / "a").records(dataset.name, LENGTH)
    # Two of the six rows ask this question, and are one sample to the interval. The new line ended the answer.
    assert [records[at]["score"] for at in range(6)] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert {r["pred"] for r in records.values()} == {f" {answer}"}
    [cell] = [
        c for c in summarise(RunStore(tmp_path / "a"))["cells"] if (c["task"], c["length"]) == (dataset.name, LENGTH)
    ]
    assert (cell["low"], cell["high"]) == tuple(round(100 * end, 2) for end in wilson(1 / 3, 3))
    recalled = RunStore(tmp_path / "a").records("json_kv", LENGTH)
    assert {r["pred"] for r in recalled.values()} == {f" {answer}\nand more"}
    # The same command goes on, here to nothing; other samples would be other questions.
    asked = parrot.asked
    start(monkeypatch, model, files, tmp_path / "a", *options, engine=parrot, lengths="4k,8k")
    assert parrot.asked == asked and "36 of 36 samples are done, 0 to do" in capsys.readouterr().out
    with pytest.raises(UserError, match="has max_test_samples = None, this start has 2"):
        start(monkeypatch, model, files, tmp_path / "a", *options, "--samples", "2", lengths="4k,8k")

    start(monkeypatch, model, files, tmp_path / "b", *options, engine=Parrot(""), lengths="4k,8k")
    summary = summarise(RunStore(tmp_path / "b"))
    assert all(cell["score"] == 0.0 and cell["empty"] == cell["samples"] for cell in summary["cells"])
    monkeypatch.setattr(
        sys, "argv", ["x", "compare", str(tmp_path / "b"), str(tmp_path / "a"), "--output", str(tmp_path / "c")]
    )
    load_tool().main()
    result = json.loads((tmp_path / "c" / "compare.json").read_text())
    [mean] = [row for row in result["comparisons"][0]["means"] if row["length"] == LENGTH]
    # Categories weigh the same: a third of one of four RAG sets, and nothing of recall.
    assert mean["label"] == "mean (2 of 7 categories, partly rag)"
    assert mean["difference"] == pytest.approx(100 / 3 / 2, abs=0.01)


def test_a_judge_that_fails_midway(
    model: Path,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    serve: Any,
) -> None:
    monkeypatch.setenv("JUDGE_API_KEY", "secret")
    monkeypatch.setattr(ChatClient, "ask", _impatient(ChatClient.ask))
    run, parrot = tmp_path / "run", Parrot(" Number 1")
    options = ["--tasks", "narrativeqa"]
    start(monkeypatch, model, files, run, *options, engine=parrot)
    assert "narrativeqa.judge" not in json.loads((run / "summary.json").read_text())["tasks"]

    good = 'I think it is right. {"fluency": 1, "correctness": 2}'
    broken = serve(good, 400)
    judging = [*options, "--judge", broken.url, "--judge-model", "judge-1"]
    with pytest.raises(UserError, match=r"the judge .* refuses model 'judge-1' or the request \(status 400"):
        start(monkeypatch, model, files, run, *judging, engine=parrot)
    path, body, key = broken.asked[0]
    assert path == "/v1/chat/completions" and key == "Bearer secret" and body["model"] == "judge-1"
    question = body["messages"][0]["content"]
    assert question.startswith('Judge. {"fluency": 1} Question: Who is number ') and question.endswith(
        "Answer: Number 1"
    )
    assert "Correct: ['Number " in question

    whole = serve(good)
    judging[judging.index(broken.url)] = whole.url
    start(monkeypatch, model, files, run, *judging, engine=parrot)
    # Two answers, of which one was judged before the failure; nothing was generated again.
    assert len(whole.asked) == 1 and parrot.asked == 2
    summary = json.loads((run / "summary.json").read_text())
    cells = {cell["task"]: cell for cell in summary["cells"]}
    assert cells["narrativeqa.judge"]["score"] == pytest.approx(100 * 2 / 3, abs=0.01)
    assert "narrativeqa (judged by judge-1)" in (run / "summary.md").read_text()
    records = RunStore(run).records("narrativeqa.judge", LENGTH)
    assert all(r["judge"] == "judge-1" and r["verdict"] == {"fluency": 1, "correctness": 2} for r in records.values())
    [score] = [json.loads(path.read_text()) for path in (run / "helmet").glob("*.score")]
    assert score["gpt-4-score"] == pytest.approx(2.0)
    # A later start without the judge keeps its verdicts; one with another judge is refused.
    capsys.readouterr()
    start(monkeypatch, model, files, run, *options, engine=parrot)
    assert "judged by judge-1" in capsys.readouterr().out and len(whole.asked) == 1
    with pytest.raises(UserError, match="has judge = 'judge-1', this start has 'judge-2'"):
        start(monkeypatch, model, files, run, *options, "--judge", whole.url, "--judge-model", "judge-2", engine=parrot)


def test_shards_judge_their_own_answers(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, serve: Any
) -> None:
    run, parrot = tmp_path / "run", Parrot(" Number 1")
    judge = serve('{"fluency": 1, "correctness": 3}')
    options = ["--tasks", "narrativeqa", "--judge", judge.url, "--judge-model", "j"]
    start(monkeypatch, model, files, run, *options, "--shard", "1/2", engine=parrot)
    assert (parrot.asked, len(judge.asked)) == (1, 1)
    assert not json.loads((run / "summary.json").read_text())["complete"]
    # The other shard, which then finds the first one's verdict, and whoever starts again has nothing to ask.
    start(monkeypatch, model, files, run, *options, "--shard", "2/2", engine=parrot)
    start(monkeypatch, model, files, run, *options, "--shard", "1/2", engine=parrot)
    assert (parrot.asked, len(judge.asked)) == (2, 2)
    assert len(RunStore(run).records("narrativeqa.judge", LENGTH)) == 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["complete"]
    assert {c["task"]: c["score"] for c in summary["cells"]}["narrativeqa.judge"] == pytest.approx(100)


def _impatient(ask: Any) -> Any:
    def quickly(self: ChatClient, *arguments: Any) -> str:
        self._pause = 0.001
        return ask(self, *arguments)

    return quickly


def test_summaries_and_verdicts_that_cannot_be_read(
    model: Path,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    serve: Any,
) -> None:
    monkeypatch.setattr(ChatClient, "ask", _impatient(ChatClient.ask))
    run, parrot = tmp_path / "run", Parrot(" It ends well.")
    fluent, found, precise = '{"fluency": 1}', '{"recall": 1}', '{"precision": 3, "sentence_count": 4}'
    # First the server is busy, then all is said; of the second case a verdict counts more than there is, thrice.
    answers = [503, fluent, found, precise, *([fluent, '{"recall": 3}', precise] * 3)]
    judge = serve(*answers, fluent)
    options = ["--tasks", "multi_lexsum", "--samples", "2", "--judge", judge.url + "/v1/", "--judge-model", "j"]
    start(monkeypatch, model, files, run, *options, engine=parrot)
    assert len(judge.asked) == 13 and "1 answer(s) got no readable verdict from j" in capsys.readouterr().out
    prompts = [body["messages"][0]["content"] for _, body, _ in judge.asked[1:4]]
    assert prompts[0] == "Judge the fluency. Summary: It ends well."
    assert prompts[1] == "Judge the recall. 1. A fact.\n2. Its end. Summary: Summary: It ends well."
    assert prompts[2].startswith("Judge the precision. At length: case ")
    [record] = RunStore(run).records("multi_lexsum.judge", LENGTH).values()
    assert record["score"] == pytest.approx(2 * 0.5 * 0.75 / (0.5 + 0.75))
    summary = json.loads((run / "summary.json").read_text())
    assert not summary["complete"] and "partial: 1 of 2" in (run / "summary.md").read_text()
    # The next start asks about the other alone.
    judge.answers = [fluent, found, precise]
    judge.asked.clear()
    start(monkeypatch, model, files, run, *options, engine=parrot)
    assert len(judge.asked) == 3 and json.loads((run / "summary.json").read_text())["complete"]
    # An empty summary is not shown to the judge.
    judge.asked.clear()
    start(monkeypatch, model, files, tmp_path / "empty", *options, engine=Parrot(""))
    assert not judge.asked
    assert [r["score"] for r in RunStore(tmp_path / "empty").records("multi_lexsum.judge", LENGTH).values()] == [
        0.0,
        0.0,
    ]


class Colours:
    """An entailment model that wants the claim's words in the passage."""

    name = "colours"

    def __init__(self, source: str) -> None:
        assert source == "colours"

    def entails(self, premise: str, hypothesis: str) -> bool:
        return "good idea" in premise


def test_citations(model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("punkt")
    monkeypatch.setattr(command, "Seq2SeqEntailment", Colours)
    run, parrot = tmp_path / "run", Parrot("So it is said [1][2]. Nobody knows.")
    options = ["--tasks", "cite", "--chat-template", "helmet"]
    start(monkeypatch, model, files, run, *options, "--entailment", "colours", engine=parrot)
    summary = json.loads((run / "summary.json").read_text())
    assert len(summary["tasks"]) == 6 and summary["mean_label"] == "mean (1 of 7 categories)"
    assert [part["tasks"] for part in summary["categories"]] == [6] and summary["complete"]
    store = RunStore(run)
    documents = {row["question"]: row["docs"] for row in read_lines_of_array(files.data / DATASETS["alce_asqa"].file)}
    for index, answer in store.records("alce_asqa", LENGTH).items():
        first, second = ("good idea" in document["text"] for document in documents[answer["question"]][:2])
        record = store.records("alce_asqa.citation_rec", LENGTH)[index]
        assert record["score"] == (0.5 if first or second else 0.0) and record["entailment"] == "colours"
        precision = store.records("alce_asqa.citation_prec", LENGTH)[index]["score"]
        assert precision == (0.0 if not (first or second) else 1.0 if first and second else 0.5)
    [score] = [json.loads(p.read_text()) for p in (run / "helmet").glob("alce_asqa*chatTrue*.score")]
    assert set(score) >= {"str_em", "citation_rec", "citation_prec"}
    # Once scored, nothing is asked again.
    monkeypatch.setattr(Colours, "entails", None)
    start(monkeypatch, model, files, run, *options, "--entailment", "colours", engine=parrot)


def read_lines_of_array(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def test_an_entailment_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    made = tokenizer()
    config = T5Config(vocab_size=600, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    made.save_pretrained(tmp_path)
    model = Seq2SeqEntailment(str(tmp_path))
    assert model.name == str(tmp_path) and model.entails("A good idea.", "An idea.") is False
    seen = []

    def generate(ids: Any, max_new_tokens: int) -> Any:
        seen.append(made.decode(ids[0]))
        return torch.tensor([[0, *made.encode("1", add_special_tokens=False), 1]])

    monkeypatch.setattr(model._model, "generate", generate)
    assert model.entails("A good idea.", "An idea.") is True
    assert seen == ["premise: A good idea. hypothesis: An idea."]
    with pytest.raises(UserError, match=r"cannot load the entailment model /nowhere .* give --entailment"):
        Seq2SeqEntailment("/nowhere")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tasks", "ragg"], "unknown HELMET category or data set 'ragg'"),
        (["--tasks", "rag", "--judge", "http://x"], "--judge .* and --judge-model .* go together"),
        (["--tasks", "rag", "--judge", "x", "--judge-model", "j"], "--judge must be like http"),
        (["--tasks", "rag", "--samples", "0"], "--samples must be positive, got 0"),
        (["--tasks", "rag", "--data", "/nowhere"], "--data /nowhere is not a directory"),
        (["--tasks", "rag", "--set", "x=y"], "unknown --set 'x'"),
    ],
)
def test_bad_arguments(
    model: Path, files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        start(monkeypatch, model, files, tmp_path / "run", *more)
    with pytest.raises(UserError, match="kilt_nq has no data for length 1024: HELMET's lengths are 4K"):
        start(monkeypatch, model, files, tmp_path / "run", "--tasks", "rag", lengths="1k")
    with pytest.raises(UserError, match=r"test_reranking_data_k130_dep3.jsonl is missing, .*what can run: --tasks icl"):
        start(monkeypatch, model, files, tmp_path / "run", "--tasks", "rerank,icl", lengths="16k")
    assert not (tmp_path / "run").exists()
