"""Readers: results in order, one buffer each, the first failure ends it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from pilotflame.snapshot.format.readers import in_order


@pytest.mark.parametrize("readers", [1, 3])
def test_results_come_in_the_jobs_order_whoever_is_first(readers: int) -> None:
    last = threading.Event()

    def job(index: int) -> Callable[[memoryview], int]:
        def run(buffer: memoryview) -> int:
            assert len(buffer) == 7
            if index == 2:
                last.set()
            elif index == 0 and readers > 1:
                assert last.wait(10)  # finished after others that were begun later
            return index

        return run

    assert list(in_order((job(index) for index in range(50)), readers, 7)) == list(range(50))


def test_buffers_are_kept_and_not_shared() -> None:
    seen: set[int] = set()
    together = threading.Barrier(3, timeout=10)

    def job(buffer: memoryview) -> int:
        seen.add(id(buffer.obj))
        together.wait()
        return id(buffer.obj)

    found = list(in_order([job] * 12, 3, 10))
    assert len(seen) == 3
    assert len(found) == 12


@pytest.mark.parametrize("readers", [1, 3])
def test_the_first_failure_ends_it(readers: int) -> None:
    begun: list[int] = []

    def job(index: int) -> Callable[[memoryview], int]:
        def run(_: memoryview) -> int:
            begun.append(index)
            if index == 5:
                raise OSError("broken")
            return index

        return run

    found: list[int] = []
    with pytest.raises(OSError, match="broken"):
        found.extend(in_order((job(index) for index in range(1000)), readers, 1))
    assert len(begun) < 50
    assert not [thread for thread in threading.enumerate() if "snapshot-reader" in thread.name]
