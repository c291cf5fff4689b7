"""The facts of a request reach the app as an ASGI scope, whatever bytes its headers have."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput
from pilotflame.runtime.plugins.asgi.scope import HTTP, WEBSOCKET, Facts, scope_of

PARTS = st.binary().map(lambda value: value.replace(b"\n", b""))
HEADERS = st.lists(st.tuples(PARTS, PARTS))
FACTS = Facts(HTTP, "1.1", "GET", "http", "/asgi/f/x", "", "/asgi/f", [], ("10.0.0.1", 5), None)


def passed(facts: Facts) -> Facts:
    """Return the facts as a worker gets them."""
    extra: dict[str, Any] = orjson.loads(orjson.dumps(facts.encode()))
    found = Facts.decode(extra)
    assert found is not None
    return found


@given(HEADERS)
def test_headers_of_any_bytes_reach_the_app(headers: list[tuple[bytes, bytes]]) -> None:
    assert scope_of(passed(FACTS._replace(headers=headers)), {})["headers"] == headers


@given(st.binary(), st.binary())
def test_a_header_with_a_line_break_is_refused(before: bytes, after: bytes) -> None:
    with pytest.raises(BadInput, match="line break"):
        FACTS._replace(headers=[(b"x", before + b"\n" + after)]).encode()


def test_the_scope_is_that_of_asgi() -> None:
    facts = FACTS._replace(raw_path="/asgi/f/a%20%C3%A9%2Fb", query="q=%20", headers=[(b"host", b"x")])
    state = {"n": 1}
    assert scope_of(passed(facts), state) == {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "GET",
        "scheme": "http",
        "path": "/asgi/f/a é/b",
        "raw_path": b"/asgi/f/a%20%C3%A9%2Fb",
        "query_string": b"q=%20",
        "root_path": "/asgi/f",
        "headers": [(b"host", b"x")],
        "client": ("10.0.0.1", 5),
        "server": None,
        "state": state,
        "extensions": {},
    }


def test_a_websocket_has_its_subprotocols() -> None:
    headers = [(b"sec-websocket-protocol", b"chat, json"), (b"sec-websocket-protocol", b"x"), (b"host", b"a")]
    scope = scope_of(passed(FACTS._replace(kind=WEBSOCKET, scheme="ws", headers=headers)), {})
    assert scope["subprotocols"] == ["chat", "json", "x"]
    assert scope["extensions"] == {"websocket.http.response": {}}
    assert "method" not in scope


def test_a_call_without_facts_is_no_request() -> None:
    assert Facts.decode({"job": {}}) is None
