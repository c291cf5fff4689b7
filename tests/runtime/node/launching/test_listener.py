"""The listener over a real unix socket: a valid token opens a link, other connections are closed."""

import asyncio
import os
import resource
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from weakref import WeakSet

import pytest
from pilotflame.errors import GatewayError
from pilotflame.runtime.calls.link.connection import Link
from pilotflame.runtime.calls.link.frames import HEADER, Frame, FrameKind, encode, encode_json
from pilotflame.runtime.ground.telemetry.log_stream import LogStream
from pilotflame.runtime.ground.telemetry.logs import LogChannel
from pilotflame.runtime.node.launching import listener as module
from pilotflame.runtime.node.launching.listener import MAX_HELLO_BYTES, MAX_SOCKET_PATH, Listener

LIMIT_S = 30.0


class Place:
    """A listener, and the links it accepts."""

    def __init__(self, folder: Path) -> None:
        self.listener = Listener(folder / "run" / "link.sock")
        self.listener.open()
        self.channel = LogChannel()
        self.links: asyncio.Queue[tuple[Link, int]] = asyncio.Queue()
        self.taken: list[Link] = []
        self.socks: list[socket.socket] = []

    def expect(self, role: str = "worker", source: str = "w1") -> str:
        return self.listener.expect(role, source, self.channel, self._on_link)

    def _on_link(self, link: Link, pid: int, _output: LogStream | None) -> None:
        self.taken.append(link)
        self.links.put_nowait((link, pid))

    async def dial(self, *data: bytes) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        self.socks.append(sock)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(self.listener.path))
        for piece in data:
            await loop.sock_sendall(sock, piece)
        return sock

    async def link(self) -> tuple[Link, int]:
        return await asyncio.wait_for(self.links.get(), LIMIT_S)

    async def accepts_others(self) -> None:
        """Check that a valid connection still opens a link."""
        await self.dial(hello(self.expect()))
        await self.link()

    def close(self) -> None:
        self.listener.close()
        for link in self.taken:
            link.close()
        for sock in self.socks:
            sock.close()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    made = Place(tmp_path)
    yield made
    made.close()


def hello(token: str, role: str = "worker") -> bytes:
    return encode_json(FrameKind.HELLO, 0, {"token": token, "role": role})


async def disconnected(sock: socket.socket) -> bool:
    try:
        return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1), LIMIT_S) == b""
    except ConnectionResetError:
        return True


async def test_a_valid_token_opens_a_link_with_the_kernels_pid(place: Place) -> None:
    await place.dial(hello(place.expect()))
    _, pid = await place.link()
    assert pid == os.getpid()


@pytest.mark.parametrize("cut", [1, HEADER.size - 1, HEADER.size, HEADER.size + 1])
async def test_a_hello_may_come_in_pieces_and_with_more_behind_it(place: Place, cut: int) -> None:
    data = hello(place.expect()) + encode(FrameKind.BUILT, 5) + encode(FrameKind.BUILT, 6)
    await place.dial(data[:cut], data[cut:])
    link, _ = await place.link()
    frames: asyncio.Queue[Frame] = asyncio.Queue()
    link.bind(frames.put_nowait, lambda: None)
    async with asyncio.timeout(LIMIT_S):
        assert [(await frames.get()).channel for _ in range(2)] == [5, 6]


async def test_connections_that_say_nothing_are_few_and_keep_no_worker_out(place: Place) -> None:
    silent = [await place.dial() for _ in range(400)]
    await place.accepts_others()
    open_ones = 0
    for sock in silent:
        try:
            open_ones += sock.recv(1) != b""
        except BlockingIOError:
            open_ones += 1
    assert open_ones <= module.MAX_GREETINGS
    assert await disconnected(silent[0])


