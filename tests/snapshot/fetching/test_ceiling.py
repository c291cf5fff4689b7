"""The ceiling: measured over plain http with ranges, and nowhere else."""

from __future__ import annotations

from itertools import pairwise

from fault_server import Faults, FaultServer
from pilotflame.snapshot.fetching.ceiling import CONNECTIONS, ceiling
from pilotflame.snapshot.sources.location import Location

SIZE_BYTES = 1_000_003


def test_every_byte_is_asked_for_once() -> None:
    with FaultServer({"object": bytes(SIZE_BYTES)}) as server:
        rate = ceiling(Location(f"{server.url}/object?key=1", {"Authorization": "me"}), SIZE_BYTES)
        asked = sorted((request.begin, request.end) for request in server.requests)
        assert {request.headers["authorization"] for request in server.requests} == {"me"}
        assert {request.target for request in server.requests} == {"/object?key=1"}
    assert rate is not None
    assert rate > 0
    assert (asked[0][0], asked[-1][1], len(asked)) == (0, SIZE_BYTES, CONNECTIONS)
    assert all(one[1] == two[0] for one, two in pairwise(asked))


def test_there_is_none_without_plain_http_ranges_or_bytes() -> None:
    assert ceiling(Location("https://127.0.0.1:1/object"), 10) is None
    with FaultServer({"object": bytes(100)}) as server:
        location = Location(f"{server.url}/object")
        assert ceiling(location, 0) is None
        assert ceiling(location, 3) is not None
        for faults in (Faults(ranges=False), Faults(status=403), Faults(short_share=1.0)):
            server.faults = faults
            assert ceiling(location, 100) is None, faults
    assert ceiling(location, 100) is None  # nobody listens any more
