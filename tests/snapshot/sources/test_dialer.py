"""Hosts with several addresses: some answer, some refuse, some never answer, and connections are spread over them."""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from itertools import pairwise
from typing import Any

import psutil
import pytest
import trustme
from certificates import serving, trusting
from fault_server import FaultServer
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import SourceUnavailable
from pilotflame.snapshot.sources import wire
from pilotflame.snapshot.sources.dialer import Address, Dialer, interleaved
from pilotflame.snapshot.sources.http import HttpSource
from pilotflame.snapshot.sources.location import ServerAddress
from pilotflame.snapshot.sources.tls import system_trust
from pilotflame.snapshot.sources.wire import Wire
from source_tests import read

HOST = "many.test"
NAME = "model.safetensors"
DATA = bytes(range(256)) * 400
GOOD = "127.0.0.1"


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Replace `socket.getaddrinfo` for HOST. The test sets the addresses in `names[HOST]`; `names[""]` lists the lookups."""
    known: dict[str, list[str]] = {"": []}
    real = socket.getaddrinfo

    def look_up(host: str, port: int, *given: Any, **named: Any) -> list[Any]:
        if host != HOST:
            return real(host, port, *given, **named)
        known[""].append(host)
        if not known[HOST]:
            raise socket.gaierror(socket.EAI_NONAME, "not known")
        return [found for each in known[HOST] for found in real(each, port, *given, **named)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@contextmanager
def black_hole(address: str, port: int) -> Iterator[None]:
    """Let connections to this address wait for ever: the listener accepts none, and its queue is full."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        for _ in range(4):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((address, port))
        yield


def sockets_to(port: int) -> int:
    """Return how many sockets of this process are connected to a port, or are being connected."""
    found = psutil.Process().net_connections("tcp")
    return sum(1 for one in found if one.raddr and one.raddr.port == port)


# -- the order


ADDRESSES = st.lists(
    st.builds(
        Address,
        st.sampled_from([socket.AF_INET, socket.AF_INET6]),
        st.tuples(st.integers(0, 20).map(str), st.just(443)),
    ),
    unique=True,
    max_size=12,
)


@given(ADDRESSES, st.integers(0, 1000))
def test_families_take_turns_and_the_preferred_one_is_first(addresses: list[Address], turn: int) -> None:
    order = interleaved(addresses, turn)
    assert Counter(order) == Counter(addresses)
    families = [address.family for address in order]
    if addresses:
        assert families[0] == addresses[0].family
    shorter = min(Counter(families).values()) if len(set(families)) == 2 else 0
    assert all(one != two for one, two in pairwise(families[: 2 * shorter]))


@given(ADDRESSES.filter(bool))
def test_every_address_of_the_preferred_family_is_first_in_its_turn(addresses: list[Address]) -> None:
    preferred = [address for address in addresses if address.family == addresses[0].family]
    assert [interleaved(addresses, turn)[0] for turn in range(len(preferred))] == preferred


# -- connecting


