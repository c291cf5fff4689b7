"""Connections: order across threads, back-pressure, and the end of the other side."""

import asyncio
import contextlib
import socket
import threading
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pilotflame.errors import LinkError
from pilotflame.runtime.calls.link.connection import JOIN_BYTES, BlockingLink, Link, dial
from pilotflame.runtime.calls.link.frames import HEADER, Frame, FrameKind, FrameReader, encode

LIMIT_S = 30.0


# -- blocking ends


def test_dialling_an_absent_gateway_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match=f"Cannot reach the gateway at {tmp_path / 'none'}"):
        dial(str(tmp_path / "none"), LIMIT_S)


def test_dialling_gives_a_blocking_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with dial(str(tmp_path / "s"), LIMIT_S) as sock:
            assert sock.gettimeout() is None
            accepted, _ = server.accept()
            with accepted:
                BlockingLink(sock).send(FrameKind.HELLO, {"token": "t"})
                frames = BlockingLink(accepted).receive()
                assert frames is not None
                assert [frame.json() for frame in frames] == [{"token": "t"}]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A socket that listens, and whose backlog is full."""
    with socket.socket(socket.AF_UNIX) as server, contextlib.ExitStack() as waiting:
        server.bind(str(tmp_path / "s"))
        server.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                sock = waiting.enter_context(socket.socket(socket.AF_UNIX))
                sock.setblocking(False)
                sock.connect(str(tmp_path / "s"))
        yield str(tmp_path / "s"), server


def test_dialling_waits_until_the_backlog_has_room(full: tuple[str, socket.socket]) -> None:
    address, server = full
    with ThreadPoolExecutor() as threads:
        dialling = threads.submit(dial, address, LIMIT_S)
        with pytest.raises(TimeoutError):
            dialling.result(0.1)
        server.accept()[0].close()
        with dialling.result(LIMIT_S) as sock:
            assert sock.gettimeout() is None
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, 16) == bytes(16)


def test_dialling_gives_up_at_its_deadline(full: tuple[str, socket.socket]) -> None:
    with pytest.raises(LinkError, match=r"accepted no connection within 0\.1 s"):
        dial(full[0], 0.1)


def test_a_blocking_link_sees_the_end() -> None:
    ours, theirs = socket.socketpair()
    link = BlockingLink(ours)
    theirs.sendall(encode(FrameKind.FORK)[:-1])
    assert link.receive() == []
    theirs.close()
    assert link.receive() is None
    link.sock.close()


# -- links on a loop


class End:
    """One end of a link. It collects the received frames, and notes the close of the link."""

    def __init__(self, sock: socket.socket, *, join_writes: bool = False) -> None:
        self.link = Link(sock, join_writes=join_writes)
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.closed = asyncio.Event()

    def bind(self) -> "End":
        self.link.bind(self.frames.put_nowait, self.closed.set)
        return self

    async def take(self, count: int) -> list[Frame]:
        async with asyncio.timeout(LIMIT_S):
            return [await self.frames.get() for _ in range(count)]

    async def wait_closed(self) -> None:
        async with asyncio.timeout(LIMIT_S):
            await self.closed.wait()


@pytest.fixture(params=[False, True], ids=["at-once", "joined"])
async def ends(request: pytest.FixtureRequest) -> AsyncIterator[tuple[End, End]]:
    one, other = socket.socketpair()
    pair = End(one, join_writes=request.param), End(other)
    yield pair
    for end in pair:
        end.link.close()


async def test_an_idle_link_holds_little_memory() -> None:
    pairs = [socket.socketpair() for _ in range(20)]
    tracemalloc.start()
    links = [Link(sock) for pair in pairs for sock in pair]
    assert tracemalloc.get_traced_memory()[0] < len(links) * 16_000
    tracemalloc.stop()
    for link in links:
        link.close()


@pytest.mark.parametrize("size", [0, 1, JOIN_BYTES, JOIN_BYTES + 1, 4 << 20])
async def test_a_frame_of_any_size_arrives_whole(ends: tuple[End, End], size: int) -> None:
    near, far = ends
    far.bind()
    near.bind()
    payload = bytes(range(256)) * (size // 256 + 1)
    near.link.send(FrameKind.INVOKE, 7, b"head", payload[:size])
    near.link.send_json(FrameKind.DRAIN, 0, {"a": 1})
    first, second = await far.take(2)
    assert first == Frame(FrameKind.INVOKE, 7, b"head", payload[:size])
    assert (second.kind, second.json()) == (FrameKind.DRAIN, {"a": 1})


async def test_each_threads_frames_keep_their_order_and_none_is_torn(ends: tuple[End, End]) -> None:
    near, far = ends
    if near.link._join_writes:
        pytest.skip("only the loop's thread sends on a link that joins writes")
    near.bind()
    far.bind()
    threads, each = 4, 200
    go = threading.Barrier(threads)

    def send(channel: int) -> None:
        go.wait(LIMIT_S)
        for number in range(each):
            size = 100_000 if number % 50 == 0 else number
            near.link.send(FrameKind.CHUNK, channel, str(number).encode(), bytes([channel]) * size)

    workers = [threading.Thread(target=send, args=(channel,)) for channel in range(threads)]
    for worker in workers:
        worker.start()
    frames = await far.take(threads * each)
    for worker in workers:
        worker.join(LIMIT_S)
    for channel in range(threads):
        mine = [frame for frame in frames if frame.channel == channel]
        assert [int(frame.head) for frame in mine] == list(range(each))
        assert all(set(frame.payload) <= {channel} for frame in mine)


async def test_more_than_the_socket_holds_is_kept_until_it_is_read(ends: tuple[End, End]) -> None:
    near, far = ends
    near.bind()
    sent = [bytes([index]) * (1 << 20) for index in range(20)]
    for index, payload in enumerate(sent):
        near.link.send(FrameKind.CHUNK, index, b"", payload)
    far.bind()
    assert [(frame.channel, frame.payload) for frame in await far.take(20)] == list(enumerate(sent))


async def test_frames_sent_before_bind_are_not_lost(ends: tuple[End, End]) -> None:
    near, far = ends
    for number in range(3):
        near.link.send(FrameKind.CHUNK, number)
    far.bind()
    assert [frame.channel for frame in await far.take(3)] == [0, 1, 2]


async def test_the_next_owner_gets_the_rest_of_the_frames(ends: tuple[End, End]) -> None:
    near, far = ends
    second: asyncio.Queue[Frame] = asyncio.Queue()

    def first(frame: Frame) -> None:
        far.link.bind(second.put_nowait, far.closed.set)

    far.link.bind(first, far.closed.set)
    near.link.send_encoded(
        encode(FrameKind.CHUNK, 1) + encode(FrameKind.CHUNK, 2) + encode(FrameKind.CHUNK, 3)
    )
    async with asyncio.timeout(LIMIT_S):
        assert [(await second.get()).channel for _ in range(2)] == [2, 3]


async def test_on_close_is_called_once_after_the_last_frames(ends: tuple[End, End]) -> None:
    near, far = ends
    seen: list[str] = []
    far.link.bind(lambda frame: seen.append(f"frame {frame.channel}"), lambda: (seen.append("closed"), far.closed.set())[0])  # fmt: skip
    near.link.send(FrameKind.CHUNK, 1)
    near.link.close()
    near.link.close()
    await far.wait_closed()
    assert seen == ["frame 1", "closed"]
    assert far.link.closed
    far.link.send(FrameKind.CHUNK, 2)


@pytest.mark.parametrize("bound", [True, False])
async def test_a_process_that_ends_without_reading_everything_is_noticed_after_its_last_frames(
    bound: bool,
) -> None:
    one, other = socket.socketpair()
    near = End(one)
    if bound:
        near.bind()
    near.link.send(FrameKind.DRAIN, 1, b"never read")
    # More than the link receives at once, so that frames are left when the loop reports the reset socket.
    payload = bytes(60_000)
    for channel in range(3):
        other.sendall(encode(FrameKind.CHUNK, channel, b"", payload))
    other.close()
    if bound:
        assert (await near.take(1))[0].channel == 0
    near.link.note_peer_ended()
    if not bound:
        near.bind()
    await near.wait_closed()
    assert near.frames.qsize() == (2 if bound else 3)


async def test_draining_reads_all_that_an_ended_peer_has_sent() -> None:
    one, other = socket.socketpair()
    near = End(one).bind()
    for channel in range(3):
        other.sendall(encode(FrameKind.CHUNK, channel, b"", bytes(60_000)))
    other.close()
    near.link.drain()
    assert near.link.closed
    assert near.closed.is_set()
    assert near.frames.qsize() == 3


async def test_closing_a_link_does_not_call_its_own_on_close(ends: tuple[End, End]) -> None:
    near, far = ends
    near.bind()
    far.bind()
    near.link.close()
    await far.wait_closed()
    assert not near.closed.is_set()


async def test_sending_to_a_closed_peer_is_no_error(ends: tuple[End, End]) -> None:
    near, far = ends
    near.bind()
    for _ in range(20):
        near.link.send(FrameKind.CHUNK, 1, b"", b"x" * (1 << 20))
    far.link.close()
    await near.wait_closed()
    near.link.send(FrameKind.CHUNK, 1)


def broken_json(frame: Frame) -> None:
    frame.json()


@pytest.mark.parametrize(
    "junk", [HEADER.pack(2**32 - 1, 0, 1, 0), HEADER.pack(1, 2, 1, 0), encode(FrameKind.READY, 0, b"{")]
)
async def test_a_peer_that_breaks_the_format_is_disconnected(ends: tuple[End, End], junk: bytes) -> None:
    near, far = ends
    near.bind()
    far.link.bind(broken_json, far.closed.set)
    near.link.send_encoded(junk + encode(FrameKind.CHUNK, 1))
    await far.wait_closed()
    await near.wait_closed()


async def test_an_owner_that_closes_gets_no_more_frames(ends: tuple[End, End]) -> None:
    near, far = ends
    seen: list[int] = []

    def once(frame: Frame) -> None:
        seen.append(frame.channel)
        far.link.close()

    far.link.bind(once, far.closed.set)
    near.bind()
    near.link.send_encoded(encode(FrameKind.CHUNK, 1) + encode(FrameKind.CHUNK, 2))
    await near.wait_closed()
    assert seen == [1]
    assert not far.closed.is_set()


async def test_finishing_sends_what_is_left(ends: tuple[End, End]) -> None:
    near, far = ends
    near.bind()
    received: list[Frame] = []
    far.link.sock.setblocking(True)

    def read() -> None:
        reader = FrameReader()
        while data := far.link.sock.recv(1 << 16):
            received.extend(reader.feed(data))

    for channel in range(10):
        near.link.send(FrameKind.CHUNK, channel, b"", b"x" * (1 << 20))
    thread = threading.Thread(target=read)
    thread.start()
    near.link.finish(LIMIT_S)
    await asyncio.to_thread(thread.join, LIMIT_S)
    assert near.link.closed
    assert [(frame.channel, len(frame.payload)) for frame in received] == [(n, 1 << 20) for n in range(10)]


async def test_finishing_gives_up_on_a_peer_that_does_not_read(ends: tuple[End, End]) -> None:
    near, _ = ends
    near.bind()
    near.link.send(FrameKind.CHUNK, 1, b"", b"x" * (20 << 20))
    near.link.finish(0.01)
    assert near.link.closed


async def test_finishing_twice_or_after_the_end_does_nothing(ends: tuple[End, End]) -> None:
    near, _ = ends
    near.bind()
    near.link.close()
    near.link.finish(LIMIT_S)
    near.link.finish(LIMIT_S)


@pytest.mark.parametrize("call", [lambda link: link.send(FrameKind.CHUNK), lambda link: link.send_encoded()])
async def test_sending_on_a_closed_link_does_nothing(
    ends: tuple[End, End], call: Callable[[Link], None]
) -> None:
    near, _ = ends
    near.link.close()
    call(near.link)


async def test_a_frame_that_cannot_be_taken_ends_its_link_loudly(caplog: pytest.LogCaptureFixture) -> None:
    """The frames before the failing frame in the same read are delivered; the frames after it are not."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link, taken, closed = Link(ours), list[int](), asyncio.Event()

        def take(frame: Frame) -> None:
            if frame.kind == FrameKind.READY:
                raise KeyError("window")
            taken.append(frame.channel)

        link.bind(take, closed.set)
        theirs.sendall(encode(FrameKind.RESULT, 1) + encode(FrameKind.READY) + encode(FrameKind.RESULT, 2))
        async with asyncio.timeout(LIMIT_S):
            await closed.wait()
        assert (taken, link.closed) == ([1], True)
        assert "KeyError: 'window'" in caplog.text


async def test_frames_before_a_malformed_one_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link, taken, closed = Link(ours), list[int](), asyncio.Event()
        link.bind(lambda frame: taken.append(frame.channel), closed.set)
        theirs.sendall(encode(FrameKind.RESULT, 1) + encode(FrameKind.RESULT, 2) + HEADER.pack(1, 2, 3, 4))
        async with asyncio.timeout(LIMIT_S):
            await closed.wait()
        assert taken == [1, 2]
        assert "claims 1 bytes with a head of 2" in caplog.text
