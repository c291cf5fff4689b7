"""If old and new workers of a function do not fit together, callers wait for the old workers, but at most for `drain_s`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.node.scaling.allocation import allocate
from pilotflame.runtime.node.scaling.claims import (
    Allocation,
    Limits,
    NodeProcess,
    ProcessState,
    RevisionClaim,
    WorkerTier,
)
from pilotflame.runtime.node.scaling.placement import Gpu, GpuNeed, MemoryByGpu

DRAINING, READY = ProcessState.DRAINING, ProcessState.READY
NOW_S, DRAIN_S = 1000.0, 30.0
ONE_GPU = [Gpu("0", 1000)]
WHOLE: MemoryByGpu = {"0": 1000}


def draining(key: str, calls: int = 1, on: MemoryByGpu | None = None) -> NodeProcess:
    return NodeProcess(key, DRAINING, calls, 900.0, on or {}, on or {})


def ready(key: str, calls: int = 0, on: MemoryByGpu | None = None) -> NodeProcess:
    return NodeProcess(key, READY, calls, 900.0, on or {}, on or {})


def claim(
    key: str, *processes: NodeProcess, function: str = "f", waits_s: float | None = None, retiring: bool = False,
    tier: WorkerTier = WorkerTier.LOAD, wants: int = 0, need: GpuNeed | None = None,
) -> RevisionClaim:  # fmt: skip
    held = sum(one.state is READY for one in processes)
    return RevisionClaim(
        key, function, "", {tier: wants} if wants else {}, max(held, wants), max(held, wants), processes, need,
        math.inf if waits_s is None else NOW_S - waits_s, 900.0, lambda _freed: 1.0, retiring,
    )  # fmt: skip


def allocated(claims: Sequence[RevisionClaim], most: int | None = 1, gpus: Sequence[Gpu] = ()) -> Allocation:
    return allocate(claims, Limits(most, {}, DRAIN_S), gpus, NOW_S)


def ended(found: Allocation) -> list[object]:
    return [key for grant in found.grants.values() for key in grant.end]


def test_callers_wait_until_drain_s_and_then_the_old_worker_ends() -> None:
    old, other = claim("old", draining("busy"), retiring=True), claim("new", waits_s=29.0, wants=1)
    waits = allocated([old, other])
    assert (ended(waits), waits.again_s) == ([], NOW_S + 1.0)
    late = claim("new", waits_s=30.0, wants=1)
    assert ended(allocated([old, late])) == ["busy"]
    # A worker whose calls have ended leaves by itself, so no worker is ended for the callers.
    assert ended(allocated([claim("old", draining("busy", 0), retiring=True), late])) == []


@pytest.mark.parametrize(
    ("others", "most"),
    [
        # The end of the old worker would not help: the function's new worker alone reaches the limit.
        ([claim("new", ready("has", 1), waits_s=60.0, wants=2)], 1),
        # Callers of another function wait for the old worker, as for all busy workers.
        ([claim("new", waits_s=60.0, wants=1, function="g")], 1),
        # Only a deploy waits, and no caller.
        ([claim("new", ready("has")), claim("next", waits_s=60.0, tier=WorkerTier.PROOF, wants=1)], 1),
        # The draining worker belongs to the live revision, so nothing was replaced.
        ([claim("live", draining("left"), waits_s=60.0, wants=1)], 1),
        # The limit permits another worker.
        ([claim("new", waits_s=60.0, wants=1)], 2),
    ],
    ids=["no gain", "other function", "deploy", "not replaced", "room"],
)
def test_nothing_ends_for(others: list[RevisionClaim], most: int) -> None:
    old = [] if others[0].key == "live" else [claim("old", draining("busy"), retiring=True)]
    assert ended(allocated([*old, *others], most)) == []


def test_as_many_end_as_start_the_least_busy_first() -> None:
    old = claim("old", draining("a", 3), draining("b", 1), draining("c", 2), retiring=True)
    assert ended(allocated([old, claim("new", waits_s=60.0, wants=2)], 3)) == ["b", "c"]


def test_on_one_gpu_callers_wait_for_the_worker_that_makes_room_for_a_proof() -> None:
    need = GpuNeed(1, 1000)
    live = claim("live", draining("busy", on=WHOLE), waits_s=60.0, wants=1, need=need)
    proof = claim("new", waits_s=60.0, tier=WorkerTier.PROOF, wants=1, need=need)
    assert ended(allocated([live, proof], None, ONE_GPU)) == ["busy"]


@st.composite
def nodes(draw: st.DrawFn) -> tuple[list[RevisionClaim], int]:
    claims = list[RevisionClaim]()
    for function in ("f", "g"):
        for number in range(draw(st.integers(0, 2))):
            processes = [
                draining(f"{function}{number}.{each}", draw(st.integers(0, 3)))
                for each in range(draw(st.integers(0, 3)))
            ]
            claims.append(claim(f"{function}/{number}", *processes, function=function, retiring=True))
        has = [
            ready(f"{function}.{each}", draw(st.integers(0, 2))) for each in range(draw(st.integers(0, 2)))
        ]
        wants = len(has) + draw(st.integers(0, 3))
        waits_s = draw(st.sampled_from([None, 10.0, 60.0])) if wants > len(has) else None
        claims.append(claim(f"{function}/live", *has, function=function, wants=wants, waits_s=waits_s))
    return claims, draw(st.integers(1, 6))


@given(nodes())
def test_whatever_runs_only_old_workers_with_calls_end_and_only_for_who_has_waited(node) -> None:
    claims, most = node
    found = allocated(claims, most)
    keys = {process.key: (one, process) for one in claims for process in one.processes}
    for key in ended(found):
        one, process = keys[key]
        assert one.retiring
        assert process.calls
        waiting = [each for each in claims if each.function == one.function and not each.retiring]
        assert any(NOW_S - each.waiting_since_s >= DRAIN_S for each in waiting)
    # Once the ended workers have no calls, no other worker ends in their place.
    done = set(ended(found))
    after = [
        one._replace(
            processes=tuple(each._replace(calls=0) if each.key in done else each for each in one.processes)
        )
        for one in claims
    ]
    assert not ended(allocated(after, most))
