"""The allocation of workers and GPU memory to revisions: examples, properties of every node, and nodes over virtual time."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from example_count import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.runtime.ground.settings.scale_spec import ReachedLimit
from pilotflame.runtime.node.scaling.allocation import LATELY_S, PATIENCE_S, allocate
from pilotflame.runtime.node.scaling.claims import (
    Allocation,
    Grant,
    Limits,
    NodeProcess,
    ProcessState,
    RevisionClaim,
    WorkerTier,
)
from pilotflame.runtime.node.scaling.placement import Gpu, GpuNeed, MemoryByGpu, candidates, fit, place

STARTING, READY, PARKED, DRAINING, STANDBY, LEAVING = (
    ProcessState.STARTING, ProcessState.READY, ProcessState.PARKED, ProcessState.DRAINING,
    ProcessState.STANDBY, ProcessState.LEAVING,
)  # fmt: skip
PROOF, OWNER, LOAD, AHEAD = WorkerTier.PROOF, WorkerTier.OWNER, WorkerTier.LOAD, WorkerTier.AHEAD
NOW_S = 1000.0
LONG_AGO_S = 100.0
NOBODY = Allocation({})
NODE, OWNERS, GPUS = "max_workers", "owner_limit", "gpus"
CONTEXT = 10
TIERS = {"proof": PROOF, "minimum": OWNER, "load": LOAD, "ahead": AHEAD}


# -- by hand


def busy(key: str, on: MemoryByGpu | None = None, calls: int = 1) -> NodeProcess:
    return NodeProcess(key, READY, calls, LONG_AGO_S, on or {}, on or {}, dict.fromkeys(on or {}, CONTEXT))


def idle(
    key: str, on: MemoryByGpu | None = None, used_s: float = LONG_AGO_S, *, parks: bool = True
) -> NodeProcess:
    left = dict.fromkeys(on, CONTEXT) if on and parks else None
    return NodeProcess(key, READY, 0, used_s, on or {}, on or {}, left)


def parked(key: str, on: MemoryByGpu, held: int = CONTEXT) -> NodeProcess:
    left = dict.fromkeys(on, held)
    return NodeProcess(key, PARKED, 0, LONG_AGO_S, left, on, left)


def starting(key: str, on: MemoryByGpu | None = None) -> NodeProcess:
    return NodeProcess(key, STARTING, 0, NOW_S, on or {}, on or {})


def draining(key: str, on: MemoryByGpu | None = None) -> NodeProcess:
    return NodeProcess(key, DRAINING, 1, NOW_S, on or {}, on or {})


def claim(
    key: str, *processes: NodeProcess, owner: str = "", function: str = "", need: GpuNeed | None = None,
    waits_s: float = 0.0, first_s: float = 100.0, cost: float = 1.0, keep: int = 0, **wants: int,
) -> RevisionClaim:  # fmt: skip
    """Return a claim whose callers have waited for `waits_s` seconds, and which has had its first worker for `first_s`
    seconds. `wants` has the number of wanted workers by tier.
    """
    tiers = {TIERS[name]: count for name, count in wants.items()}
    there = sum(one.state in (STARTING, READY) for one in processes)
    held = there + sum(one.state is PARKED for one in processes)
    want = max(tiers.values(), default=0)
    return RevisionClaim(
        key, function or key, owner, tiers, max(want, min(there, want + keep)), max(want, held), processes, need,
        NOW_S - waits_s if want > there else math.inf, NOW_S - first_s if there else math.inf, lambda _freed: cost,
    )  # fmt: skip


def limits(node: int | None = None, **owners: int) -> Limits:
    return Limits(node, owners)


def shared(found: Sequence[RevisionClaim], most: Limits, gpus: Sequence[Gpu] = ()) -> Mapping[str, Grant]:
    return allocate(found, most, gpus, NOW_S).grants


def many(key: str, count: int) -> list[NodeProcess]:
    return [busy(f"{key}{number}") for number in range(count)]


def test_who_finds_room_starts_and_nobody_gives() -> None:
    found = [claim("a", *many("a", 2), load=2), claim("b", load=1)]
    assert allocate(found, limits(3), (), NOW_S) == Allocation({"b": Grant(start=(None,))})


@pytest.mark.parametrize(
    ("rich", "poor", "gives"), [(4, 0, True), (2, 0, True), (1, 0, False), (4, 2, True), (3, 2, False)]
)
def test_the_richest_gives_until_both_have_as_many(rich: int, poor: int, gives: bool) -> None:
    found = [claim("rich", *many("r", rich), load=9), claim("poor", *many("p", poor), load=poor + 1)]
    grants = shared(found, limits(rich + poor))
    reached = ReachedLimit(NODE, rich + poor)
    assert len(grants["rich"].stop) == gives
    assert grants["poor"] == Grant(limit=reached)


def test_the_worker_with_the_fewest_calls_goes() -> None:
    found = [
        claim("rich", busy("a", calls=1), busy("b", calls=3), busy("c", calls=2), load=3),
        claim("poor", load=1),
    ]
    assert shared(found, limits(3))["rich"].stop == ("a",)


def test_an_idle_worker_goes_before_a_busy_one() -> None:
    found = [claim("a", busy("a"), load=1), claim("b", idle("b"), keep=1), claim("new", load=1)]
    assert shared(found, limits(2)) == {
        "b": Grant(stop=("b",), limit=ReachedLimit(NODE, 2)),
        "new": Grant(limit=ReachedLimit(NODE, 2)),
    }
    # A worker that had a call less than LATELY_S ago stops for a first worker, but not for a second worker.
    found[1] = claim("b", idle("b", used_s=NOW_S - LATELY_S / 2), keep=1)
    assert shared(found, limits(2))["b"].stop == ("b",)
    result = allocate([found[1], claim("a", busy("a"), load=2)], limits(2), (), NOW_S)
    assert result.grants == {"a": Grant(limit=ReachedLimit(NODE, 2))}
    assert result.again_s == NOW_S + LATELY_S / 2


def test_a_worker_that_starts_takes_no_strength_from_the_one_that_answers() -> None:
    found = [claim("a", busy("a"), starting("s"), load=1), claim("new", load=1)]
    assert shared(found, limits(2)) == {"new": Grant(limit=ReachedLimit(NODE, 2))}


def test_no_busy_worker_goes_while_one_that_nobody_needs_starts() -> None:
    """Once that worker is ready, it is idle, so it is stopped."""
    there = [busy("a1"), busy("a2")]
    found = [claim("a", *there, starting("a3"), load=2), claim("b", load=1)]
    assert shared(found, limits(3))["a"] == Grant(limit=ReachedLimit(NODE, 3))
    found = [claim("a", *there, idle("a3", used_s=NOW_S), load=2), claim("b", load=1)]
    assert shared(found, limits(3))["a"].stop == ("a3",)
    found = [claim("a", *there, starting("a3"), load=3), claim("b", load=1)]
    assert shared(found, limits(3))["a"].stop == ("a2",)


def test_of_idle_workers_the_one_that_costs_least_goes() -> None:
    found = [
        *(claim(f"c{cost}", idle(f"c{cost}"), keep=1, cost=cost) for cost in (3.0, 1.0, 2.0)),
        claim("new", load=1),
    ]
    assert [key for key, grant in shared(found, limits(3)).items() if grant.stop] == ["c1.0"]


def test_the_second_idle_worker_goes_before_anothers_first() -> None:
    found = [
        claim("two", idle("a", used_s=1), idle("b", used_s=2), keep=2, cost=9.0),
        claim("one", idle("c"), keep=1),
    ]
    assert shared([*found, claim("new", load=1)], limits(3))["two"].stop == ("a",)


def test_nobody_gives_what_its_settings_keep() -> None:
    poor = claim("poor", load=1)
    least = limits(4)
    assert shared([claim("min", *many("m", 4), owner="", load=4, minimum=4), poor], least) == {
        "poor": Grant(limit=ReachedLimit(NODE, 4))
    }
    found = [claim("min", *many("m", 4), load=4, minimum=3), poor]
    assert len(shared(found, least)["min"].stop) == 1
    # A worker that scale.min lacks starts before a worker for callers.
    found = [claim("min", minimum=1), claim("poor", load=1)]
    assert shared(found, limits(1)) == {
        "min": Grant(start=(None,)), "poor": Grant(limit=ReachedLimit(NODE, 1))
    }  # fmt: skip


def test_parked_workers_go_before_awake_ones_and_wake_before_others_start() -> None:
    found = [claim("a", idle("a"), keep=1, cost=0.0), claim("b", busy("b"), parked("p", {}), load=1)]
    assert shared([*found, claim("new", load=1)], limits(3))["b"].stop == ("p",)
    wakes = claim("b", busy("b"), parked("p", {}), load=2)
    assert shared([found[0], wakes], limits(3)) == {"b": Grant(wake=("p",))}


def test_an_owner_at_their_limit_takes_from_their_own_functions_alone() -> None:
    most = limits(20, a=3)
    found = [
        claim("poor", owner="a", load=2),
        claim("rich", *many("r", 3), owner="a", load=3),
        claim("other", *(idle(f"o{number}") for number in range(9)), owner="b", keep=9),
    ]
    reached = ReachedLimit(OWNERS, 3)
    assert shared(found, most) == {
        "poor": Grant(limit=reached), "rich": Grant(stop=("r2",), limit=reached),
    }  # fmt: skip
    # While the limit permits one more worker for the poor revision, no worker stops.
    found[1] = claim("rich", *many("r", 2), owner="a", load=3)
    assert shared(found, most) == {
        "poor": Grant(start=(None,), limit=reached), "rich": Grant(limit=reached),
    }  # fmt: skip


def test_an_owner_at_their_limit_does_not_block_others() -> None:
    found = [
        claim("a", owner="a", load=1, waits_s=50.0),
        claim("drains", draining("d"), owner="a"),
        claim("b", owner="b", load=1, waits_s=1.0),
    ]
    grants = shared(found, limits(2, a=1))
    assert grants == {"a": Grant(limit=ReachedLimit(OWNERS, 1)), "b": Grant(start=(None,))}


def test_a_weaker_worker_gets_nothing_of_what_a_stronger_one_waits_for() -> None:
    found = [claim("d", draining("d")), claim("strong", load=1), claim("weak", ahead=1)]
    reached = ReachedLimit(NODE, 1)
    assert shared(found, limits(1)) == {"strong": Grant(limit=reached), "weak": Grant(limit=reached)}
    assert shared(found, limits(2)) == {
        "strong": Grant(start=(None,)),
        "weak": Grant(limit=ReachedLimit(NODE, 2)),
    }
    # The GPU has 40 of 100 MiB free. The strong revision needs 60, and waits for one of two workers that drain. The weak
    # revision, which needs 40, must not take the free memory.
    found = [
        claim("d", draining("d", {"0": 30}), draining("e", {"0": 30}), need=GpuNeed(1, 30)),
        claim("strong", load=1, need=GpuNeed(1, 60)),
        claim("weak", ahead=1, need=GpuNeed(1, 40)),
    ]
    reached = ReachedLimit(GPUS, 1)
    assert shared(found, limits(), [Gpu("0", 100)]) == {
        "strong": Grant(limit=reached),
        "weak": Grant(limit=reached),
    }


# -- turns


@pytest.mark.parametrize(
    ("first_s", "waits_s", "gives"), [(50, 5, False), (50, 10, True), (9, 30, False), (10, 10, True)]
)
@pytest.mark.parametrize("kind", [NODE, OWNERS, GPUS])
def test_a_first_worker_rotates_after_ten_seconds(
    first_s: float, waits_s: float, gives: bool, kind: str
) -> None:
    gpus = [Gpu("0", 100)] if kind == GPUS else []
    need, on = (GpuNeed(1, 100), {"0": 100}) if kind == GPUS else (None, None)
    most = {NODE: limits(1), OWNERS: limits(5, a=1), GPUS: limits()}[kind]
    found = [
        claim("has", busy("h", on), owner="a", need=need, load=1, first_s=first_s),
        claim("waits", owner="a", need=need, load=1, waits_s=waits_s),
    ]
    result = allocate(found, most, gpus, NOW_S)
    assert result.grants["waits"] == Grant(limit=ReachedLimit(kind, 1))
    assert (result.grants.get("has", Grant()).stop == ("h",)) == gives
    if not gives:
        # The next allocation is due when the first worker has stayed, or the callers have waited, for ten seconds.
        dues = [NOW_S - since + PATIENCE_S for since in (first_s, waits_s) if since < PATIENCE_S]
        assert result.again_s == min(dues)


@pytest.mark.parametrize("kind", [NODE, GPUS])
def test_a_first_worker_that_callers_wait_for_keeps_its_place_until_it_is_ready(kind: str) -> None:
    gpus = [Gpu("0", 100)] if kind == GPUS else []
    need, on = (GpuNeed(1, 100), {"0": 100}) if kind == GPUS else (None, None)
    starting = idle("h", on, parks=False)._replace(used_s=-math.inf)
    found = [
        claim("has", starting, need=need, load=1, first_s=-math.inf),
        claim("waits", need=need, load=1, waits_s=100),
    ]
    grants = shared(found, limits(1) if kind == NODE else limits(), gpus)
    assert grants == {"waits": Grant(limit=ReachedLimit(kind, 1))}


def test_a_worker_that_still_restores_makes_room_although_its_row_wants_none() -> None:
    starting = idle("h")._replace(used_s=-math.inf)
    paused = claim("has", starting)._replace(awake=0, held=0)
    reached = ReachedLimit(NODE, 1)
    grants = shared([paused, claim("new", load=1)], limits(1))
    assert grants == {"has": Grant(stop=("h",), limit=reached), "new": Grant(limit=reached)}
    assert shared([paused], limits(1)) == {}


def test_who_waits_longest_comes_first() -> None:
    found = [claim(f"w{waits}", load=1, waits_s=waits) for waits in (1, 3, 2)]
    assert [key for key, grant in shared(found, limits(1)).items() if grant.start] == ["w3"]


# -- GPUs

ONE = [Gpu("0", 100)]
TWO = [Gpu("0", 100), Gpu("1", 100)]


def test_an_idle_worker_parks_if_that_is_enough_and_ends_otherwise() -> None:
    has = claim("has", idle("h", {"0": 80}), keep=1, need=GpuNeed(1, 80))
    reached = ReachedLimit(GPUS, 1)
    for size, grant in ((90, Grant(park=("h",), limit=reached)), (91, Grant(stop=("h",), limit=reached))):
        found = [has, claim("new", load=1, need=GpuNeed(1, size))]
        assert shared(found, limits(), ONE) == {"has": grant, "new": Grant(limit=reached)}
    cannot = claim("has", idle("h", {"0": 80}, parks=False), keep=1, need=GpuNeed(1, 80))
    assert shared([cannot, claim("new", load=1, need=GpuNeed(1, 50))], limits(), ONE)["has"].stop == ("h",)
    # A busy worker cannot park, so it ends.
    serves = claim("has", busy("h", {"0": 80}), load=1, need=GpuNeed(1, 80))
    found = [serves, claim("new", minimum=1, need=GpuNeed(1, 50))]
    assert shared(found, limits(), ONE)["has"] == Grant(stop=("h",), limit=reached)
    # A parked worker ends if the memory that it keeps is needed.
    found = [
        claim("has", parked("h", {"0": 80}), need=GpuNeed(1, 80)),
        claim("new", load=1, need=GpuNeed(1, 95)),
    ]
    assert shared(found, limits(), ONE)["has"].stop == ("h",)


def test_a_new_worker_goes_where_it_displaces_least() -> None:
    need, gpus = GpuNeed(1, 100), [*TWO, Gpu("2", 100)]
    new = claim("new", load=1, need=need)
    # The busy worker is the weaker of the two, but the other worker goes, because it is idle.
    wide = claim("busy", busy("x", {"2": 100}), busy("b", {"0": 100}), need=need, load=2)
    lately = claim("idle", idle("i", {"1": 100}, NOW_S - 0.1), need=need, keep=1)
    assert [key for key, one in shared([wide, lately, new], limits(), gpus).items() if one.stop] == ["idle"]
    # Of two idle workers, the worker goes whose callers lose less.
    found = [
        claim(f"c{cost}", idle(f"c{cost}", {gpu: 100}), need=need, keep=1, cost=cost)
        for cost, gpu in ((2.0, "0"), (1.0, "1"))
    ]
    assert [key for key, one in shared([*found, new], limits(), TWO).items() if one.stop] == ["c1.0"]


def test_a_new_worker_that_displaces_no_other_goes_where_it_starts_at_once() -> None:
    new = claim("new", load=1, need=GpuNeed(1, 50))
    found = [claim("d", draining("d", {"0": 100}), need=GpuNeed(1, 100)), new]
    assert shared(found, limits(), TWO) == {"new": Grant(start=({"1": 50},))}
    # If the worker can start on both GPUs at once, it goes where the least memory stays free.
    found = [claim("s", starting("s", {"1": 40}), need=GpuNeed(1, 40), load=1), new]
    assert shared(found, limits(), TWO) == {"new": Grant(start=({"1": 50},))}


def test_a_parked_worker_wakes_where_it_is_rather_than_a_new_one_starts_elsewhere() -> None:
    need = GpuNeed(1, 60)
    sleeper = claim("a", parked("p", {"0": 60}), load=1, need=need)
    assert shared([sleeper], limits(), TWO) == {"a": Grant(wake=("p",))}
    idler = claim("b", idle("i", {"0": 60}), keep=1, need=need)
    assert shared([sleeper, idler], limits(), TWO) == {
        "a": Grant(limit=ReachedLimit(GPUS, 2)),
        "b": Grant(park=("i",), limit=ReachedLimit(GPUS, 2)),
    }
    # A busy worker is not displaced for a parked one if another GPU is free: a new worker starts there. Then the parked
    # worker ends, because the row wants one worker.
    worker = claim("b", busy("i", {"0": 60}), busy("j", {"2": 60}, 2), load=2, need=need)
    assert shared([sleeper, worker], limits(), [*TWO, Gpu("2", 60)])["a"] == Grant(
        start=({"1": 60},), stop=("p",)
    )


def test_one_displaced_on_a_gpu_does_not_take_its_sibling_on_another_along() -> None:
    need = GpuNeed(1, 100)
    wide = claim("wide", busy("x", {"0": 100}, 2), busy("y", {"1": 100}, 1), load=2, need=need)
    # Only the first GPU is large enough for the new worker. The sibling on the other GPU becomes the first worker.
    found = [wide, claim("new", need=GpuNeed(1, 150), minimum=1)]
    gpus = [Gpu("0", 150), Gpu("1", 100)]
    grants = shared(found, limits(), gpus)
    assert grants["wide"].stop == ("x",)
    assert shared([*found, claim("other", load=1, need=need)], limits(), gpus)["wide"].stop == ("x",)


def test_standbys_end_before_all_workers_but_the_own_becomes_the_next_worker() -> None:
    standby = NodeProcess("s", STANDBY, holding={"0": 30}, full={"0": 100})
    mine = claim("a", standby, load=1, need=GpuNeed(1, 100))
    assert shared([mine], limits(1), ONE) == {"a": Grant(start=({"0": 100},))}
    other = claim("b", idle("i", {"0": 20}), keep=1, need=GpuNeed(1, 20))
    assert shared([claim("a", standby), other, claim("c", load=1, need=GpuNeed(1, 80))], limits(2), ONE) == {
        "a": Grant(stop=("s",), limit=ReachedLimit(GPUS, 1)),
        "c": Grant(limit=ReachedLimit(GPUS, 1)),
    }


def test_a_standby_that_ends_holds_memory_but_no_place() -> None:
    leaves = NodeProcess("s", LEAVING, holding={"0": 30}, full={"0": 100})
    found = [claim("a", leaves), claim("b", load=1), claim("c", load=1, need=GpuNeed(1, 80))]
    assert shared(found, limits(2), ONE) == {
        "b": Grant(start=(None,)), "c": Grant(limit=ReachedLimit(GPUS, 1))
    }  # fmt: skip


def test_room_that_drains_is_waited_for_although_an_idle_worker_costs_nothing() -> None:
    need = GpuNeed(1, 100)
    found = [
        claim("i", idle("i", {"0": 100}), need=need, keep=1, cost=0.0),
        claim("d", draining("d", {"1": 100}), need=need),
        claim("new", load=1, need=need),
    ]
    assert shared(found, limits(), TWO) == {"new": Grant(limit=ReachedLimit(GPUS, 2))}


def test_what_fits_nowhere_displaces_nobody() -> None:
    need = GpuNeed(2, 60)
    found = [
        claim("s", starting("s", {"0": 50}), load=1, need=GpuNeed(1, 50)),
        claim("i", idle("i", {"1": 90}), keep=1, need=GpuNeed(1, 90)),
    ]
    assert shared([*found, claim("new", load=1, need=need)], limits(), TWO) == {
        "new": Grant(limit=ReachedLimit(GPUS, 2))
    }


# -- deploys


def deploys(
    key: str = "new", function: str = "f", need: GpuNeed | None = None, **fields: int
) -> RevisionClaim:
    return claim(key, function=function, need=need, proof=1, **fields)


def test_a_deploy_may_have_one_worker_too_many() -> None:
    old = claim("old", *many("o", 2), function="f", load=2)
    # Only the first worker of the new revision may exceed the limit. Its other workers wait, and no worker stops for them.
    assert shared([old, deploys(ahead=3)], limits(2)) == {
        "new": Grant(start=(None,), limit=ReachedLimit(NODE, 2))
    }
    proves = claim("new", starting("n"), function="f", proof=1, ahead=3)
    assert shared([old, proves], limits(2)) == {"new": Grant(limit=ReachedLimit(NODE, 2))}
    # A second deploy at the same time has to wait for a worker that ends.
    grants = shared([old, proves, deploys("other", "g")], limits(2))
    assert grants["other"] == Grant(limit=ReachedLimit(NODE, 2))
    assert len(grants["old"].stop) == 1
    # A failed first worker that drains does not permit another worker beyond the limit.
    failed = claim("new", draining("n"), function="f")
    assert shared([old, failed, claim("w", load=1)], limits(3))["w"] == Grant(limit=ReachedLimit(NODE, 3))


def test_on_gpus_the_old_revision_makes_room_for_the_new_one() -> None:
    need = GpuNeed(1, 100)
    kept = claim("kept", idle("k", {"1": 100}), need=need, keep=1, cost=0.0)
    for old in (
        claim("old", busy("o", {"0": 100}), function="f", need=need, load=1, first_s=1.0),
        claim("old", busy("o", {"0": 100}), function="f", need=need, load=1, minimum=1),
    ):
        found = [old, kept, deploys(need=need)]
        assert shared(found, limits(), TWO)["old"].stop == ("o",)
        assert not shared(found, limits(), TWO).get("new", Grant()).start
    # While one worker of the old revision drains for the deploy, the other worker stays.
    old = claim("old", draining("d", {"1": 100}), busy("o", {"0": 100}), function="f", need=need, load=2)
    assert not does(allocate([old, deploys(need=need)], limits(), TWO, NOW_S))
    # The deploy takes only as much of the memory as it needs.
    old = claim("old", idle("p", {"0": 40}), busy("o", {"0": 60}), function="f", need=need, load=1, keep=1)
    assert shared([old, deploys(need=GpuNeed(1, 40))], limits(), ONE)["old"].stop == ("p",)


def test_a_deploy_takes_nothing_from_another_functions_minimum() -> None:
    need = GpuNeed(1, 100)
    other = claim("other", idle("o", {"0": 100}), need=need, minimum=1)
    old = claim("old", busy("b", {"1": 60}), function="f", need=GpuNeed(1, 60), load=1)
    found = [other, old, deploys(need=GpuNeed(2, 60))]
    assert shared(found, limits(), TWO) == {"new": Grant(limit=ReachedLimit(GPUS, 2))}


# -- for every node


@dataclass(frozen=True)
class Situation:
    """A possible state of a node: its processes fit into the memory of its GPUs."""

    claims: tuple[RevisionClaim, ...]
    limits: Limits
    gpus: tuple[Gpu, ...]

    def result(self) -> Allocation:
        return allocate(self.claims, self.limits, self.gpus, NOW_S)


SIZES = st.sampled_from((20, 30, 40, 60, 100))
AGES = st.sampled_from((0.0, 0.4, 3.0, 9.5, 10.0, 40.0))
COSTS = st.sampled_from((0.0, 0.5, 1.0, 7.0))
COUNTS = st.sampled_from((0, 0, 0, 1, 1, 2, 3))


@st.composite
def situations(draw: st.DrawFn, *, on_gpus: bool = True) -> Situation:
    gpus = (
        tuple(Gpu(str(number), draw(SIZES)) for number in range(draw(st.integers(1, 3)))) if on_gpus else ()
    )
    held, found = list[MemoryByGpu](), list[RevisionClaim]()
    for number in range(draw(st.integers(1, 6))):
        need = (
            GpuNeed(draw(st.integers(1, min(2, len(gpus)))), draw(SIZES))
            if gpus and draw(st.booleans())
            else None
        )
        processes = tuple(draw(present(f"{number}.", gpus, need, held)))
        wants = {tier: draw(COUNTS) for tier in (OWNER, LOAD, AHEAD)}
        # Every second revision may be the new one of its function, whose first worker a deploy checks.
        if number % 2 and draw(st.integers(0, 2)) == 0:
            wants[PROOF] = 1
        found.append(
            asking(
                RevisionClaim(
                    f"r{number}", f"f{number // 2}", draw(st.sampled_from("ab")),
                    {tier: count for tier, count in wants.items() if count}, 0, 0, processes, need,
                    NOW_S - draw(AGES), NOW_S - draw(AGES), draw(st.sampled_from(CONSTANT_COSTS)),
                ),
                keep=draw(st.integers(0, 6)),
            )
        )  # fmt: skip
    owners = draw(st.dictionaries(st.sampled_from("ab"), st.integers(1, 8)))
    return Situation(tuple(found), Limits(draw(st.none() | st.integers(1, 12)), owners), gpus)


CONSTANT_COSTS: list[Callable[[float], float]] = [
    lambda _freed, cost=cost: cost for cost in (0.0, 0.5, 1.0, 7.0)
]  # type: ignore[misc]


@st.composite
def present(
    draw: st.DrawFn, name: str, gpus: Sequence[Gpu], need: GpuNeed | None, held: list[MemoryByGpu]
) -> list[NodeProcess]:
    states = draw(st.lists(st.sampled_from((STARTING, READY, READY, READY, PARKED, DRAINING)), max_size=4))
    found = list[NodeProcess]()
    for number, state in enumerate(states):
        full = {} if need is None else place(gpus, held, need)
        if full is None:
            break
        keeps = dict.fromkeys(full, CONTEXT) if draw(st.booleans()) else None
        holding = keeps if state is PARKED and keeps is not None else full
        calls = draw(st.integers(0, 2)) if state in (READY, DRAINING) else 0
        held.append(holding)
        found.append(NodeProcess(f"{name}{number}", state, calls, NOW_S - draw(AGES), holding, full, keeps))
    # A standby rehearses only if it is certain which GPUs its worker will have.
    fitting = [] if need is None else candidates(gpus, need)
    room = {gpu.id: CONTEXT for gpu in fitting}
    if need is not None and len(room) == need.gpus and fit(gpus, [*held, room]) and draw(st.booleans()):
        held.append(room)
        found.append(NodeProcess(f"{name}s", STANDBY, 0, 0.0, room, room))
    return found


def asking(one: RevisionClaim, keep: int = 6, now_s: float = NOW_S) -> RevisionClaim:
    """Return a claim with the numbers of its row, as table.py computes them."""
    awake, held = len(of(one, STARTING, READY)), len(of(one, STARTING, READY, PARKED))
    want = max(one.wants.values(), default=0)
    waits = min(one.waiting_since_s, now_s) if want > awake else math.inf
    first = min(one.first_since_s, now_s) if of(one, READY) else math.inf
    stay = max(want, min(held, max(want, keep)))
    asks = one._replace(
        awake=max(want, min(awake, max(want, keep))), held=stay, waiting_since_s=waits, first_since_s=first
    )
    return ended(asks)


def ended(one: RevisionClaim) -> RevisionClaim:
    """Return a claim whose row has ended the workers beyond `held`: parked workers first, then the longest idle."""
    order = (STARTING, READY, PARKED)
    there = sorted(of(one, *order), key=lambda each: (order.index(each.state), -each.calls, -each.used_s))
    gone = {each.key for each in there[one.held :] if each.state is not STARTING}
    rest = (each._replace(state=DRAINING) if each.key in gone else each for each in one.processes)
    return one._replace(processes=tuple(rest))


def of(one: RevisionClaim, *states: ProcessState) -> list[NodeProcess]:
    return [process for process in one.processes if process.state in states]


def after(one: RevisionClaim, grant: Grant) -> RevisionClaim:
    """Return a claim after its grant was applied, without any time in between."""
    found = list[NodeProcess]()
    for process in one.processes:
        if process.key in grant.stop:
            state = LEAVING if process.state is STANDBY else DRAINING
            found.append(process._replace(state=state))
        elif process.key in grant.park:
            found.append(process._replace(state=PARKED))
        elif process.key in grant.wake:
            found.append(process._replace(state=STARTING, holding=process.full, used_s=NOW_S))
        elif process.state is not STANDBY or not grant.start:
            found.append(process)
    for number, holding in enumerate(grant.start):
        found.append(NodeProcess(f"{one.key}+{number}", STARTING, 0, NOW_S, holding or {}, holding or {}))
    displaced = any(
        process.key in (*grant.stop, *grant.park) and process.state is READY for process in one.processes
    )
    waits = NOW_S if displaced or one.waiting_since_s == math.inf else one.waiting_since_s
    first = NOW_S if one.first_since_s == math.inf else one.first_since_s
    return asking(one._replace(processes=tuple(found), waiting_since_s=waits, first_since_s=first), one.held)


def applied(node: Situation, result: Allocation) -> Situation:
    return replace(node, claims=tuple(after(one, result.grants.get(one.key, Grant())) for one in node.claims))


def counted(found: Iterable[RevisionClaim], owner: str | None = None) -> int:
    """Return the number of workers of `owner`, or of all owners."""
    return sum(len(of(one, STARTING, READY, PARKED, DRAINING)) for one in found if owner in (None, one.owner))


def proofs(found: Iterable[RevisionClaim], owner: str | None = None) -> int:
    return sum(
        one.wants.get(PROOF, 0) and bool(of(one, STARTING, READY, PARKED))
        for one in found
        if owner in (None, one.owner)
    )


def booked(found: Iterable[RevisionClaim]) -> Counter[str]:
    total = Counter[str]()
    for one in found:
        for process in one.processes:
            total.update(process.holding)
    return total


def check_limits(before: Situation, then: Situation) -> None:
    """Check that no start exceeds a limit, except for one worker of a deploy, and that no GPU's memory is exceeded."""
    scopes = [(owner, most) for owner, most in before.limits.owners.items()]
    for owner, most in [*scopes, *([(None, before.limits.node)] if before.limits.node is not None else [])]:
        had, has = counted(before.claims, owner), counted(then.claims, owner)
        if has > had:
            assert has <= most + min(1, proofs(then.claims, owner))
    total = booked(then.claims)
    assert all(total[gpu.id] <= gpu.memory_mb for gpu in before.gpus)


