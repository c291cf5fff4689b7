"""The outbox: deliveries are in order, bounded, and part of the transaction of their event."""

import base64
import json
import sqlite3
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.errors import UnknownDelivery
from pilotflame.runtime.jobs.sql import outbox
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.stored.job import JobState, Webhook
from pilotflame.runtime.jobs.webhooks.delivery import (
    Delivery,
    DeliveryAttempt,
    DeliveryState,
    RetrySchedule,
)
from receiver import job

FIVE_TRIES = RetrySchedule(tries=5, first_s=10.0, draw=lambda: 1.0)
ACCEPTED = DeliveryAttempt(0.0, 204, "", 1)
FAILED = DeliveryAttempt(0.0, 500, "", 1)


def opened() -> sqlite3.Connection:
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.row_factory = sqlite3.Row
    for script in SCRIPTS:
        connection.executescript(script)
    return connection


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    connection = opened()
    yield connection
    connection.close()


def due(connection: sqlite3.Connection, now_s: float, **how: object) -> list[Delivery]:
    return outbox.due(connection, now_s, **{"most": 200, "most_per_host": 20, **how})[0]  # type: ignore[arg-type]


def sent(host: str, job_id: str = "job-9", owner: str = "") -> Delivery:
    """Return a delivery that is being sent."""
    return Delivery(
        "msg",
        f"job:{job_id}",
        "f",
        "start",
        f"{host}/",
        host,
        DeliveryState.PENDING,
        0,
        0.0,
        0.0,
        0,
        "",
        (),
        owner,
    )


def events(found: list[Delivery]) -> list[str]:
    return [f"{delivery.job_id} {delivery.event}" for delivery in found]


def record(
    connection: sqlite3.Connection, delivery_id: str, attempt: DeliveryAttempt, now_s: float
) -> DeliveryState | None:
    return outbox.record(connection, delivery_id, attempt, FIVE_TRIES, now_s)


def test_only_subscribed_events_are_added(connection: sqlite3.Connection) -> None:
    asked = job(webhook=Webhook("http://a/", ("completed",)))
    outbox.add(connection, asked, "start", 1.0)
    outbox.add(connection, job(webhook=None), "completed", 1.0)
    outbox.add(connection, asked, "completed", 1.0)
    assert events(outbox.newest(connection, "f")) == ["job-1 completed"]


