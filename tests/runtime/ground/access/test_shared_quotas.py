"""Quotas of keys that are used at several gateways. The heartbeats and the clock are simulated."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.runtime.ground.access import keyring as module
from pilotflame.runtime.ground.access.keyring import LATE_S, Keyring
from pilotflame.runtime.ground.access.keys import NewKey, Scope
from pilotflame.runtime.ground.access.shared_quotas import (
    EXCEEDED_S,
    KEYS,
    UNUSED_S,
    KeyUse,
    SharedMeter,
    SharedQuotas,
)
from pilotflame.runtime.ground.storing.file_documents import FileDocuments


class OneKey(Keyring):
    """A keyring with one key that is not stored."""

    def __init__(self, meter: SharedMeter) -> None:
        self._only = meter

    def meters(self) -> dict[str, Any]:
        return {"k": self._only}


class Group:
    """Gateways that share one key. Each has a heartbeat once a second, at its own phase."""

    def __init__(self, gateways: int, phases: list[float] | None = None, **limits: Any) -> None:
        names = ("rate_per_s", "burst", "concurrency", "model_tokens_per_min")
        rate, burst, concurrency, tokens = map(limits.get, names)
        self.now_s = 100.0
        self.meters = [SharedMeter(rate, burst, concurrency, self.now_s, tokens) for _ in range(gateways)]
        self.quotas = [SharedQuotas(OneKey(meter)) for meter in self.meters]
        self._reports: dict[str, Any] = {str(number): {} for number in range(gateways)}
        phases = phases or [number / gateways for number in range(gateways)]
        self._beats = [self.now_s + phase for phase in phases]
        self.run(4.0)

    def run(self, seconds: float) -> None:
        """Let time pass, with heartbeats."""
        until_s = self.now_s + seconds
        while min(self._beats) <= until_s:
            number = self._beats.index(min(self._beats))
            self.now_s = self._beats[number]
            self._beats[number] += 1.0
            told = {KEYS: self.quotas[number].report(self.now_s)}
            self._reports[str(number)] = orjson.loads(orjson.dumps(told, default=tuple))
            self.quotas[number].take(str(number), self._reports, self.now_s)
        self.now_s = until_s

    def enters(self, gateway: int) -> bool:
        return not self.meters[gateway].enter(self.now_s)


@given(
    st.sampled_from([0.5, 1.0, 3.0, 20.0]),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 3.0), st.booleans()), max_size=40),
    st.lists(st.floats(0.0, 0.99), min_size=3, max_size=3),
)
def test_a_caller_within_the_rate_is_never_refused(
    rate: float, burst: int, calls: list[tuple[int, float, bool]], phases: list[float]
) -> None:
    """The requests may reach any gateway, at any time."""
    group, level = Group(3, phases, rate_per_s=rate, burst=burst), float(burst)
    for gateway, pause_s, whole in calls:
        wait_s = max(0.0, (1.0 - level) / rate) + (pause_s if whole else 0.0) + 1e-6
        group.run(wait_s)
        level = min(burst, level + wait_s * rate) - 1.0
        assert group.enters(gateway)
        group.meters[gateway].leave()


@pytest.mark.parametrize("rate", [1.0, 10.0])
def test_gateways_keep_the_rate_together(rate: float) -> None:
    group, taken, seconds = Group(3, rate_per_s=rate, burst=5), 0, 60.0
    for gateway in cycle(range(3)):
        if group.now_s >= 104.0 + seconds:
            break
        group.run(0.01)
        if group.enters(gateway):
            group.meters[gateway].leave()
            taken += 1
    assert seconds * rate - 3 <= taken <= seconds * rate + 3 * (5 + 2 * LATE_S * rate)


def test_tokens_are_subtracted_elsewhere_and_given_back() -> None:
    group = Group(2, model_tokens_per_min=600)
    _, reservation = group.meters[0].reserve(group.now_s, 1, 500)
    group.run(2.0)
    levels = [bucket.level for meter in group.meters if (bucket := meter._model_tokens) is not None]
    assert [100 <= level <= 150 for level in levels] == [True, True]
    assert reservation is not None
    reservation.settle(50)
    group.run(2.0)
    levels = [bucket.level for meter in group.meters if (bucket := meter._model_tokens) is not None]
    assert [550 <= level <= 600 for level in levels] == [True, True]


def test_what_was_taken_before_a_gateway_came_is_not_subtracted() -> None:
    group = Group(2, rate_per_s=0.1, burst=5)
    assert [group.enters(0) for _ in range(5)] == [True] * 5
    group.run(2.0)
    assert not group.enters(1)
    late = SharedMeter(0.1, 5, None, group.now_s)
    SharedQuotas(OneKey(late)).take("late", group._reports, group.now_s)
    assert late.enter(group.now_s) == 0.0


def test_a_key_that_is_used_again_is_counted_from_there() -> None:
    group = Group(2, rate_per_s=0.5, burst=9)
    for _ in range(3):
        assert [group.enters(0) for _ in range(8)] == [True] * 8
        group.meters[0].leave(8)
        group.run(1.9)
        bucket = group.meters[1]._requests
        assert bucket is not None
        assert 1 <= bucket.level < 4
        group.run(20 + UNUSED_S)
        assert group._reports["0"][KEYS] == {}


@pytest.mark.parametrize("length_s", [0.05, 0.7, 5.0])
def test_callers_within_the_concurrency_are_never_refused(length_s: float) -> None:
    """Each of two callers sends its next request to another gateway as soon as its last request has ended."""
    group = Group(3, concurrency=2)
    running = [0, 1]
    assert all(group.enters(gateway) for gateway in running)
    for caller in list(range(2)) * 20:
        group.run(length_s / 2)
        group.meters[running[caller]].leave()
        running[caller] = (running[caller] + 1) % 3
        assert group.enters(running[caller])


def test_requests_elsewhere_count_once_the_concurrency_is_exceeded() -> None:
    group = Group(2, concurrency=2)
    assert [group.enters(gateway) for gateway in (0, 0, 1, 1)] == [True] * 4
    group.run(5.0)
    assert [meter.elsewhere for meter in group.meters] == [1, 1]
    for meter in group.meters:
        meter.leave()
    group.run(0.1)
    # Each gateway still has one running request, which is its share.
    assert [group.enters(gateway) for gateway in (0, 1)] == [False, False]
    for meter in group.meters:
        meter.leave()
    assert group.enters(0)
    group.meters[0].leave()
    group.run(EXCEEDED_S + 5.0)
    assert [(meter.running, meter.elsewhere) for meter in group.meters] == [(0, 0), (0, 0)]


def test_a_gateway_without_a_share_admits_one_request_while_no_reports_come() -> None:
    meter = SharedMeter(None, None, 1, 0.0)
    meter.limit_running(0.0, "a", {"a": KeyUse(), "b": KeyUse(running=2)})
    assert meter.enter(0.0) > 0
    meter.cut_off()
    meter.cut_off()
    assert meter.enter(0.0) == 0.0
    assert meter.enter(0.0) > 0


def test_idle_keys_are_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: 100.0, time=lambda: 100.0)
    monkeypatch.setattr(module, "time", clock)
    keyring = Keyring(FileDocuments(tmp_path), SharedMeter)
    used, _ = keyring.create(NewKey(name="used", scopes=(Scope.INVOKE,), rate_per_s=1.0), 100.0)
    keyring.create(NewKey(name="idle", scopes=(Scope.INVOKE,), rate_per_s=1.0), 100.0)
    keyring.create(NewKey(name="free", scopes=(Scope.INVOKE,)), 100.0)
    quotas = SharedQuotas(keyring)
    assert quotas.report(101.0) == {}
    assert keyring.meters()[used.id].enter(101.5) == 0.0
    (told,) = quotas.report(102.0).items()
    assert (told[0], told[1].requests) == (used.id, 1.0)