def does(result: Allocation) -> dict[str, Grant]:
    """Return the grants that do something."""
    grants = {key: grant._replace(limit=None) for key, grant in result.grants.items()}
    return {key: grant for key, grant in grants.items() if grant != Grant()}


@given(situations())
def test_no_limit_and_no_memory_is_ever_exceeded(node: Situation) -> None:
    check_limits(node, applied(node, node.result()))


@given(situations(), st.randoms(use_true_random=False))
def test_the_order_of_claims_is_irrelevant(node: Situation, shuffled: st.DataObject) -> None:
    mixed = list(node.claims)
    shuffled.shuffle(mixed)
    assert replace(node, claims=tuple(mixed)).result() == node.result()


@given(situations())
def test_a_second_look_does_nothing(node: Situation) -> None:
    then = applied(node, node.result())
    assert does(then.result()) == {}


@given(situations())
def test_the_next_look_is_later_than_now(node: Situation) -> None:
    assert node.result().again_s > NOW_S


@given(situations())
def test_a_grant_names_processes_in_the_right_state_once(node: Situation) -> None:
    grants = node.result().grants
    for one in node.claims:
        grant = grants.get(one.key, Grant())
        states = {process.key: process.state for process in one.processes}
        named = [*grant.wake, *grant.park, *grant.stop]
        assert len(set(named)) == len(named)
        assert all(states[key] is PARKED for key in grant.wake)
        assert all(states[key] is READY for key in grant.park)
        assert all(states[key] in (READY, PARKED, STANDBY) for key in grant.stop)
        want = max(one.wants.values(), default=0)
        awake = len(of(one, STARTING, READY)) - sum(
            states[key] is READY for key in (*grant.stop, *grant.park)
        )
        assert not grant.start or awake + len(grant.start) + len(grant.wake) <= want
        # A revision with fewer workers than its row asks for has a limit.
        if (
            awake + len(grant.start) + len(grant.wake) < one.awake
            and len(of(one, READY, STARTING, PARKED)) <= one.held
        ):
            assert grant.limit is not None


