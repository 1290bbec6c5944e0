"""Greedy generation by any server that speaks OpenAI's completions protocol (vLLM, SGLang, llama.cpp, TensorRT-LLM).

The server is not trusted. What would change scores silently ends the run with a sentence instead: a prompt that the
server cut, an answer longer than asked for, JSON without an answer. An echoed prompt is taken off; an empty answer is
an answer.
"""

import http.client
import json
import queue
import random
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.prompt import PromptEncoder
from megatron_lengthgen.evaluation.server import authorization, error_text, opener, quote, server_address

from .base import Answer, Request

__all__ = ["OpenAIGenerator", "check_timeout", "completions_url"]

_TRIES = 6
_STOPS = 4  # the protocol allows no more
_DAY = 86400.0  # seconds; a socket takes no infinity


class OpenAIGenerator:
    """Sends each prompt to ``/v1/completions``, several at a time.

    Requests are repeated, with waits that double, after a timeout, a broken connection, an answer that is not JSON (a
    proxy may cut one), and the statuses 408, 429 and 5xx. All others are for the user to mend.

    The environment variable ``OPENAI_API_KEY``, where set, is sent as the key.

    Args:
        url: the server, ``http://host:port`` with or without ``/v1``.
        model: the model's name at the server.
        encoder: the tokenizer of that model; it counts tokens, and knows what ends an answer.
        as_text: send prompts as text, to servers that take no token ids. The server's own tokenizer then adds the BOS.
        concurrency: requests that are open at the same time.
        timeout: seconds that the server may be silent in one request.
        pause: seconds before the first repetition.
        rank, size: this process's share when several are started.

    Raises:
        UserError: an argument is out of range.
    """

    is_first_model_rank = True

    def __init__(
        self,
        url: str,
        model: str,
        encoder: PromptEncoder,
        *,
        as_text: bool = False,
        concurrency: int = 8,
        timeout: float = 600.0,
        pause: float = 1.0,
        rank: int = 0,
        size: int = 1,
    ) -> None:
        if concurrency < 1:
            raise UserError(f"concurrency must be at least 1, got {concurrency}")
        check_timeout(timeout)
        self.url, self.model, self.encoder = completions_url(url), model, encoder
        self._key = authorization("OPENAI_API_KEY")
        self.as_text, self.concurrency, self.timeout, self.pause = as_text, concurrency, timeout, pause
        self.data_parallel_rank, self.data_parallel_size = rank, size
        # Fast tokenizers can fail with "Already borrowed" when several threads use them.
        self._tokenizing = threading.Lock()
        self._open = opener()

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Answer]]:
        """See :class:`~.base.Generator`.

        Raises:
            UserError: the server cannot be reached, refuses a request, or answers what cannot be scored.
        """
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for position in range(len(requests)):
            waiting.put(position)
        done: queue.SimpleQueue[tuple[int, Answer] | BaseException] = queue.SimpleQueue()
        ended = threading.Event()

        def work() -> None:
            while not ended.is_set():
                try:
                    position = waiting.get_nowait()
                    done.put((position, self._answer(position, requests[position], ended)))
                except queue.Empty:
                    return
                except BaseException as error:
                    done.put(error)
                    return

        # Daemons: who stops the run must not wait for the server.
        for _ in range(min(self.concurrency, len(requests))):
            threading.Thread(target=work, daemon=True).start()
        try:
            for _ in requests:
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            ended.set()

    def _answer(self, position: int, request: Request, ended: threading.Event) -> Answer:
        with self._tokenizing:
            stops = self._stops(request)
            prompt = self._text(position, request) if self.as_text else list(request.prompt_ids)
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.max_new_tokens,
            "temperature": 0,
            "echo": False,
            "stream": False,
        }
        if stops:
            body["stop"] = stops[:_STOPS]
        reply = self._send(position, request, body, ended)
        with self._tokenizing:
            return self._read(position, request, stops, reply)

    def _text(self, position: int, request: Request) -> str:
        """The prompt as text, without the special tokens that the server's tokenizer adds by itself."""
        leading = self.encoder.leading
        ids = list(request.prompt_ids)
        if leading and tuple(ids[: len(leading)]) == leading:
            ids = ids[len(leading) :]
        text = self._decode(ids)
        if self.encoder.tokenizer.encode(text, add_special_tokens=False, verbose=False) != ids:
            raise UserError(
                f"the text of prompt {position} gives other token ids than the prompt has: send ids (--prompt-as ids)"
            )
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self.encoder.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _stops(self, request: Request) -> list[str]:
        """Texts that end an answer. The model's own end is known to the server; there are few others."""
        return list(filter(None, (self._decode([token]) for token in sorted(request.stop_ids))))

    # -- the protocol -------------------------------------------------------------------------------------------------

    def _send(self, position: int, request: Request, body: Mapping[str, Any], ended: threading.Event) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json", **self._key}
        data = json.dumps(body).encode()
        last = ""
        for attempt in range(_TRIES):
            # Jitter, so that requests that failed together do not come back together.
            if attempt and ended.wait(self.pause * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)):
                break
            try:
                post = urllib.request.Request(self.url, data, headers, method="POST")
                with self._open(post, timeout=self.timeout) as response:
                    text = response.read()
                return json.loads(text)
            except urllib.error.HTTPError as error:
                with error:
                    message = error_text(error)
                if error.code not in (408, 429) and error.code < 500:
                    raise self._refused(position, request, error.code, message) from error
                last = f"status {error.code}{message and f', {message}'}"
            except TimeoutError:
                last = f"no answer within {self.timeout:g} s"
            except (OSError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                last = (
                    f"no answer within {self.timeout:g} s"
                    if isinstance(reason, TimeoutError)
                    else f"{type(reason).__name__}: {reason}"
                )
            except ValueError:
                last = f"not JSON: {quote(text.decode('utf-8', 'replace'))!r}"
        raise UserError(
            f"{self.url} gave no answer in {_TRIES} tries (the last: {last}); finished samples are kept, so see to the "
            "server and start the same command again"
        )

    def _refused(self, position: int, request: Request, status: int, message: str) -> UserError:
        said = f"status {status}{message and f', {message}'}"
        if status in (401, 403):
            return UserError(f"{self.url} refuses the key ({said}): set OPENAI_API_KEY to one that it takes")
        if status == 404:
            return UserError(f"{self.url} does not know model {self.model!r} or this path ({said}): mend URL or name")
        if status in (400, 413, 422) and _speaks_of_length(message):
            return UserError(
                f"request {position} needs {len(request.prompt_ids)} tokens of prompt and {request.max_new_tokens} of "
                f"answer, too many for {self.url} ({said}): start the server with a longer context, or ask for shorter "
                "lengths"
            )
        hint = "" if self.as_text else "; if it takes no token ids, send text (--prompt-as text)"
        return UserError(f"{self.url} refuses request {position} ({said}){hint}")

    def _read(self, position: int, request: Request, stops: Sequence[str], reply: Any) -> Answer:
        """An answer from the server's JSON, after all doubts."""
        choices = reply.get("choices") if isinstance(reply, dict) else None
        choice: Any = choices[0] if isinstance(choices, list) and choices else None
        text = choice.get("text") if isinstance(choice, dict) else None
        if not isinstance(text, str):
            raise UserError(
                f"{self.url} answered without choices[0].text ({quote(json.dumps(reply))}): is it an "
                "OpenAI-compatible completions server?"
            )
        usage = reply["usage"] if isinstance(reply.get("usage"), dict) else {}
        prompt_tokens = usage.get("prompt_tokens")
        if isinstance(prompt_tokens, int) and 0 < prompt_tokens < len(request.prompt_ids):
            raise UserError(
                f"{self.url} read {prompt_tokens} of the {len(request.prompt_ids)} tokens of prompt {position}: it "
                "cuts prompts, so start it with a longer context, or ask for shorter lengths"
            )
        text = self._without_echo(request, text)
        # Half a surrogate pair is no text to a tokenizer.
        whole = text.encode(errors="replace").decode()
        counted = len(self.encoder.tokenizer.encode(whole, add_special_tokens=False, verbose=False))
        # Text may be tokenised into more pieces than it was generated in, but not into many times as many.
        if counted > 4 * request.max_new_tokens + 16:
            raise UserError(
                f"{self.url} answered request {position} with {counted} tokens where {request.max_new_tokens} were "
                "asked for: it echoes the prompt or ignores max_tokens, and neither can be scored"
            )
        ends = [end for end in (text.find(stop) for stop in stops) if end >= 0]
        completion_tokens = usage.get("completion_tokens")
        tokens = completion_tokens if isinstance(completion_tokens, int) else counted
        finish = choice.get("finish_reason")
        cut = finish == "length" if isinstance(finish, str) else tokens >= request.max_new_tokens
        return Answer(text[: min(ends)] if ends else text, tokens, cut and not ends)

    def _without_echo(self, request: Request, text: str) -> str:
        plain = self.encoder.decode(request.prompt_ids)
        for prompt in (self._decode(request.prompt_ids), plain, plain.lstrip()):
            if prompt and text.startswith(prompt):
                return text[len(prompt) :]
        return text


def completions_url(url: str) -> str:
    """The address of completions on the server ``url``.

    Raises:
        UserError: it is no http address.
    """
    url = server_address("the server's address", url)
    if url.endswith("/completions"):
        return url
    return f"{url}/completions" if url.endswith("/v1") else f"{url}/v1/completions"


def check_timeout(seconds: float) -> None:
    """Raise :class:`UserError` unless a request may take this long."""
    if not 0 < seconds <= _DAY:
        raise UserError(f"the request timeout must be more than 0 and at most {_DAY:g} seconds, got {seconds:g}")


def _speaks_of_length(message: str) -> bool:
    words = message.lower()
    return any(word in words for word in ("context", "max_model_len", "maximum length", "too long", "max_seq_len"))
