"""An exchange of a worker: the order of pieces, the credit in both directions, and the ends of waits."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from live import LIMIT_S
from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.exchange import WorkerExchange
from pilotflame.runtime.calls.link.frames import Frame, FrameKind
from pilotflame.runtime.calls.link.stream_credit import PIECE_BYTES, STREAM_CHUNKS
from pilotflame.runtime.calls.serving.input_stream import InputStream


class Ends:
    """Both ends of a link with one exchange: the gateway's input and received pieces, and the worker's exchange."""

    def __init__(self, one: Link, other: Link, *, follows: bool) -> None:
        self.gateway, self.input = one, InputStream()
        self.exchange = WorkerExchange(other, 7, follows=follows)
        self.sent: list[bytes] = []
        self.inputs = 0
        self.input.connect(self._send)
        one.bind(self._on_up, lambda: None)
        other.bind(self._on_down, lambda: None)

    def _send(self, piece: bytes, *, last: bool) -> None:
        self.inputs += 1
        self.gateway.send(FrameKind.INPUT_END if last else FrameKind.INPUT, 7, b"", piece)

    def _on_up(self, frame: Frame) -> None:
        if frame.kind == FrameKind.READ:
            self.input.grant(int(frame.json()["count"]))
        else:
            self.sent.append(frame.payload)

    def _on_down(self, frame: Frame) -> None:
        self.exchange.put(frame.payload, last=frame.kind == FrameKind.INPUT_END)


@contextlib.asynccontextmanager
async def ends(*, follows: bool = True) -> AsyncIterator[Ends]:
    links = [Link(sock) for sock in socket.socketpair()]
    try:
        async with asyncio.timeout(LIMIT_S):
            yield Ends(links[0], links[1], follows=follows)
    finally:
        for link in links:
            link.close()


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@given(st.lists(st.binary(min_size=1, max_size=9) | st.just(b"x" * PIECE_BYTES), max_size=300))
def test_every_piece_of_an_input_arrives_once_and_in_order(pieces: list[bytes]) -> None:
    async def run() -> list[bytes]:
        async with ends() as made, asyncio.TaskGroup() as tasks:

            async def send() -> None:
                for piece in pieces:
                    assert await made.input.put(piece)
                assert await made.input.put(b"", last=True)

            tasks.create_task(send())
            found = []
            while (piece := await made.exchange.receive()) is not None:
                found.append(piece)
            assert await made.exchange.receive() is None
        return found

    assert asyncio.run(run()) == pieces


async def test_no_piece_is_sent_before_the_handler_asks() -> None:
    async with ends() as made:
        sending = asyncio.create_task(made.input.put(b"x"))
        await turns()
        assert made.inputs == 0
        assert await made.exchange.receive() == b"x"
        assert await sending


async def test_unread_pieces_have_a_limit() -> None:
    async with ends() as made:

        async def send() -> None:
            while await made.input.put(b"x"):
                pass

        sending = asyncio.create_task(send())
        assert await made.exchange.receive() == b"x"
        await turns(500)
        assert made.inputs == STREAM_CHUNKS
        made.input.close()
        await sending


async def test_an_input_that_does_not_follow_has_ended() -> None:
    async with ends(follows=False) as made:
        assert await made.exchange.receive() is None


@pytest.mark.parametrize("what", ["receive", "send"])
async def test_waits_end_when_the_caller_goes(what: str) -> None:
    async with ends() as made:
        called: list[Any] = []
        made.exchange.on_gone = lambda: called.append(None)

        async def fill() -> None:
            while await made.exchange.send(b"x" * PIECE_BYTES):
                pass

        waiting = asyncio.create_task(made.exchange.receive() if what == "receive" else fill())
        await turns()
        assert not waiting.done()
        made.exchange.close()
        assert await waiting is None
        assert not await made.exchange.send(b"x")
        assert called == [None]


async def test_pieces_that_arrived_before_the_end_are_read() -> None:
    async with ends() as made:
        made.exchange.put(b"x", last=False)
        made.exchange.close()
        assert await made.exchange.receive() == b"x"
        assert await made.exchange.receive() is None


async def test_output_waits_for_its_reader() -> None:
    async with ends() as made:
        for _ in range(4):
            assert await made.exchange.send(b"x" * PIECE_BYTES)
        waiting = asyncio.create_task(made.exchange.send(b"y"))
        await turns()
        assert not waiting.done()
        made.exchange.grant(1)
        assert await waiting