@given(situations())
def test_nothing_is_displaced_while_everything_fits(node: Situation) -> None:
    most = counted(node.claims) + sum(max(one.wants.values(), default=0) for one in node.claims)
    gpus = tuple(gpu._replace(memory_mb=gpu.memory_mb + 100 * most) for gpu in node.gpus)
    roomy = replace(node, limits=Limits(most, {"a": most}), gpus=gpus).result()
    for one in node.claims:
        grant = roomy.grants.get(one.key, Grant())
        assert (grant.park, grant.stop, grant.limit) == ((), (), None)
        missing = max(one.wants.values(), default=0) - len(of(one, STARTING, READY))
        assert len(grant.start) + len(grant.wake) == max(0, missing)


def tier(one: RevisionClaim, number: int, process: NodeProcess | None = None) -> WorkerTier:
    """Return the tier of a revision's worker. Its number counts from 1."""
    wanting = [each for each, count in one.wants.items() if count >= number]
    found = min(wanting, default=WorkerTier.KEEP)
    if (
        process is not None
        and process.state is READY
        and (process.calls or process.used_s + LATELY_S > NOW_S)
    ):
        found = min(found, LOAD)
    return WorkerTier.FIRST if found is LOAD and number == 1 and one.wants.get(LOAD) else found


def standing(one: RevisionClaim, grant: Grant) -> Iterator[tuple[WorkerTier, NodeProcess | None, bool]]:
    """Yield the tier of each worker, the process of a present one, and whether it is awake after the grant."""
    number = 1
    ready = sorted(of(one, READY), key=lambda each: (-each.calls, -each.used_s))
    for process in (*ready, *of(one, STARTING)):
        stays = process.key not in (*grant.stop, *grant.park)
        yield tier(one, number, process), process, stays
        number += stays
    for _ in (*grant.wake, *grant.start):
        yield tier(one, number), None, True
        number += 1