@pytest.mark.parametrize("holes", [["127.0.0.2"], ["127.0.0.2", "127.0.0.3"]])
def test_addresses_that_never_answer_do_not_use_up_the_time(
    names: dict[str, list[str]], holes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CONNECT_TIMEOUT_S", 5.0)
    with FaultServer({NAME: DATA}) as server, ExitStack() as stack:
        for hole in holes:
            stack.enter_context(black_hole(hole, server.port))
        names[HOST] = [*holes, GOOD]
        source = HttpSource(f"http://{HOST}:{server.port}")
        assert read(source, NAME, len(DATA)) == DATA


def test_what_did_not_answer_is_avoided_and_names_are_not_looked_up_again(
    names: dict[str, list[str]],
) -> None:
    with socket.create_server((GOOD, 0)) as listener:
        port = listener.getsockname()[1]
        with black_hole("127.0.0.2", port):
            names[HOST] = ["127.0.0.2", "127.0.0.3", GOOD]
            dialer, line = Dialer(), Wire(system_trust, Dialer())
            before = sockets_to(port)
            for _ in range(3):
                with closing(dialer.connect(HOST, port, time.monotonic() + 10, line)) as connected:
                    assert connected.getpeername()[0] == GOOD
                    assert sockets_to(port) == before + 1, "an attempt that lost is still open"
            for _ in range(4):
                first, *_ = dialer.addresses(HOST, port, time.monotonic() + 10)
                assert first.name[0] == GOOD
            line.close()
    assert names[""] == [HOST]


def test_a_name_service_that_hangs_takes_no_longer_than_connecting_may(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, real = threading.Event(), socket.getaddrinfo

    def hang(host: str, *given: Any, **named: Any) -> list[Any]:
        assert host != HOST or answers.wait(30)
        return real(host, *given, **named)

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with FaultServer({NAME: DATA}) as server:
        names[HOST] = [GOOD]
        source = HttpSource(f"http://{HOST}:{server.port}")
        monkeypatch.setattr(wire, "CONNECT_TIMEOUT_S", 0.05)
        for _ in range(3):
            with (
                closing(source.connect()) as connection,
                pytest.raises(SourceUnavailable, match=f"the address of {HOST} was not found in time"),
            ):
                connection.begin(NAME, 0, 1)
        assert sum(HOST in thread.name for thread in threading.enumerate()) == 1, "more than one lookup waits"
        answers.set()
        monkeypatch.setattr(wire, "CONNECT_TIMEOUT_S", 10.0)
        assert read(source, NAME, len(DATA)) == DATA
    assert names[""] == [HOST]


def test_a_name_that_was_not_found_is_looked_up_again(names: dict[str, list[str]]) -> None:
    with FaultServer({NAME: DATA}) as server:
        names[HOST] = []
        source = HttpSource(f"http://{HOST}:{server.port}")
        with closing(source.connect()) as connection, pytest.raises(SourceUnavailable, match="not known"):
            connection.begin(NAME, 0, 1)
        names[HOST] = [GOOD]
        assert read(source, NAME, len(DATA)) == DATA
    assert names[""] == [HOST, HOST]


def test_connections_are_spread_over_all_addresses(names: dict[str, list[str]]) -> None:
    with ExitStack() as stack:
        one = stack.enter_context(socket.create_server(("127.0.0.2", 0)))
        port = one.getsockname()[1]
        stack.enter_context(socket.create_server(("127.0.0.3", port)))
        names[HOST] = ["127.0.0.2", "127.0.0.3"]
        dialer, line = Dialer(), Wire(system_trust, Dialer())
        stack.callback(line.close)
        reached = Counter(
            stack.enter_context(dialer.connect(HOST, port, time.monotonic() + 10, line)).getpeername()[0]
            for _ in range(6)
        )
    assert reached == {"127.0.0.2": 3, "127.0.0.3": 3}


def test_a_host_that_never_answers_is_unavailable(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "CONNECT_TIMEOUT_S", 0.4)
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
    with black_hole("127.0.0.2", port), black_hole("127.0.0.3", port):
        names[HOST] = ["127.0.0.2", "127.0.0.3"]
        before = sockets_to(port)
        with (
            closing(HttpSource(f"http://{HOST}:{port}").connect()) as connection,
            pytest.raises(SourceUnavailable, match="timed out"),
        ):
            connection.begin(NAME, 0, 1)
        assert sockets_to(port) == before


def test_addresses_of_a_family_that_the_kernel_does_not_have_are_passed_over(
    names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A kernel that was started with ipv6.disable=1 lacks a family. This kernel lacks AppleTalk, which stands for that family.
    with pytest.raises(OSError, match="not supported"):
        socket.socket(socket.AF_APPLETALK, socket.SOCK_STREAM)
    with socket.create_server((GOOD, 0)) as listener, socket.create_server(("127.0.0.2", 0)) as taken:
        port, hole = listener.getsockname()[1], taken.getsockname()[1]
        taken.close()
        found = [
            (socket.AF_INET, *[socket.SOCK_STREAM, 6, ""], ("127.0.0.2", hole)),
            (socket.AF_APPLETALK, *[socket.SOCK_STREAM, 0, ""], (GOOD, port)),
            (socket.AF_INET, *[socket.SOCK_STREAM, 6, ""], (GOOD, port)),
        ]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_given, **_named: found)
        line = Wire(system_trust, Dialer())
        with (
            black_hole("127.0.0.2", hole),
            closing(Dialer().connect(HOST, port, time.monotonic() + 10, line)) as connected,
        ):
            assert connected.getpeername() == (GOOD, port)
        line.close()


def test_close_ends_a_race(names: dict[str, list[str]]) -> None:
    with socket.create_server(("127.0.0.2", 0)) as taken:
        port = taken.getsockname()[1]
    with black_hole("127.0.0.2", port), black_hole("127.0.0.3", port):
        names[HOST] = ["127.0.0.2", "127.0.0.3"]
        before = sockets_to(port)
        for attempts in (1, 2):
            line, failed = Wire(system_trust, Dialer()), threading.Event()

            def connect(line: Wire = line, failed: threading.Event = failed) -> None:
                try:
                    line.connect(ServerAddress("http", HOST, port))
                except ConnectionAbortedError:
                    failed.set()

            racer = threading.Thread(target=connect)
            racer.start()
            while sockets_to(port) < before + attempts:
                threading.Event().wait(0.005)
            line.close()
            racer.join(5)
            assert not racer.is_alive()
            assert failed.is_set()
            assert sockets_to(port) == before


def test_an_address_whose_handshake_fails_is_avoided(names: dict[str, list[str]]) -> None:
    authority = trustme.CA()
    with (
        FaultServer({NAME: DATA}, ssl_context=serving(authority, HOST)) as server,
        socket.create_server(("127.0.0.2", server.port)) as broken,
    ):
        asked = threading.Event()
        broken.settimeout(5)

        def refuse() -> None:
            with broken.accept()[0] as peer:
                peer.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")
                asked.set()

        thread = threading.Thread(target=refuse)
        thread.start()
        names[HOST] = ["127.0.0.2", GOOD]
        source = HttpSource(f"https://{HOST}:{server.port}", ssl_context=trusting(authority))
        for _ in range(4):
            assert read(source, NAME, len(DATA)) == DATA
        thread.join(10)
        assert asked.is_set()
        broken.setblocking(False)
        with pytest.raises(BlockingIOError):
            broken.accept()
