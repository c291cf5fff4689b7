"""The limit of headers, for requests that arrive in any pieces, also together with the end of another request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.front.http.header_limit import MAX_HEADER_BYTES, HeaderLimit

SIZES = st.sampled_from([0, 1, 3, 4, 100, MAX_HEADER_BYTES, 3 * MAX_HEADER_BYTES])


@dataclass
class Body:
    """Stands in for aiohttp's StreamReader of a request's body."""

    begins: int
    ends: int
    chunked: bool
    parsed: int = 0

    def is_eof(self) -> bool:
        return self.parsed >= self.ends


def laid_out(requests: list[tuple[int, int, bool]]) -> tuple[bytes, list[Body]]:
    """Return the bytes of requests, and the positions of their bodies in these bytes. An element of `requests` is the size of the
    header, the size of the body, and whether the body is chunked.
    """
    sent, bodies = b"", []
    for header, body, chunked in requests:
        sent += b"GET / HTTP/1.1\r\n" + b"h" * min(header, MAX_HEADER_BYTES - 100) + b"\r\n\r\n"
        bodies.append(Body(len(sent), len(sent) + body, chunked))
        sent += b"b" * body
    return sent, bodies


@given(st.lists(st.tuples(SIZES, SIZES, st.booleans()), min_size=1, max_size=5), st.data())
def test_only_an_unfinished_header_is_refused(requests, data):
    """Calls `begin` and `responded` at random times after the bytes that cause these calls."""
    sent, bodies = laid_out(requests)
    limit, waiting, running, at = HeaderLimit(), list(bodies), None, 0
    while at < len(sent) or waiting or running:
        moves = ["bytes"] * (at < len(sent))
        moves += ["begin"] * bool(not running and waiting and waiting[0].begins <= at)
        moves += ["responded"] * bool(running and running.is_eof())
        move = data.draw(st.sampled_from(moves))
        if move == "bytes":
            size = data.draw(SIZES.filter(bool))
            fits = limit.add(sent[at : at + size])
            at = min(len(sent), at + size)
            assert fits or limit.arrived, "bytes of a body were taken for a header"
            for body in bodies:
                body.parsed = at
        elif move == "begin":
            running = waiting.pop(0)
            limit.begin(running, None if running.chunked else running.ends - running.begins)  # type: ignore[arg-type]
        else:
            running = None
            limit.responded()


@pytest.mark.parametrize("body", [b"", b"12345"])
def test_a_header_that_begins_after_the_response_is_refused_if_it_is_too_large(body: bytes):
    limit = HeaderLimit()
    assert limit.add(b"POST / HTTP/1.1\r\n\r\n" + body[:2])
    limit.begin(Body(0, 0, False, parsed=0 if len(body) else 1), len(body))  # type: ignore[arg-type]
    assert not body or limit.add(body[2:])
    limit.responded()
    assert not limit.arrived
    assert limit.add(b"x" * MAX_HEADER_BYTES)
    assert not limit.add(b"x")
    assert not limit.arrived


def test_bytes_behind_a_running_request_are_limited():
    limit = HeaderLimit()
    limit.add(b"GET / HTTP/1.1\r\n\r\n")
    limit.begin(Body(0, 0, False), 0)  # type: ignore[arg-type]
    assert limit.add(b"x" * MAX_HEADER_BYTES)
    assert not limit.add(b"x")
    assert limit.arrived