@given(situations(on_gpus=False))
def test_nobody_is_displaced_by_a_weaker_worker(node: Situation) -> None:
    grants = node.result().grants
    for one in node.claims:
        grant = grants.get(one.key, Grant())
        gone = [each for each, process, stays in standing(one, grant) if not stays]
        if not gone or grant.limit is None:
            continue
        for other in node.claims:
            if grant.limit.name == OWNERS and other.owner != one.owner:
                continue
            starts = bool(of(other, STARTING))
            for each, process, stays in standing(other, grants.get(other.key, Grant())):
                # A starting worker cannot be stopped, however weak it is. Until it is ready, the busy workers beside it may stay.
                waits = process is not None and process.calls > 0 and starts
                if stays and not waits and (process is None or process.state is READY):
                    assert each <= min(gone)


@given(situations())
def test_a_worker_of_the_minimum_goes_for_a_deploy_of_its_function_or_a_limit_alone(node: Situation) -> None:
    grants = node.result().grants
    deployed = {one.function for one in node.claims if PROOF in one.wants}
    for one in node.claims:
        grant = grants.get(one.key, Grant())
        kept = [
            each for each, process, stays in standing(one, grant) if each is OWNER and process and not stays
        ]
        if not kept or (one.function in deployed and PROOF not in one.wants):
            continue
        # The worker had to go: workers of minimums, starting workers and first workers of deploys take up the whole limit.
        assert grant.limit is not None
        assert grant.limit.name in (NODE, OWNERS)
        of_limit = [other for other in node.claims if grant.limit.name == NODE or other.owner == one.owner]
        strong = [
            each
            for other in of_limit
            for each, process, stays in standing(other, grants.get(other.key, Grant()))
            if stays and (each <= OWNER or (process and process.state is STARTING))
        ]
        assert len(strong) >= grant.limit.most


