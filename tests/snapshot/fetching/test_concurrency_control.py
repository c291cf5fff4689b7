"""Concurrency control with simulated sources. A source has two rates: of one connection, and of all connections together."""

from __future__ import annotations

import pytest
from pilotflame.snapshot.fetching.concurrency_control import (
    BUSY_RATE,
    FAR,
    FIRST_CONNECTIONS,
    MAX_CONNECTIONS,
    MAX_PART_BYTES,
    MIN_PART_BYTES,
    STALL_S,
    UNKNOWN_STALL_S,
    ConcurrencyControl,
)


def simulate(
    control: ConcurrencyControl,
    *,
    each: float,
    shared: float,
    latency_s: float = 0.001,
    seconds: float = 2.0,
    busy: float = 0.4,
    opening_s: float = 0.0,
) -> list[int]:
    """Run `control` on a source that sends `each` bytes/s per connection, but at most `shared` bytes/s in total. Return the number
    of connections after each update.

    New connections receive nothing for `opening_s`.
    """
    now_s, received, seen, opened = latency_s, 1.0, [], [(-opening_s, control.connections)]
    control.add_latency(latency_s)
    while now_s < seconds:
        step_s = control.next_update_s(now_s)
        opened.append((now_s, control.connections))
        bringing = [count for at_s, count in opened if at_s + opening_s <= now_s]
        received += step_s * min(shared, each * min(control.connections, bringing[-1]))
        now_s += step_s
        control.update(now_s, int(received), now_s * 2 * (1 - busy), processors=2)
        seen.append(control.connections)
    return seen


def test_connections_grow_while_it_pays() -> None:
    assert simulate(ConcurrencyControl(), each=60e6, shared=1e9, seconds=1.0)[-1] in (16, 32)


def test_connections_that_take_a_while_to_open_are_judged_once_they_have() -> None:
    seen = simulate(ConcurrencyControl(), each=60e6, shared=2e9, seconds=1.0, opening_s=0.05)
    assert seen[-1] == MAX_CONNECTIONS


def test_connections_stay_few_where_few_carry_everything() -> None:
    control = ConcurrencyControl()
    seen = simulate(control, each=1e9, shared=1e9)
    assert seen.count(FIRST_CONNECTIONS) > len(seen) // 2
    assert control.settled_connections == FIRST_CONNECTIONS


def test_connections_are_never_more_than_allowed() -> None:
    assert max(simulate(ConcurrencyControl(), each=1e6, shared=1e12)) == MAX_CONNECTIONS


def test_the_longer_nothing_comes_the_more_is_asked_for() -> None:
    control, seen = ConcurrencyControl(), []
    for after_ms in range(0, 80, 5):
        control.update(1.0 + after_ms / 1000, 0, 0.0, processors=2)
        seen.append(control.connections)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (FIRST_CONNECTIONS, FAR[-1][1])


def test_a_machine_that_the_fetch_keeps_busy_asks_for_no_more() -> None:
    fast = 1.1 * BUSY_RATE
    assert set(simulate(ConcurrencyControl(), each=fast, shared=1e12, busy=0.95)) == {FIRST_CONNECTIONS}


def test_a_machine_that_others_keep_busy_asks_for_as_many_as_pay() -> None:
    assert max(simulate(ConcurrencyControl(), each=1e6, shared=1e12, busy=1.0)) == MAX_CONNECTIONS
    few = simulate(ConcurrencyControl(), each=1e6, shared=2e6, busy=1.0)
    assert few.count(FIRST_CONNECTIONS) > len(few) // 2


def test_what_is_fixed_stays() -> None:
    control = ConcurrencyControl(connections=3, part_bytes=5)
    assert set(simulate(control, each=1e6, shared=1e12, latency_s=0.1)) == {3}
    assert control.part_bytes(1 << 40) == 5


@pytest.mark.parametrize("latency_s", [0.0005, 0.01, 0.1])
def test_parts_make_the_latency_small(latency_s: float) -> None:
    control = ConcurrencyControl()
    simulate(control, each=60e6, shared=1e9, latency_s=latency_s)
    part = control.part_bytes(1 << 40)
    assert MIN_PART_BYTES <= part <= MAX_PART_BYTES
    transfer_s = part * control.connections / control.rate
    assert latency_s / transfer_s < 0.12 or part == MAX_PART_BYTES


def test_the_last_parts_are_no_larger_than_a_fair_share() -> None:
    control = ConcurrencyControl()
    simulate(control, each=60e6, shared=1e9, latency_s=0.1)
    assert control.part_bytes(100 << 20) <= max(MIN_PART_BYTES, (100 << 20) // control.connections)


def test_patience_grows_with_latency_and_with_failures() -> None:
    control = ConcurrencyControl()
    assert control.stall_s(started=False, attempts=0) == UNKNOWN_STALL_S
    control.add_latency(0.0001)
    assert control.stall_s(started=False, attempts=0) == STALL_S
    control = ConcurrencyControl()
    control.add_latency(0.2)
    assert control.stall_s(started=False, attempts=0) == pytest.approx(1.0)
    assert control.stall_s(started=False, attempts=2) == pytest.approx(4.0)