async def test_only_this_user_reaches_the_socket_and_it_is_removed(place: Place) -> None:
    path = Path(place.listener.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    place.listener.close()
    assert not path.exists()
    path.touch()  # a killed gateway leaves its socket file
    place.listener.open()
    await place.accepts_others()


def bad_hellos(token: str) -> dict[str, bytes]:
    name = token.partition(".")[0]
    return {
        "another token": hello("0" * 16 + "." + "0" * 32),
        "the right name with another secret": hello(f"{name}.{'0' * 32}"),
        "the right name without a secret": hello(name),
        "an empty secret": hello(f"{name}."),
        "a secret with letters of another script": hello(f"{name}.é"),
        "no token": encode_json(FrameKind.HELLO, 0, {"role": "worker"}),
        "no role": encode_json(FrameKind.HELLO, 0, {"token": token}),
        "a token that is no text": encode_json(FrameKind.HELLO, 0, {"token": {"a": 1}, "role": "worker"}),
        "another role": hello(token, "zygote"),
        "an unknown role": hello(token, "gateway"),
        "another kind": encode_json(FrameKind.READY, 0, {"token": token, "role": "worker"}),
        "a head that is no object": encode(FrameKind.HELLO, 0, b"[1]"),
        "a head that is no JSON": encode(FrameKind.HELLO, 0, b"\xff{"),
        "a head longer than its frame": HEADER.pack(4, 5, FrameKind.HELLO, 0) + b"{}  ",
        "an HTTP request": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * (2 * MAX_HELLO_BYTES),
        "a frame over the limit": encode(FrameKind.HELLO, 0, b" " * (MAX_HELLO_BYTES + 1)),
        "a hello without end": HEADER.pack(2**32 - 1, 0, FrameKind.HELLO, 0) + b"x" * (3 * MAX_HELLO_BYTES),
        "zeros": bytes(3 * MAX_HELLO_BYTES),
    }


@pytest.mark.parametrize("name", list(bad_hellos("a.b")))
async def test_a_wrong_hello_is_disconnected_and_others_are_not_affected(place: Place, name: str) -> None:
    token = place.expect()
    dialling = await place.dial()  # another process, whose HELLO comes later
    try:
        sock = await place.dial(bad_hellos(token)[name])
    except (BrokenPipeError, ConnectionResetError):
        sock = place.socks[-1]
    assert await disconnected(sock)
    assert place.links.empty()
    await asyncio.get_running_loop().sock_sendall(dialling, hello(token))  # the token is still valid
    await place.link()


async def test_a_token_is_used_once(place: Place) -> None:
    token = place.expect()
    await place.dial(hello(token))
    await place.link()
    assert await disconnected(await place.dial(hello(token)))
    assert await disconnected(await place.dial(hello(token, "log")))
    assert place.links.empty()


async def test_a_forgotten_token_opens_nothing(place: Place) -> None:
    token = place.expect()
    place.listener.forget(token)
    place.listener.forget(token)
    place.listener.forget("never.was")
    assert await disconnected(await place.dial(hello(token)))
    await place.accepts_others()


async def test_tokens_cannot_be_guessed_from_one_another(place: Place) -> None:
    tokens = {place.expect() for _ in range(50)}
    assert len({token.partition(".")[2] for token in tokens}) == 50
    assert all(len(token.partition(".")[2]) == 32 for token in tokens)


async def test_one_log_connection_comes_before_the_link(place: Place) -> None:
    token = place.expect(source="zygote")
    log = await place.dial(hello(token, "log") + b"first\nsec")
    follow = place.channel.follow(10)
    assert (await asyncio.wait_for(anext(follow), LIMIT_S))[1:3] == ("zygote", "first")
    assert await disconnected(await place.dial(hello(token, "log")))  # a second log connection is closed
    await place.dial(hello(token))
    await place.link()
    await asyncio.get_running_loop().sock_sendall(log, b"ond\n")
    assert (
        await asyncio.wait_for(anext(follow), LIMIT_S)
    ).text == "second"  # the log connection outlives the HELLO of the link
    await follow.aclose()  # type: ignore[attr-defined]


async def test_a_link_does_not_overtake_the_log_connection_before_it(place: Place) -> None:
    """Here the process was stopped after it had connected its output, and before it sent this connection's HELLO."""
    opened: asyncio.Future[LogStream | None] = asyncio.get_running_loop().create_future()

    def on_link(link: Link, _pid: int, output: LogStream | None) -> None:
        place.taken.append(link)
        opened.set_result(output)

    token = place.listener.expect("worker", "w1", place.channel, on_link)
    log, link = (socket.socket(socket.AF_UNIX) for _ in range(2))
    place.socks += [log, link]
    log.connect(str(place.listener.path))
    # The event loop gets no turn until both connections are there. It then sees the second connection first.
    assert place.listener._accept()
    log.send(hello(token, "log"))
    link.connect(str(place.listener.path))
    link.send(hello(token))
    assert await asyncio.wait_for(opened, LIMIT_S) is not None


async def test_a_log_connection_is_forgotten_at_its_end(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams, closed = WeakSet[LogStream](), asyncio.Event()

    class Stream(LogStream):
        def close(self) -> None:
            streams.add(self)
            super().close()
            closed.set()

    monkeypatch.setattr(module, "LogStream", Stream)
    (await place.dial(hello(place.expect(), "log"))).close()
    await asyncio.wait_for(closed.wait(), LIMIT_S)
    assert not streams


async def test_a_silent_connection_is_closed_in_time(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HELLO_TIMEOUT_S", 0.01)
    token = place.expect()
    silent = [await place.dial(), await place.dial(hello(token)[:-1])]
    for sock in silent:
        assert await disconnected(sock)
    await place.accepts_others()


async def test_a_connection_closed_before_its_hello_is_forgotten(place: Place) -> None:
    for data in (b"", b"x"):
        (await place.dial(data)).close()
    await place.accepts_others()
    assert not place.listener._greetings


async def test_closing_disconnects_connections_without_a_hello(place: Place) -> None:
    sock = await place.dial()
    await place.accepts_others()  # accepted later, so the silent connection is accepted, too
    place.listener.close()
    assert await disconnected(sock)
    place.listener.open()


@contextmanager
def no_free_descriptor() -> Iterator[None]:
    """Inside the block, this process can open no file and accept no connection."""
    # With a limit of 0, no descriptor can be opened, even if one is closed meanwhile. Open descriptors stay open.
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_without_a_free_descriptor_it_pauses_says_so_once_and_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "ACCEPT_RETRY_S", 0.05)
    accepts, accept = [0], place.listener._accept
    place.listener._loop.remove_reader(place.listener._sock)

    def counted() -> bool:
        accepts[0] += 1
        return accept()

    monkeypatch.setattr(place.listener, "_accept", counted)
    data = hello(place.expect())
    sock = await place.dial(data)
    with no_free_descriptor():
        place.listener._resume()
        # Wait until several pauses have ended. Without pauses, the loop would call `_accept` thousands of times.
        await asyncio.sleep(0.3)
        assert 2 <= accepts[0] <= 10
        assert place.links.empty()
    await place.link()
    assert sock.fileno() > 0
    (record,) = [one for one in caplog.records if one.name == module.__name__]
    assert "Too many open files" in record.getMessage()
    assert "ulimit -n" in record.getMessage()


def test_a_path_too_long_for_a_socket_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(GatewayError, match=f"longer than {MAX_SOCKET_PATH} bytes") as caught:
        Listener(tmp_path / ("x" * 120))
    assert "--state-dir" in caught.value.remedy