# -- over virtual time

KEEP_S, WAKE_S, PARK_S, END_S = 30.0, 0.2, 0.1, 0.05


@dataclass
class Served:
    """A revision. Each worker runs one call at a time. Idle workers stay for KEEP_S."""

    key: str
    owner: str = "a"
    need: GpuNeed | None = None
    parks: bool = False
    least: int = 0
    buffer: int = 0
    most: int = 3
    start_s: float = 1.0
    call_s: float = 1.0
    callers: int = 0
    """The number of callers that send the next call as soon as they have an answer."""
    processes: dict[Hashable, NodeProcess] = field(default_factory=dict)
    queued: int = 0
    answered: int = 0
    waiting_since_s: float = math.inf
    first_since_s: float = math.inf
    lacks_since_s: float = math.inf
    """The time since which callers have waited while no worker was awake or starting."""
    firsts_s: list[float] = field(default_factory=list)
    """The times at which the revision got a first worker."""

    def of(self, *states: ProcessState) -> list[NodeProcess]:
        return [one for one in self.processes.values() if one.state in states]

    def set(self, key: Hashable, **fields: Any) -> None:
        self.processes[key] = self.processes[key]._replace(**fields)

    def claim(self, now_s: float) -> RevisionClaim:
        calls = self.queued + sum(one.calls for one in self.of(READY))
        load = min(self.most, calls)
        wants = {LOAD: load, OWNER: self.least, AHEAD: min(self.most, load + self.buffer) if calls else 0}
        keep = sum(one.calls > 0 or one.used_s + KEEP_S > now_s for one in self.of(STARTING, READY, PARKED))
        one = RevisionClaim(
            self.key, self.key, self.owner, {each: count for each, count in wants.items() if count}, 0, 0,
            tuple(self.processes.values()), self.need, self.waiting_since_s, self.first_since_s,
        )  # fmt: skip
        one = asking(one, keep, now_s)
        if one.first_since_s < math.inf and self.first_since_s == math.inf:
            self.firsts_s.append(now_s)
        self.waiting_since_s, self.first_since_s = one.waiting_since_s, one.first_since_s
        return one


