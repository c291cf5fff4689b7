"""Reading by ranges: transient failures are retried from where the last attempt ended."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from fault_server import Faults, FaultServer
from pilotflame.errors import SourceMissing, SourceUnavailable
from pilotflame.snapshot.sources import retries
from pilotflame.snapshot.sources.http import HttpSource

DATA = random.Random(4).randbytes(300_000)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultServer]:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.001)
    with FaultServer({"f": DATA}) as found:
        yield found


def test_ends_are_those_of_the_object(server: FaultServer) -> None:
    source, buffer = HttpSource(server.url), bytearray(400_000)
    assert source.read_into("f", 0, memoryview(buffer)) == len(DATA)
    assert buffer[: len(DATA)] == DATA
    assert source.read_into("f", len(DATA) - 2, memoryview(buffer)) == 2
    assert source.read_into("f", len(DATA), memoryview(buffer)) == 0
    assert source.read_into("f", len(DATA) + 9, memoryview(buffer)) == 0


def test_it_goes_on_where_it_broke_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "FIRST_DELAY_S", 0.001)
    with FaultServer({"f": DATA}) as server:
        server.faults = Faults(short_share=1, times=1)
        buffer = bytearray(len(DATA))
        assert HttpSource(server.url).read_into("f", 0, memoryview(buffer)) == len(DATA)
        assert buffer == DATA
    # Compare only when the server has stopped, because it counts bytes after it has sent them.
    assert sum(request.sent for request in server.requests) == len(DATA), "a byte came twice"


def test_a_failed_start_is_retried(server: FaultServer) -> None:
    server.faults = Faults(busy_share=1, times=3)
    buffer = bytearray(10)
    assert HttpSource(server.url).read_into("f", 5, memoryview(buffer)) == 10
    assert buffer == DATA[5:15]
    # `stat` and the range need four requests each: three failures and a success.
    assert len(server.requests) == 8


def test_it_gives_up_after_six_attempts(server: FaultServer) -> None:
    source = HttpSource(server.url)
    source.stat("f")
    server.faults = Faults(reset_share=1, status=503)
    with pytest.raises(SourceUnavailable, match="503"):
        source.read_into("f", 0, memoryview(bytearray(10)))
    assert len(server.requests) == 1 + retries.ATTEMPTS


def test_a_permanent_failure_is_not_retried(server: FaultServer) -> None:
    with pytest.raises(SourceMissing):
        HttpSource(server.url).read_into("g", 0, memoryview(bytearray(10)))
    assert len(server.requests) == 1


def test_delays_double_up_to_a_limit_and_respect_the_source() -> None:
    for attempt in range(1, 40):
        for _ in range(20):
            assert 0 <= retries.delay_s(attempt) <= min(10.0, 0.1 * 2**attempt)
    assert retries.delay_s(1, 7.0) == 7.0
    assert retries.delay_s(1, 86400.0) == 20.0, "a source may not put us off for a day"
