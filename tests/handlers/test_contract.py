"""The contract: what a handler declares with @batch, and what its context has."""

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import HandlerFailed, HandlerSignatureError, SnapshotError
from pilotflame.handlers.contract import BATCH_MARK, MAX_BATCH, BatchSpec, Cancellation, Context, batch
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.handle import Snapshot
from pilotflame.snapshot.named import Snapshots


@given(st.integers(1, MAX_BATCH))
def test_batch_marks_the_function_and_returns_it(size: int) -> None:
    def handler(events: list[int]) -> list[int]:
        return events

    assert batch(max_size=size)(handler) is handler
    assert getattr(handler, BATCH_MARK) == BatchSpec(size)


@pytest.mark.parametrize("size", [0, -1, MAX_BATCH + 1, 2.0, "8", None])
def test_batch_refuses_other_sizes_by_name(size: object) -> None:
    with pytest.raises(HandlerSignatureError, match="max_size must be a whole number") as caught:
        batch(max_size=size)  # type: ignore[arg-type]
    assert repr(size) in caught.value.message
    assert caught.value.remedy


def cost(event: str) -> float:
    return len(event)


async def async_cost(event: str) -> float:
    return len(event)


def test_batch_keeps_its_arguments() -> None:
    def handler(events: list[str]) -> list[str]:
        return events

    batch(max_size=5, cost=cost, max_cost=7, example="x")(handler)
    spec = getattr(handler, BATCH_MARK)
    assert spec == BatchSpec(5, cost, 7.0, ("x",))
    assert spec.weigh("four") == 4.0
    assert BatchSpec(5).weigh(object()) == 1.0
    batch(example=[1, [2]])(handler)
    assert getattr(handler, BATCH_MARK).examples == (1, [2])


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"max_size": True}, "max_size must be a whole number"),
        ({"cost": 5}, "cost must be a plain function"),
        ({"cost": async_cost}, "cost must be a plain function"),
        ({"max_cost": 5}, "needs a cost function"),
        *(({"cost": cost, "max_cost": bad}, "a positive, finite number") for bad in (0, -1, float("nan"), float("inf"), "5", True)),
        ({"example": object()}, "the example is not JSON"),
        ({"example": float("nan")}, "the example is not JSON"),
        ({"example": {1, 2}}, "the example is not JSON"),
        ({"example": []}, "no event in this list"),
    ],
)  # fmt: skip
def test_batch_names_the_argument_that_it_refuses(arguments: dict[str, object], expected: str) -> None:
    with pytest.raises(HandlerSignatureError, match=expected) as caught:
        batch(**arguments)  # type: ignore[arg-type]
    assert next(reversed(arguments)) in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    "returned", [0, -1.0, float("nan"), float("inf"), None, "5", True, torch.ones(2), 10**400]
)
def test_an_invalid_cost_is_refused(returned: object) -> None:
    with pytest.raises(HandlerFailed, match="is no cost") as caught:
        BatchSpec(5, lambda _event: returned).weigh(1)  # type: ignore[arg-type, return-value]
    assert caught.value.remedy


@pytest.mark.parametrize("returned", [1, 0.5, torch.tensor(3), np.float32(2)])
def test_a_cost_may_be_a_number_of_any_library(returned: Any) -> None:
    assert BatchSpec(5, lambda _event: returned).weigh(1) == float(returned)


def test_sums_of_costs_are_finite_for_any_event() -> None:
    spec = BatchSpec(5, lambda event: event["tokens"])
    costs = [spec.weigh({"tokens": 1e308})] * MAX_BATCH
    assert math.isfinite(sum(costs))


def test_without_an_invocation_there_is_no_id_and_no_deadline() -> None:
    context = Context("tone", "r1")
    assert (context.id, context.attempt, context.deadline, context.remaining_ms()) == ("", 1, None, None)
    assert not context.cancelled


def test_the_deadline_is_a_unix_time_and_the_rest_counts_down_to_it() -> None:
    context = Context("tone", "r1", deadline_s=time.monotonic() + 100)
    remaining_ms = context.remaining_ms()
    assert remaining_ms is not None
    assert 0 < remaining_ms <= 100_000
    assert context.deadline is not None
    assert context.deadline == pytest.approx(time.time() + remaining_ms / 1000, abs=1)


def test_past_the_deadline_nothing_remains_and_the_context_is_cancelled() -> None:
    context = Context("tone", "r1", deadline_s=time.monotonic() - 5)
    assert context.remaining_ms() == 0
    assert context.cancelled