class World:
    """A node on which starts, calls, parking and ends take time. After the events of each moment, workers are allocated."""

    def __init__(self, revisions: Sequence[Served], most: Limits, gpus: Sequence[Gpu] = ()) -> None:
        self.revisions = {one.key: one for one in revisions}
        self.limits, self.gpus, self.now_s, self.again_s = most, tuple(gpus), NOW_S, math.inf
        self.longest_wait_s = 0.0
        self.stops = 0
        self._events = list[tuple[float, int, Callable[[], None]]]()
        self._count = itertools.count()
        for one in revisions:
            one.queued += one.callers
        self.at(NOW_S, lambda: None)

    def at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._count), event))

    def call(self, key: str) -> None:
        self.revisions[key].queued += 1

    def run(self, until_s: float) -> None:
        while (due_s := min(self._events[0][0] if self._events else math.inf, self.again_s)) <= until_s:
            self.now_s = due_s
            while self._events and self._events[0][0] <= due_s:
                heapq.heappop(self._events)[2]()
            self._turn()

    def _turn(self) -> None:
        for one in self.revisions.values():
            self._dispatch(one)
            for process in one.claim(self.now_s).processes:
                if process.state is DRAINING and one.processes[process.key].state is not DRAINING:
                    self._drain(one, process.key)
        node = self._situation()
        for key, grant in self._allocated(node).grants.items():
            self._apply(self.revisions[key], grant)
        then = self._situation()
        check_limits(node, then)
        second = self._allocated(then)
        assert does(second) == {}
        self.again_s = second.again_s
        for one in self.revisions.values():
            lacks = one.queued > 0 and not one.of(STARTING, READY)
            one.lacks_since_s = min(one.lacks_since_s, self.now_s) if lacks else math.inf
            if lacks:
                self.longest_wait_s = max(self.longest_wait_s, self.now_s - one.lacks_since_s)

    def _situation(self) -> Situation:
        return Situation(
            tuple(one.claim(self.now_s) for one in self.revisions.values()), self.limits, self.gpus
        )

    def _allocated(self, node: Situation) -> Allocation:
        result = allocate(node.claims, self.limits, self.gpus, self.now_s)
        assert result.again_s > self.now_s
        return result

    def _dispatch(self, one: Served) -> None:
        for process in one.of(READY):
            if one.queued and not process.calls:
                one.queued -= 1
                one.set(process.key, calls=1)
                self.at(self.now_s + one.call_s, partial(self._on_end, one, process.key))

    def _on_end(self, one: Served, key: Hashable) -> None:
        one.answered += 1
        one.queued += one.callers > 0
        one.set(key, calls=0, used_s=self.now_s)
        self.at(self.now_s + KEEP_S, lambda: None)
        if one.processes[key].state is DRAINING:
            self.at(self.now_s + END_S, partial(one.processes.pop, key))

    def _apply(self, one: Served, grant: Grant) -> None:
        for holding in grant.start:
            key, full = next(self._count), holding or {}
            left = dict.fromkeys(full, CONTEXT) if one.parks else None
            one.processes[key] = NodeProcess(key, STARTING, 0, self.now_s, full, full, left)
            self.at(self.now_s + one.start_s, partial(self._on_ready, one, key))
        for key in grant.wake:
            one.set(key, state=STARTING, holding=one.processes[key].full, used_s=self.now_s)
            self.at(self.now_s + WAKE_S, partial(self._on_ready, one, key))
        for key in grant.park:
            one.set(key, state=PARKED)
            self.at(self.now_s + PARK_S, partial(self._on_parked, one, key))
        for key in grant.stop:
            self._drain(one, key)
            self.stops += 1
        if grant.stop or grant.park:
            one.waiting_since_s = math.inf

    def _on_ready(self, one: Served, key: Hashable) -> None:
        one.set(key, state=READY, used_s=self.now_s)
        self.at(self.now_s + KEEP_S, lambda: None)

    def _on_parked(self, one: Served, key: Hashable) -> None:
        if key in one.processes and one.processes[key].state is PARKED:
            one.set(key, holding=one.processes[key].parked)

    def _drain(self, one: Served, key: Hashable) -> None:
        one.set(key, state=DRAINING)
        if not one.processes[key].calls:
            self.at(self.now_s + END_S, partial(one.processes.pop, key))


