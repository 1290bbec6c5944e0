"""What all clients of a server share: its address, the key, and how an error of its reads."""

import http.client
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from megatron_lengthgen.errors import UserError

__all__ = ["authorization", "error_text", "opener", "quote", "server_address"]

_QUOTED = 200  # characters of a server's message that are worth quoting


def server_address(what: str, url: str) -> str:
    """``url`` without a slash at its end.

    Args:
        what: as errors name the server.

    Raises:
        UserError: when it is no http address.
    """
    try:
        parts = urlsplit(url)
        # A port that is no number, or none that exists, shows only when it is read; so does a name that has no IDNA.
        fine = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        (parts.hostname or "").encode("idna")
    except ValueError:
        fine = False
    if not fine or not url.isascii() or any(character <= " " for character in url):
        raise UserError(f"{what} must be like http://localhost:8000/v1, got {url!r}")
    return url.rstrip("/")


def authorization(*variables: str) -> dict[str, str]:
    """The header with the key that the first of these environment variables holds; none where none is set.

    Raises:
        UserError: when the key has characters that a header cannot hold; the key itself is not shown.
    """
    for name in variables:
        # A key read from a file ends with the file's line.
        if key := os.environ.get(name, "").strip():
            if not key.isascii() or not key.isprintable():
                raise UserError(f"the key in {name} holds a line break or a character that no key has: set it again")
            return {"Authorization": f"Bearer {key}"}
    return {}


def opener() -> Callable[..., Any]:
    """:func:`urllib.request.urlopen` without redirects."""
    return urllib.request.build_opener(_NoRedirects).open


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect would turn the POST into a GET, and carry the key elsewhere."""

    def redirect_request(self, *_: Any) -> None:
        return None


def error_text(error: urllib.error.HTTPError) -> str:
    """What the server says about an error: OpenAI's ``error.message``, others' ``detail`` or ``message``, or text."""
    try:
        text = error.read().decode("utf-8", "replace")
    except (OSError, http.client.HTTPException):
        return ""
    try:
        value = json.loads(text)
    except ValueError:
        return quote(text)
    for name in ("error", "message", "detail"):
        if isinstance(value, dict) and name in value:
            value = value[name]
    return quote(value if isinstance(value, str) else json.dumps(value))


def quote(text: str) -> str:
    """The start of a text, on one line."""
    text = " ".join(text.split())
    return text if len(text) <= _QUOTED else text[:_QUOTED] + " ..."
