"""The loop of a link on a thread of its own."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue

import pytest
from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.frames import Frame, FrameKind, FrameReader, encode
from pilotflame.runtime.calls.link.poll_loop import PollLoop

LIMIT_S = 30.0


class Rig:
    """A loop on a thread, and a link on it."""

    def __init__(self) -> None:
        self.seen: SimpleQueue[object] = SimpleQueue()
        self.loop = PollLoop(self.seen.put)
        self.loop.open()
        self.gateway, sock = socket.socketpair()
        self.gateway.settimeout(LIMIT_S)
        self.link = Link(sock, loop=self.loop)
        self.link.bind(self.seen.put, lambda: self.seen.put("lost"))
        self.thread = threading.Thread(target=self.loop.run)
        self.thread.start()

    def next(self) -> object:
        return self.seen.get(timeout=LIMIT_S)

    def end(self) -> None:
        self.loop.stop()
        self.thread.join(LIMIT_S)
        assert not self.thread.is_alive()
        self.gateway.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.end()
    made.link.finish(LIMIT_S)


def test_a_link_on_it_receives_and_sends_more_than_a_socket_holds(rig: Rig) -> None:
    large = os.urandom(8 << 20)
    rig.link.send(FrameKind.RESULT, 1, b"", large)
    rig.link.send(FrameKind.RESULT, 2, b"", b"small")
    reader, frames = FrameReader(), list[Frame]()
    while len(frames) < 2:
        frames += reader.feed(rig.gateway.recv(1 << 20))
    assert [(frame.channel, frame.payload) for frame in frames] == [(1, large), (2, b"small")]
    rig.gateway.sendall(encode(FrameKind.INVOKE, 3, b"{}", large))
    frame = rig.next()
    assert isinstance(frame, Frame)
    assert (frame.channel, bytes(frame.payload)) == (3, large)


def test_the_end_of_the_other_side_is_reported_once(rig: Rig) -> None:
    rig.gateway.close()
    assert rig.next() == "lost"
    rig.loop.call_soon_threadsafe(rig.seen.put, "after")
    assert rig.next() == "after"


def test_timers_come_in_their_order_and_calls_of_threads_at_once(rig: Rig) -> None:
    def begin() -> None:
        rig.loop.call_later(0.02, rig.seen.put, "last")
        rig.loop.call_later(0.01, rig.seen.put, "second")
        rig.loop.call_soon(rig.seen.put, "first")

    rig.loop.call_soon_threadsafe(begin)
    assert [rig.next() for _ in range(3)] == ["first", "second", "last"]


def test_it_sees_the_numbers_of_signals(rig: Rig) -> None:
    before = signal.set_wakeup_fd(rig.loop.signals)
    try:
        previous = signal.signal(signal.SIGUSR1, lambda *_: None)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert rig.next() == signal.SIGUSR1
        signal.signal(signal.SIGUSR1, previous)
    finally:
        signal.set_wakeup_fd(before)
