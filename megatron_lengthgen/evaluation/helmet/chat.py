"""Questions to a judge: a model behind OpenAI's chat protocol."""

import http.client
import json
import time
import urllib.error
import urllib.request
from typing import Any

from megatron_lengthgen.errors import UserError
from megatron_lengthgen.evaluation.server import authorization, error_text, opener, server_address

__all__ = ["ChatClient"]

_TRIES = 6


class ChatClient:
    """Sends one message at a time to ``/v1/chat/completions``.

    A request is repeated, with waits that double, after a broken connection, an answer that is not JSON, and the
    statuses 408, 429 and 5xx; all others are for the user to mend. The environment variable ``JUDGE_API_KEY``, or else
    ``OPENAI_API_KEY``, is sent as the key.

    Args:
        url: the server, ``https://host`` with or without ``/v1``.
        model: the model's name there.
        timeout: seconds that the server may be silent.
        pause: seconds before the first repetition.

    Raises:
        UserError: for an address that is none.
    """

    def __init__(self, url: str, model: str, timeout: float = 600.0, pause: float = 1.0) -> None:
        base = server_address("--judge", url).removesuffix("/chat/completions")
        self._key = authorization("JUDGE_API_KEY", "OPENAI_API_KEY")
        self._open = opener()
        self.url = f"{base if base.endswith('/v1') else f'{base}/v1'}/chat/completions"
        self.name, self._timeout, self._pause = model, timeout, pause

    def ask(self, message: str, max_tokens: int) -> str:
        """The answer to a message.

        Raises:
            UserError: when there is none.
        """
        # HELMET judges at this temperature.
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": max_tokens,
            "temperature": 0.1,
        }
        last = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                return self._content(self._post(body))
            except urllib.error.HTTPError as error:
                with error:
                    said = error_text(error)
                last = f"status {error.code}{said and f', {said}'}"
                if error.code not in (408, 429) and error.code < 500:
                    raise UserError(
                        f"the judge {self.url} refuses model {self.name!r} or the request ({last}); all verdicts so "
                        "far are kept, so mend that and start the same command again"
                    ) from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                last = f"{type(error).__name__}: {error}"
        raise UserError(
            f"the judge {self.url} gave no answer in {_TRIES} tries (the last: {last}); all verdicts so far are kept, "
            "so see to it and start the same command again"
        )

    def _post(self, body: dict[str, Any]) -> Any:
        headers = {"Content-Type": "application/json", **self._key}
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers, method="POST")
        with self._open(request, timeout=self._timeout) as response:
            return json.loads(response.read())

    def _content(self, reply: Any) -> str:
        try:
            text = reply["choices"][0]["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise UserError(
                f"the judge {self.url} answered without choices[0].message.content: is it a chat server?"
            ) from None
        # A filter may withhold the text.
        return text if isinstance(text, str) else ""