class Host:
    """Records its calls."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []

    def progress(self, channel: int, value: object) -> None:
        self.asked.append(("progress", channel, value))

    def metrics(self, channel: int, values: object) -> None:
        self.asked.append(("metrics", channel, values))

    def retire(self) -> None:
        self.asked.append(("retire",))

    def resize(self, concurrency: int) -> None:
        self.asked.append(("resize", concurrency))


def test_requests_go_to_the_host_for_each_event_of_a_batch() -> None:
    host = Host()
    items = [Context("tone", "r1", host=host, channel=channel, extra={"n": channel}) for channel in (1, 2)]
    for context in (items[1], Context("tone", "r1", items=items), Context("tone", "r1")):
        context.progress({"done": 1})
        context.retire()
        context.resize(3)
    words = [("progress", 2, {"done": 1}), ("retire",), ("resize", 3)]
    both = [("progress", 1, {"done": 1}), *words[:1], ("retire",), ("retire",), ("resize", 3), ("resize", 3)]
    assert host.asked == [*words, *both]
    assert [dict(item.extra) for item in items] == [{"n": 1}, {"n": 2}]
    assert dict(Context("tone", "r1").extra) == {}


def test_a_cancellation_is_seen_at_once() -> None:
    cancellation = Cancellation()
    context = Context("tone", "r1", cancellation=cancellation)
    assert not context.cancelled
    cancellation.flag = True
    assert context.cancelled


@given(st.lists(st.booleans(), min_size=1, max_size=5))
def test_a_batch_is_cancelled_once_all_its_callers_went_away(gone: list[bool]) -> None:
    items = []
    for flag in gone:
        cancellation = Cancellation()
        cancellation.flag = flag
        items.append(Context("tone", "r1", cancellation=cancellation))
    assert Context("tone", "r1", items=items).cancelled is all(gone)


def test_state_is_passed_as_it_is() -> None:
    state = object()
    assert Context("tone", "r1", state=state).state is state


def test_a_context_takes_no_stray_attributes() -> None:
    with pytest.raises(AttributeError):
        Context("tone", "r1").modle = 1  # type: ignore[attr-defined]


def test_a_missing_snapshot_names_the_function_and_the_setting() -> None:
    with pytest.raises(SnapshotError, match="'tone' has no snapshot") as caught:
        _ = Context("tone", "r1").snapshot
    assert "pilotflame.toml" in caught.value.remedy
    with pytest.raises(SnapshotError, match="'tone' has no snapshot") as caught:
        _ = Context("tone", "r1").snapshots
    assert "[snapshots]" in caught.value.remedy


def test_a_snapshot_is_asked_for_as_the_settings_name_it() -> None:
    manifest = Manifest.build(chunk_bytes=4096, shards=(), tensors=())
    one = Snapshot(Path("/weights"), manifest)
    context = Context("tone", "r1", snapshots=Snapshots([one]))
    assert context.snapshot is one
    with pytest.raises(SnapshotError, match="one snapshot, without a name"):
        _ = context.snapshots
    base, style = (Snapshot(Path("/weights"), manifest, name=name) for name in ("base", "style"))
    named = Context("tone", "r1", snapshots=Snapshots([base, style]))
    for found in (named, Context.of_batch([named])):
        assert list(found.snapshots) == ["base", "style"]
        assert found.snapshots["style"] is style
        assert "other" not in found.snapshots
        with pytest.raises(SnapshotError, match=r"no snapshot 'other' \(there: base, style\)"):
            _ = found.snapshots["other"]
        with pytest.raises(SnapshotError, match=r"named snapshots \(base, style\)") as caught:
            _ = found.snapshot
        assert 'context.snapshots["base"]' in caught.value.remedy


@pytest.fixture
def records() -> Iterator[list[logging.LogRecord]]:
    found: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    logger, handler = logging.getLogger("pilotflame.handler"), Kept()
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize(("given_id", "logged"), [("abc", "abc"), ("", "-")])
def test_log_lines_carry_the_invocation(records: list[logging.LogRecord], given_id: str, logged: str) -> None:
    Context("tone", "r1", invocation_id=given_id).log.warning("loud: %d", 3)
    assert [(record.getMessage(), record.invocation) for record in records] == [("loud: 3", logged)]  # type: ignore[attr-defined]
