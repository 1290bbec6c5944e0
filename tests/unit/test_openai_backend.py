"""The backend for OpenAI-compatible servers, against a small server that behaves in every way but well."""

import http.server
import json
import re
import runpy
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ruler_fixtures import tokenizer

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.generation.base import Answer, Request
from megatron_lengthgen.evaluation.generation.openai import OpenAIGenerator, completions_url
from megatron_lengthgen.evaluation.prompt import PromptEncoder

TEXT = "A good idea is rarely obvious at first."
Behaviour = Callable[["Handler", dict[str, Any]], None]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers each request by the next of ``server.script``; by its last one for ever."""

    server: "Server"

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.seen.append((self.path, dict(self.headers), body))
            script = self.server.script
            behave = script.pop(0) if len(script) > 1 else script[0]
            self.server.now += 1
            self.server.most = max(self.server.most, self.server.now)
        try:
            behave(self, body)
        finally:
            with self.server.lock:
                self.server.now -= 1

    def reply(self, status: int, content: Any, length: int | None = None) -> None:
        data = content.encode() if isinstance(content, str) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lock = threading.Lock()
        self.script: list[Behaviour] = []
        self.seen: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.now = self.most = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, *_: Any) -> None:  # clients that went away are part of the tests
        pass


def say(text: str, finish: str | None = "stop", wait: float = 0.0, **usage: int) -> Behaviour:
    def behave(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(wait)
        handler.reply(200, {"choices": [{"text": text, "finish_reason": finish}], "usage": usage})

    return behave


def fail(status: int, content: Any = "") -> Behaviour:
    return lambda handler, body: handler.reply(status, content)


def cut(handler: Handler, body: dict[str, Any]) -> None:
    """The connection ends in the middle of the answer."""
    handler.reply(200, '{"choices": [{"text": "42', length=500)
    handler.connection.close()


def vanish(handler: Handler, body: dict[str, Any]) -> None:
    handler.connection.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield made
        made.shutdown()


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tokenizer(bos=True))


def ask(
    server: Server, encoder: PromptEncoder, *script: Behaviour, requests: int = 1, limit: int = 8, **arguments: Any
) -> dict[int, Answer]:
    server.script = list(script)
    prompt = Request(tuple(encoder.encode(TEXT, "")), limit, encoder.stop_ids)
    engine = OpenAIGenerator(server.url, "m", encoder, **({"pause": 0.01, "timeout": 20.0} | arguments))
    return dict(engine.generate([prompt] * requests))


def test_what_is_asked_and_answered(server: Server, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert ask(server, encoder, say(" 42", completion_tokens=2)) == {0: Answer(" 42", 2, False)}
    [(path, headers, body)] = server.seen
    assert path == "/v1/completions" and headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "m",
        "prompt": encoder.encode(TEXT, ""),
        "max_tokens": 8,
        "temperature": 0,
        "echo": False,
        "stream": False,
        "stop": ["</s>"],
    }
    assert body["prompt"][0] == 0, "BOS, once"
    monkeypatch.delenv("OPENAI_API_KEY")
    ask(server, encoder, say(" 42"))
    assert "Authorization" not in server.seen[-1][1]


def test_prompts_as_text_leave_the_bos_to_the_server(server: Server, encoder: PromptEncoder) -> None:
    ask(server, encoder, say(" 42"), as_text=True)
    assert server.seen[0][2]["prompt"] == TEXT


def test_text_that_gives_other_ids_is_not_sent(server: Server, encoder: PromptEncoder) -> None:
    a, b = (encoder.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "go")
    engine = OpenAIGenerator(server.url, "m", encoder, as_text=True)
    server.script = [say("")]
    with pytest.raises(UserError, match="prompt 0 gives other token ids"):
        list(
            engine.generate(
                [Request((a, b, b, encoder.tokenizer.encode("d", add_special_tokens=False)[0]), 4, frozenset())]
            )
        )
    assert not server.seen


def test_an_empty_answer_is_an_answer(server: Server, encoder: PromptEncoder) -> None:
    assert ask(server, encoder, say("", completion_tokens=0)) == {0: Answer("", 0, False)}


@pytest.mark.parametrize("finish", ["length", None])
def test_an_answer_cut_by_the_limit(server: Server, encoder: PromptEncoder, finish: str | None) -> None:
    assert ask(server, encoder, say(" 4 2", finish, completion_tokens=8))[0].cut
    assert not ask(server, encoder, say(" 4 2", "stop", completion_tokens=8))[0].cut


def test_without_usage_tokens_are_counted(server: Server, encoder: PromptEncoder) -> None:
    text = " It is safe, and safety is comfortable."
    count = len(encoder.tokenizer.encode(text, add_special_tokens=False))
    assert ask(server, encoder, say(text, "stop"), limit=count + 1)[0] == Answer(text, count, False)
    assert ask(server, encoder, say(text, None), limit=count)[0] == Answer(text, count, True)


def test_a_stop_text_that_the_server_left_is_cut_off(server: Server, encoder: PromptEncoder) -> None:
    assert ask(server, encoder, say(" 42</s> and on", "length"))[0].text == " 42"


@pytest.mark.parametrize("bos", ["<s>", ""])
def test_an_echoed_prompt_is_no_answer(server: Server, encoder: PromptEncoder, bos: str) -> None:
    assert ask(server, encoder, say(f"{bos}{TEXT} 42", completion_tokens=2))[0].text == " 42"


def test_an_answer_longer_than_asked_for_is_refused(server: Server, encoder: PromptEncoder) -> None:
    with pytest.raises(UserError, match=r"request 0 with \d+ tokens where 8 were asked for: it echoes"):
        ask(server, encoder, say("Prompt: " + TEXT * 5 + " 42"))


def test_a_prompt_that_the_server_cut_is_refused(server: Server, encoder: PromptEncoder) -> None:
    whole = len(encoder.encode(TEXT, ""))
    with pytest.raises(UserError, match=f"read 3 of the {whole} tokens of prompt 0"):
        ask(server, encoder, say(" 42", prompt_tokens=3))
    assert ask(server, encoder, say(" 42", prompt_tokens=whole))[0].text == " 42"


@pytest.mark.parametrize(
    "bad",
    [fail(500, "broken"), fail(503), fail(429, {"error": {"message": "slow down"}}), cut, vanish, fail(200, "<html>")],
    ids=["500", "503", "429", "cut", "vanish", "no json"],
)
def test_what_may_pass_is_tried_again(server: Server, encoder: PromptEncoder, bad: Behaviour) -> None:
    assert ask(server, encoder, bad, bad, say(" 42"))[0].text == " 42"
    assert len(server.seen) == 3


def test_a_slow_server_is_tried_again(server: Server, encoder: PromptEncoder) -> None:
    assert ask(server, encoder, say(" late", wait=4.0), say(" 42"), timeout=2.0)[0].text == " 42"


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (fail(500, {"detail": "out of memory"}), "in 6 tries .the last: status 500, out of memory"),
        (fail(200, "<html>hello</html>"), "not JSON: '<html>hello"),
        (vanish, "RemoteDisconnected"),
    ],
)
def test_after_six_tries_it_gives_up(server: Server, encoder: PromptEncoder, bad: Behaviour, words: str) -> None:
    with pytest.raises(UserError, match=words):
        ask(server, encoder, bad, pause=0.001)
    assert len(server.seen) == 6


def test_a_server_that_is_always_slow(server: Server, encoder: PromptEncoder) -> None:
    with pytest.raises(UserError, match=r"in 6 tries .the last: no answer within 0\.1 s"):
        ask(server, encoder, say("", wait=2.0), timeout=0.1, pause=0.001)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (fail(401, {"error": {"message": "bad key"}}), "refuses the key .status 401, bad key.: set OPENAI_API_KEY"),
        (fail(404, {"error": {"message": "no model m"}}), "does not know model 'm' .*no model m"),
        (
            fail(400, {"message": "maximum context length is 4"}),
            "request 0 needs .* of prompt and 8 of answer, too many",
        ),
        (fail(422, {"detail": [{"msg": "prompt must be a string"}]}), "must be a string.*send text"),
        (fail(302, ""), "refuses request 0 .status 302"),
        (fail(200, {"error": "no"}), r"without choices\[0\].text .*is it an OpenAI-compatible"),
        (fail(200, {"choices": []}), "without choices"),
        (fail(200, {"choices": [{"text": None}]}), "without choices"),
        (fail(200, "[1]"), "without choices"),
        (fail(200, "null"), "without choices"),
    ],
)
def test_what_the_user_must_mend_is_said_at_once(
    server: Server, encoder: PromptEncoder, bad: Behaviour, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        ask(server, encoder, bad)
    assert len(server.seen) == 1


def test_nobody_listens(encoder: PromptEncoder) -> None:
    with Server() as closed:
        url = closed.url
    engine = OpenAIGenerator(url, "m", encoder, pause=0.001)
    with pytest.raises(UserError, match="ConnectionRefusedError"):
        list(engine.generate([Request((1,), 1, frozenset())]))


def test_several_requests_are_open_at_once_and_each_gets_its_own_answer(server: Server, encoder: PromptEncoder) -> None:
    def number(handler: Handler, body: dict[str, Any]) -> None:
        time.sleep(0.05)
        say(f" {body['max_tokens']}")(handler, body)

    server.script = [number]
    requests = [Request(tuple(encoder.encode(TEXT, "")), n + 1, frozenset()) for n in range(12)]
    engine = OpenAIGenerator(server.url, "m", encoder, concurrency=4)
    assert {position: answer.text for position, answer in engine.generate(requests)} == {
        n: f" {n + 1}" for n in range(12)
    }
    assert server.most == 4 and len(server.seen) == 12


def test_an_error_ends_the_run_without_waiting_for_the_rest(server: Server, encoder: PromptEncoder) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match="status 401"):
        ask(server, encoder, fail(401), say("", wait=5.0), requests=50, concurrency=4)
    assert time.monotonic() - start < 4 and len(server.seen) <= 4


def test_a_run_through_the_command_line(
    server: Server, encoder: PromptEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server reads the needle out of each prompt and says nothing to the last one; the report counts both."""

    def read_needle(handler: Handler, body: dict[str, Any]) -> None:
        found = re.findall(r"is: (\d+)\.", encoder.decode(body["prompt"]))
        empty = len(server.seen) == 4
        say("" if empty else f" {found[0]}.", completion_tokens=0 if empty else 9)(handler, body)

    server.script = [read_needle]
    encoder.tokenizer.save_pretrained(tmp_path / "tokenizer")
    command = ["eval_longctx.py", "ruler", "--openai", server.url, "--model", "m", "--concurrency", "1"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--output", str(tmp_path / "run"), "--samples", "4"]
    command += ["--tasks", "niah_single_1", "--lengths", "768"]
    tool = str(Path(__file__).parents[2] / "tools" / "eval_longctx.py")
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(tool)["main"]()
    [cell] = json.loads((tmp_path / "run" / "summary.json").read_text())["cells"]
    assert (cell["score"], cell["empty"], cell["stopped_by_limit"]) == (75.0, 1, 0)
    for bad, words in ((("--openai", "localhost"), "must be like http"), (("--concurrency", "0"), "--concurrency")):
        monkeypatch.setattr(sys, "argv", [*command, "--output", str(tmp_path / "none"), *bad])
        with pytest.raises(UserError, match=words):
            runpy.run_path(tool)["main"]()
    assert len(server.seen) == 4 and not (tmp_path / "none").exists()


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/completions"])
def test_addresses(url: str) -> None:
    assert completions_url(url) == "http://h:1/v1/completions"


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "",
        "ftp://h",
        "http://",
        "http://[::1",
        "http://h:x",
        "http://h:99999",
        "http://a b",
        "http://é",
    ],
)
def test_what_is_no_address(url: str, encoder: PromptEncoder) -> None:
    with pytest.raises(UserError, match="must be like http://localhost:8000/v1"):
        OpenAIGenerator(url, "m", encoder)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"concurrency": 0}, "concurrency"),
        ({"timeout": 0.0}, "timeout"),
        ({"timeout": float("inf")}, "timeout"),
        ({"timeout": float("nan")}, "timeout"),
    ],
)
def test_bad_settings(encoder: PromptEncoder, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        OpenAIGenerator("http://h:1", "m", encoder, **arguments)


@pytest.mark.parametrize("key", ["sk-a\nb", "sk-ü€"])
def test_a_key_that_no_header_can_hold(encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(UserError, match="the key in OPENAI_API_KEY holds a line break") as raised:
        OpenAIGenerator("http://h:1", "m", encoder)
    assert "sk-" not in str(raised.value)


def test_the_line_end_of_a_key_file_is_no_part_of_the_key(
    server: Server, encoder: PromptEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\n")
    ask(server, encoder, say(" 42"))
    assert server.seen[0][1]["Authorization"] == "Bearer secret"


def test_half_a_surrogate_pair_is_an_answer(server: Server, encoder: PromptEncoder) -> None:
    assert ask(server, encoder, say("42 \ud83d"))[0].text == "42 \ud83d"