@st.composite
def nodes(draw: st.DrawFn) -> World:
    gpus = [Gpu(str(number), draw(st.sampled_from((60, 100)))) for number in range(draw(st.integers(0, 3)))]
    found = list[Served]()
    for number in range(draw(st.integers(2, 5))):
        need = GpuNeed(1, draw(st.sampled_from((30, 50, 60)))) if gpus and draw(st.booleans()) else None
        found.append(
            Served(
                f"r{number}", draw(st.sampled_from("ab")), need, draw(st.booleans()),
                least=0 if need or number else draw(st.integers(0, 1)), buffer=draw(st.sampled_from((0, 0, 1))),
                most=draw(st.integers(1, 4)), start_s=draw(st.sampled_from((0.3, 3.0))),
                call_s=draw(st.sampled_from((0.01, 0.5, 4.0))),
            )
        )  # fmt: skip
    node = draw(st.integers(2, 6))
    return World(found, Limits(node, draw(st.dictionaries(st.sampled_from("ab"), st.integers(2, 4)))), gpus)


ARRIVALS = st.lists(
    st.tuples(st.sampled_from((0.0, 0.1, 0.7, 2.0, 11.0)), st.integers(0, 4), st.integers(1, 3)),
    min_size=1,
    max_size=25,
)


@given(nodes(), ARRIVALS)
def test_over_time_all_callers_are_answered_and_the_node_comes_to_rest(
    node: World, arrivals: list[tuple[float, int, int]]
) -> None:
    at_s, keys, calls = NOW_S, list(node.revisions), 0
    for gap_s, which, count in arrivals:
        at_s += gap_s
        calls += count
        for _ in range(count):
            node.at(at_s, partial(node.call, keys[which % len(keys)]))
    node.run(at_s + 1000.0)
    assert sum(one.answered for one in node.revisions.values()) == calls
    assert node.again_s == math.inf
    assert all(len(one.processes) == one.least for one in node.revisions.values())
    # Each other revision may have one turn before: PATIENCE_S, the longest start and call, and the ends of two processes.
    slowest_s = max(one.start_s + one.call_s for one in node.revisions.values())
    assert node.longest_wait_s <= (len(keys) - 1) * (PATIENCE_S + slowest_s + 2 * END_S)


