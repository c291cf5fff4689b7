"""Passes the facts of a request to a worker, and makes an ASGI scope of them there.

The facts travel as JSON beside the body. Headers may hold any bytes: each byte becomes the character with its number (latin-1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote_to_bytes

from ....errors import BadInput
from .messages import HeaderPair

KEY = "asgi"
"""The key of the facts in `context.extra`."""
HTTP, WEBSOCKET = "http", "websocket"
# No HTTP header contains a line break, so line breaks can separate headers.
_SEPARATOR = b"\n"
_PROTOCOLS = b"sec-websocket-protocol"
# With these versions, Starlette and other frameworks listen for `http.disconnect` while they stream.
_VERSIONS = {HTTP: "2.3", WEBSOCKET: "2.4"}


class Facts(NamedTuple):
    """A request as the gateway has read it. Addresses are (host, port), or None if they are unknown."""

    kind: str
    http_version: str
    method: str
    scheme: str
    raw_path: str
    """The path as the caller sent it, percent-encoded, and without the query."""
    query: str
    root_path: str
    headers: Sequence[HeaderPair]
    """The names are in lower case."""
    client: Sequence[Any] | None
    server: Sequence[Any] | None

    def encode(self) -> dict[str, Any]:
        """Return the facts as JSON, for `context.extra`. Raise BadInput if a header holds a line break."""
        return {KEY: [*self[:7], join_headers(self.headers), self.client, self.server]}

    @classmethod
    def decode(cls, extra: Mapping[str, Any]) -> Facts | None:
        """Return the facts in `context.extra`; None if the call is no request to the app."""
        found = extra.get(KEY)
        if found is None:
            return None
        *texts, headers, client, server = found
        kind, version, method, scheme, raw_path, query, root_path = texts
        return cls(
            kind, version, method, scheme, raw_path, query, root_path, split_headers(headers), client, server
        )


def join_headers(headers: Sequence[HeaderPair]) -> str:
    """Return headers as text. Raise BadInput if one of them holds a line break."""
    flat = [part for header in headers for part in header]
    joined = _SEPARATOR.join(flat)
    if flat and joined.count(_SEPARATOR) != len(flat) - 1:
        raise BadInput("A header of the request holds a line break.", remedy="Send the header in one line.")
    return joined.decode("latin-1")


def split_headers(text: str) -> list[HeaderPair]:
    """Return the headers in a text that `join_headers` made."""
    if not text:
        return []
    flat = text.encode("latin-1").split(_SEPARATOR)
    return list(zip(flat[::2], flat[1::2], strict=True))


def scope_of(facts: Facts, state: dict[str, Any]) -> dict[str, Any]:
    """Return the ASGI scope of a request. `state` becomes `scope["state"]`."""
    raw_path = facts.raw_path.encode("utf-8", "surrogateescape")
    path = facts.raw_path if b"%" not in raw_path else unquote_to_bytes(raw_path).decode("utf-8", "replace")
    scope: dict[str, Any] = {
        "type": facts.kind,
        "asgi": {"version": "3.0", "spec_version": _VERSIONS[facts.kind]},
        "http_version": facts.http_version,
        "scheme": facts.scheme,
        "path": path,
        "raw_path": raw_path,
        "query_string": facts.query.encode("utf-8", "surrogateescape"),
        "root_path": facts.root_path,
        "headers": facts.headers,
        "client": tuple(facts.client) if facts.client is not None else None,
        "server": tuple(facts.server) if facts.server is not None else None,
        "state": state,
        "extensions": {},
    }
    if facts.kind == HTTP:
        scope["method"] = facts.method
    else:
        scope["subprotocols"] = _subprotocols(facts.headers)
        scope["extensions"] = {"websocket.http.response": {}}
    return scope


def _subprotocols(headers: Sequence[HeaderPair]) -> list[str]:
    texts = [value.decode("latin-1") for name, value in headers if name == _PROTOCOLS]
    return [one.strip() for text in texts for one in text.split(",") if one.strip()]