def test_a_rollback_removes_it(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN")
    outbox.add(connection, job(), "start", 1.0)
    connection.execute("ROLLBACK")
    assert outbox.newest(connection, "f") == []


def test_the_events_of_a_job_are_sent_one_by_one_in_order(connection: sqlite3.Connection) -> None:
    for event in ("start", "logs", "completed"):
        outbox.add(connection, job(), event, 1.0)
    order = []
    while found := due(connection, 1.0):
        (delivery,) = found
        assert due(connection, 1.0, sending=[delivery]) == []
        order.append(delivery.event)
        record(connection, delivery.id, ACCEPTED, 1.0)
    assert order == ["start", "logs", "completed"]


def test_a_failed_event_holds_up_later_ones_of_its_job_for_three_tries(
    connection: sqlite3.Connection,
) -> None:
    outbox.add(connection, job(), "start", 0.0)
    outbox.add(connection, job(), "logs", 0.0)
    outbox.add(connection, job(id="job-2"), "start", 0.0)
    (start, other) = due(connection, 0.0)
    assert events([start, other]) == ["job-1 start", "job-2 start"]
    record(connection, start.id, FAILED, 0.0)
    assert events(due(connection, 9.9)) == ["job-2 start"]
    outbox.add(connection, job(), "completed", 5.0)
    assert events(due(connection, 9.9)) == ["job-2 start"]
    record(connection, other.id, ACCEPTED, 9.9)
    assert events(due(connection, 10.0)) == ["job-1 start"]
    record(connection, start.id, FAILED, 10.0)
    assert events(due(connection, 39.9)) == []
    assert events(due(connection, 40.0)) == ["job-1 start"]
    # After three failures, a delivery no longer blocks later ones.
    record(connection, start.id, FAILED, 40.0)
    (logs,) = due(connection, 40.0)
    assert logs.event == "logs"
    record(connection, logs.id, ACCEPTED, 40.0)
    assert events(due(connection, 40.0)) == ["job-1 completed"]


def test_the_time_of_the_next_delivery_is_returned(connection: sqlite3.Connection) -> None:
    def at(now_s: float, *sending: Delivery) -> tuple[list[str], float | None]:
        found, next_s = outbox.due(connection, now_s, most=9, most_per_host=1, sending=sending)
        return events(found), next_s

    assert at(0.0) == ([], None)
    outbox.add(connection, job("http://a/"), "start", 7.0)
    outbox.add(connection, job("http://b/", id="job-2"), "start", 5.0)
    assert at(4.0) == ([], 5.0)
    assert at(5.0) == (["job-2 start"], 7.0)
    assert at(4.0, sent("http://a")) == ([], 5.0)
    assert at(8.0, sent("http://a")) == (["job-2 start"], None)


def test_a_host_with_many_deliveries_leaves_room_for_others(connection: sqlite3.Connection) -> None:
    for number in range(50):
        outbox.add(connection, job("http://A:80/x", id=f"job-{number}"), "start", 0.0)
    outbox.add(connection, job("http://b/", id="job-b"), "start", 1.0)
    found = due(connection, 2.0, most_per_host=6)
    assert events(found) == ["job-0 start", "job-1 start", "job-2 start", "job-b start"]
    assert events(due(connection, 2.0, most_per_host=6, sending=found[:2])) == ["job-2 start", "job-b start"]
    assert events(due(connection, 2.0, most=1, most_per_host=6)) == ["job-0 start"]


def test_owners_share_hosts_and_requests(connection: sqlite3.Connection) -> None:
    for number in range(50):
        outbox.add(connection, job("http://a/", id=f"job-{number}", owner="flood"), "start", 0.0)
        outbox.add(connection, job(f"http://h{number}/", id=f"job-h{number}", owner="flood"), "start", 0.0)
    outbox.add(connection, job("http://a/", id="job-b", owner="b"), "start", 1.0)
    outbox.add(connection, job("http://c/", id="job-c", owner="c"), "start", 1.0)
    found = due(connection, 2.0, most=12, most_per_host=6)
    assert [delivery.owner for delivery in found] == ["flood", "b", "c", "flood", "flood", "flood", "flood"]
    # Deliveries that are being sent count for their owner, so the next delivery is of another owner.
    (first, *_) = due(connection, 2.0, most=40, sending=[sent("http://d", owner="flood")] * 9)
    assert first.owner == "b"


def test_receivers_that_do_not_answer_leave_places_to_other_owners(connection: sqlite3.Connection) -> None:
    for number in range(50):
        outbox.add(connection, job(f"http://h{number}/", id=f"job-{number}", owner="flood"), "start", 0.0)
        outbox.add(connection, job("http://a/", id=f"job-a{number}", owner="flood"), "start", 0.0)
    deaf: list[Delivery] = []
    while more := due(connection, 1.0, most=16, most_per_host=4, sending=deaf):
        deaf += more
    assert len(deaf) == 8
    assert len([one for one in deaf if one.host == "http://a"]) == 2
    outbox.add(connection, job("http://a/", id="job-b", owner="b"), "start", 2.0)
    outbox.add(connection, job("http://c/", id="job-c", owner="b"), "start", 2.0)
    assert events(due(connection, 2.0, most=16, most_per_host=4, sending=deaf)) == [
        "job-b start",
        "job-c start",
    ]


def test_an_owner_with_many_hosts_hides_no_other_owner(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_HOSTS", 3)
    monkeypatch.setattr(outbox, "MAX_OWNERS", 2)
    for number in range(9):
        outbox.add(connection, job(f"http://h{number}/", id=f"job-{number}", owner="flood"), "start", 0.0)
    for owner in ("b", "c", "late"):
        outbox.add(connection, job("http://c/", id=f"job-{owner}", owner=owner), "start", 1.0)
    assert {delivery.owner for delivery in due(connection, 2.0)} >= {"flood", "b"}
    for delivery in due(connection, 2.0, sending=due(connection, 2.0)):
        record(connection, delivery.id, ACCEPTED, 2.0)
    for _ in range(9):
        for delivery in due(connection, 2.0):
            record(connection, delivery.id, ACCEPTED, 2.0)
    assert due(connection, 2.0) == []
    assert outbox.pending(connection) == {}


def test_deliveries_are_found_through_indexes(connection: sqlite3.Connection) -> None:
    for query, values in (
        (outbox._HOSTS, ("", 1.0, 9, 9)),
        (outbox._DUE, ("", "h", 1.0)),
        (outbox._OWNER, ("",)),
        (outbox._OLDEST, (1.0, 9)),
        (outbox._NEXT, (1.0,)),
    ):
        plan = [row["detail"] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}", values)]
        looked = [line for line in plan if " deliveries" in line]
        assert looked
        assert all("deliveries_turns (" in line or "deliveries_next (" in line for line in looked), plan
        sorts = [line for line in plan if "TEMP B-TREE" in line]
        # Sorting hosts is allowed, sorting deliveries is not.
        assert not sorts or query == outbox._HOSTS, plan


def test_only_bodies_to_send_are_read(connection: sqlite3.Connection) -> None:
    for number in range(60):
        outbox.add(connection, job(f"http://h{number % 12}/", id=f"job-{number}"), "start", float(number))
    asked: list[str] = []
    connection.set_trace_callback(asked.append)
    found = due(connection, 100.0, most=6)
    connection.set_trace_callback(None)
    assert events(found) == ["job-0 start", "job-1 start", "job-2 start"]
    assert all(delivery.body for delivery in found)
    assert len([query for query in asked if "body" in query]) == 3


def test_the_hosts_with_the_earliest_deliveries_go_first(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_HOSTS", 2)
    for number in range(5):
        outbox.add(connection, job(f"http://h{number}/", id=f"job-{number}"), "start", 5.0 - number)
    assert events(due(connection, 9.0)) == ["job-4 start", "job-3 start"]
    assert events(due(connection, 9.0, sending=[sent("http://h4", "job-4")])) == [
        "job-3 start",
        "job-2 start",
    ]
    assert events(due(connection, 1.0)) == ["job-4 start"]


def test_a_receiver_that_is_gone_gets_no_retry(connection: sqlite3.Connection) -> None:
    outbox.add(connection, job(), "completed", 0.0)
    (delivery,) = due(connection, 0.0)
    assert record(connection, delivery.id, DeliveryAttempt(0.0, 410, "", 1), 1.0) is DeliveryState.DEAD
    (after,) = outbox.newest(connection, "f")
    assert (after.state, after.attempts, after.last_status) == (DeliveryState.DEAD, 1, 410)
    assert due(connection, 1e9) == []


def test_it_is_given_up_after_its_tries_and_can_be_redelivered(connection: sqlite3.Connection) -> None:
    outbox.add(connection, job(), "completed", 0.0)
    (delivery,) = due(connection, 0.0)
    states = [
        record(connection, delivery.id, DeliveryAttempt(0.0, 0, "reset", 1), 0.0)
        for _ in range(FIVE_TRIES.tries)
    ]
    assert states == ["PENDING"] * 4 + ["DEAD"]
    again = outbox.redeliver(connection, "f", delivery.id, 50.0)
    assert (again.id, again.state, again.attempts, again.body) == (delivery.id, "PENDING", 0, delivery.body)
    assert [attempt.error for attempt in again.log] == ["reset"] * 5
    assert [found.id for found in due(connection, 50.0)] == [delivery.id]


def test_a_delivery_of_another_function_is_unknown(connection: sqlite3.Connection) -> None:
    outbox.add(connection, job(), "completed", 0.0)
    (delivery,) = outbox.newest(connection, "f")
    assert outbox.newest(connection, "g") == []
    for function, delivery_id in (("g", delivery.id), ("f", "msg_x")):
        with pytest.raises(UnknownDelivery):
            outbox.redeliver(connection, function, delivery_id, 0.0)


def test_retry_after_is_honoured(connection: sqlite3.Connection) -> None:
    outbox.add(connection, job(), "completed", 0.0)
    (delivery,) = due(connection, 0.0)
    assert record(connection, delivery.id, DeliveryAttempt(0.0, 429, "", 1, wish_s=500.0), 100.0) == "PENDING"
    (after,) = outbox.newest(connection, "f")
    assert after.next_s == 600.0


def test_the_log_is_bounded(connection: sqlite3.Connection) -> None:
    outbox.add(connection, job(), "completed", 0.0)
    (delivery,) = due(connection, 0.0)
    for number in range(outbox.MAX_LOG + 5):
        record(connection, delivery.id, DeliveryAttempt(float(number), 500, "", 1), 0.0)
    (delivery,) = outbox.newest(connection, "f")
    log = delivery.log
    assert [attempt.at_s for attempt in log] == [float(number) for number in range(5, outbox.MAX_LOG + 5)]


def test_a_new_output_replaces_the_pending_one(connection: sqlite3.Connection) -> None:
    outbox.add(connection, job(progress=b"1"), "output", 0.0)
    (first,) = due(connection, 0.0)
    record(connection, first.id, FAILED, 0.0)
    outbox.add(connection, job(progress=b"2"), "output", 1.0)
    outbox.add(connection, job(progress=b"3"), "output", 2.0)
    assert due(connection, 9.0) == []
    (last,) = due(connection, 10.0)
    assert b'"output":3' in last.body
    assert last.id != first.id
    assert (last.attempts, len(last.log)) == (1, 1)
    # The first delivery was being sent when a newer output replaced it, so its result is not recorded.
    assert record(connection, first.id, ACCEPTED, 10.0) is None
    record(connection, last.id, ACCEPTED, 10.0)
    outbox.add(connection, job(progress=b"4"), "output", 11.0)
    assert len(outbox.newest(connection, "f")) == 2


def test_old_deliveries_are_deleted_as_new_ones_end(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "KEEP_ENDED_S", 95.0)
    for number in range(20):
        outbox.add(connection, job(id=f"job-{number}"), "completed", float(number))
    for delivery in due(connection, 100.0, most_per_host=100):
        record(connection, delivery.id, ACCEPTED, 100.0)
    left = outbox.newest(connection, "f")
    assert [delivery.created_s for delivery in left] == [float(number) for number in range(19, 4, -1)]


def test_lists_are_filtered_and_newest_first(connection: sqlite3.Connection) -> None:
    for number in range(7):
        outbox.add(connection, job(id=f"job-{number // 2}"), "start", float(number // 3))
    every = outbox.newest(connection, "f")
    assert all(delivery.body == b"" for delivery in every)
    assert outbox.newest(connection, "f", limit=2) == every[:2]
    assert len(outbox.newest(connection, "f", subject="job:job-1")) == 2
    record(connection, every[0].id, ACCEPTED, 9.0)
    assert len(outbox.newest(connection, "f", states=[DeliveryState.PENDING])) == 6


STEPS = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["start", "output", "logs", "completed"]))
    | st.tuples(st.just("send"), st.sampled_from([204, 500, 410])),
    max_size=40,
)


@given(STEPS)
@settings(max_examples=60, deadline=None)
def test_events_of_a_job_are_delivered_in_order_unless_one_failed_often(
    steps: list[tuple[object, object]],
) -> None:
    connection = opened()
    now_s = 0.0
    delivered: list[str] = []
    for what, detail in steps:
        now_s += 4.0
        if what == "send":
            for delivery in due(connection, now_s, most=1):
                attempt = DeliveryAttempt(now_s, int(str(detail)), "", 1)
                if record(connection, delivery.id, attempt, now_s) is DeliveryState.DELIVERED:
                    delivered.append(delivery.id)
        else:
            outbox.add(connection, job(f"http://h{what}/", id=f"job-{what}"), str(detail), now_s)
    rows = connection.execute("SELECT rowid, * FROM deliveries ORDER BY rowid").fetchall()
    for number, row in enumerate(rows):
        for later in rows[number + 1 :]:
            if (
                row["subject"] == later["subject"]
                and later["attempts"]
                and not {row["event"], later["event"]} & {"output", "logs"}
            ):
                assert row["state"] != "PENDING" or row["attempts"] >= outbox.HELD_TRIES
    assert len(set(delivered)) == len(delivered)
    for event in ("output", "logs"):
        waiting = [row["subject"] for row in rows if row["event"] == event and row["state"] == "PENDING"]
        assert len(set(waiting)) == len(waiting)
    connection.close()


# -- messages, for receivers of Standard Webhooks and of RunPod


def message(event: str, now_s: float = 104.5, **fields: Any) -> dict[str, Any]:
    found = json.loads(outbox.message(job(**fields), event, now_s))
    assert found["type"] == f"job.{event}"
    assert found["timestamp"] == "1970-01-01T00:01:44.500Z"
    without = {key: value for key, value in found.items() if key not in ("type", "timestamp", "data")}
    assert {**without, "error": None} == {**found["data"], "error": None}
    return found


def test_the_start() -> None:
    found = message("start", started_s=102.0, worker="w-1")
    assert found["data"] == {
        "id": "job-1", "status": "IN_PROGRESS", "function": "f", "delayTime": 2000, "executionTime": 2500, "workerId": "w-1",
    }  # fmt: skip


def test_the_end_of_a_job_that_succeeded() -> None:
    found = message(
        "completed", state=JobState.COMPLETED, started_s=101.0, ended_s=103.5, output=b'{"a": [1]}'
    )
    assert found["output"] == {"a": [1]}
    assert (found["status"], found["delayTime"], found["executionTime"]) == ("COMPLETED", 1000, 2500)


def test_an_output_that_is_not_json() -> None:
    found = message("completed", state=JobState.COMPLETED, output=b"\xff\x00", output_type="image/png")
    assert base64.b64decode(found["output"]) == b"\xff\x00"
    assert found["output_type"] == "image/png"


def test_the_end_of_a_job_that_failed() -> None:
    error = {"type": "handler_failed", "message": "It broke."}
    found = message("completed", state=JobState.FAILED, error=error, logs="Traceback", ended_s=103.0)
    assert found["error"] == "It broke."
    assert found["data"]["error"] == error
    assert found["data"]["logs"] == "Traceback"
    assert "output" not in found
    assert (found["delayTime"], found["executionTime"]) == (3000, 0)


def test_the_progress() -> None:
    found = message("output", progress=b'"half"', pieces=3)
    assert found["output"] == "half"
    assert found["pieces"] == 3


@given(st.sampled_from(JobState), st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e9), st.text())
def test_every_job_has_a_message(
    state: JobState, started: float, ended: float, now: float, worker: str
) -> None:
    worker = worker.encode("utf-8", "ignore").decode()
    found = json.loads(
        outbox.message(job(state=state, started_s=started, ended_s=ended, worker=worker), "logs", now)
    )
    assert found["delayTime"] >= 0
    assert found["executionTime"] >= 0
    assert found["workerId"] == worker