@settings(max_examples=examples(12))
@given(
    st.lists(st.tuples(st.sampled_from((0.3, 0.9, 4.0)), st.sampled_from((0.5, 3.0)), st.integers(1, 3)), min_size=2, max_size=6),
    st.integers(1, 4), st.booleans(),
)  # fmt: skip
def test_busy_functions_take_turns_and_each_place_rotates_at_most_once_in_ten_seconds(
    busy_ones: list[tuple[float, float, int]], places: int, on_gpu: bool
) -> None:
    need = GpuNeed(1, 100) if on_gpu else None
    gpus = [Gpu(str(number), 100) for number in range(places)] if on_gpu else []
    found = [
        Served(f"r{number}", need=need, call_s=call_s, start_s=start_s, callers=callers)
        for number, (call_s, start_s, callers) in enumerate(busy_ones)
    ]
    node = World(found, Limits(None if on_gpu else places), gpus)
    node.run(NOW_S + 100.0)
    slowest_s = PATIENCE_S + max(call_s + start_s for call_s, start_s, _ in busy_ones) + 2 * END_S
    assert node.longest_wait_s <= slowest_s * -(-len(found) // places)
    # A function keeps its first worker for at least ten seconds, so there are few first workers.
    firsts = sum(len(one.firsts_s) for one in found)
    assert firsts <= places * (100.0 / PATIENCE_S + 1)
    if len(found) <= places:
        assert firsts == len(found)
    assert all(one.answered for one in found)
