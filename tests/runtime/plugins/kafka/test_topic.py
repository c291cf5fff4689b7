"""Messages of a topic run as jobs. The cluster is librdkafka's mock; gateway, workers, clients and sockets are real."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import pytest_asyncio
from kafka_cluster import Cluster, cluster, dead_end, sasl_broker
from live import Gate, Gateway, failure, free_port, gateway_here, short_folder, until
from pilotflame.errors import BusFailed, OutputRefused
from pilotflame.runtime.jobs.events.message_queue import Identity, Message
from pilotflame.runtime.plugins.kafka import sink as kafka_sink
from pilotflame.runtime.plugins.kafka import topic as kafka_topic
from pilotflame.runtime.plugins.kafka.settings import KafkaSource
from pilotflame.runtime.plugins.kafka.sink import Writer
from pilotflame.runtime.plugins.kafka.topic import KafkaTopic, open_topic
from pilotflame.snapshot.sources.access import Access

pytestmark = pytest.mark.asyncio(loop_scope="module")
Open = Callable[..., KafkaTopic]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the session timeout, so that the group soon gives the partitions of a lost member to another member."""
    monkeypatch.setattr(kafka_topic, "SESSION_S", 6)


@pytest.fixture(scope="module")
def kafka() -> Iterator[Cluster]:
    with cluster() as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def opened(kafka: Cluster) -> AsyncIterator[Open]:
    """`opened("topic", **settings)` returns a topic, which is closed after the test."""
    found: list[KafkaTopic] = []

    def open_one(topic: str, **settings: Any) -> KafkaTopic:
        source = KafkaSource(type="kafka", brokers=tuple(kafka.brokers), topic=topic, group=topic, **settings)
        found.append(open_topic(source, Identity())[0])
        return found[-1]

    yield open_one
    for one in found:
        await one.close()


async def received(topic: KafkaTopic, count: int, limit: int = 100) -> list[Message]:
    found: list[Message] = []
    async with asyncio.timeout(30):
        while len(found) < count:
            found += await topic.receive(limit, wait=True)
    assert len(found) == count
    return found


def bodies(found: list[Message]) -> list[str]:
    return [one.body.decode() for one in found]


async def test_only_what_is_finished_is_committed(kafka: Cluster, opened: Open) -> None:
    kafka.write("plain", [str(number) for number in range(6)], partition=2)
    topic = opened("plain")
    found = await received(topic, 6)
    assert bodies(found) == ["0", "1", "2", "3", "4", "5"]
    for finished, committed in ((1, 0), (0, 2), (3, 2), (2, 4)):
        await topic.delete(found[finished])
        assert kafka.committed("plain", "plain") == {2: committed}
    await topic.close()
    # The next member of the group receives the rest.
    assert bodies(await received(opened("plain"), 2)) == ["4", "5"]


async def test_a_message_has_the_same_id_whatever_the_brokers(kafka: Cluster, opened: Open) -> None:
    kafka.write("named", ["a"], partition=0)
    (first,) = await received(opened("named"), 1)
    cluster_id = kafka.producer.list_topics(timeout=30).cluster_id
    assert first.id.startswith(f"{cluster_id}/0/0/")
    sources = [
        KafkaSource(type="kafka", brokers=brokers, topic="named", group="g")
        for brokers in (("a:1", "b:1"), ("b:1", "a:1"), ("c:1",))
    ]
    assert len({source.scope for source in sources}) == 1


async def test_messages_of_a_key_come_one_after_the_other(kafka: Cluster, opened: Open) -> None:
    kafka.write("ordered", ["a0", "b0", "a1", "b1"], ["a", "b"])
    topic = opened("ordered")
    found = {one.body.decode(): one for one in await received(topic, 2)}
    assert sorted(found) == ["a0", "b0"]
    await topic.release([found["a0"]], 1)
    await topic.delete(found["b0"])
    kafka.write("ordered", ["a2", "b2"], ["a", "b"])
    later: list[Message] = []
    while len(later) < 5:
        (one,) = await received(topic, 1, 1)
        later.append(one)
        await topic.delete(one)
    assert [body for body in bodies(later) if body[0] == "a"] == ["a0", "a1", "a2"]
    assert [body for body in bodies(later) if body[0] == "b"] == ["b1", "b2"]
    assert {one.body: one.received for one in later if one.received > 1} == {b"a0": 2}


async def test_a_message_that_fails_too_often_is_a_dead_letter(kafka: Cluster, opened: Open) -> None:
    kafka.write("poison", ["bad", "good"], ["k"])
    topic = opened("poison", dead_letters="dead", max_deliveries=2)
    for _ in range(2):
        (bad,) = await received(topic, 1)
        assert bad.body == b"bad"
        await topic.release([bad], 1)
    (good,) = await received(topic, 1)
    await topic.delete(good)
    (dead,) = kafka.read("dead", 1)
    headers = dict(dead.headers())
    assert (dead.value(), dead.key()) == (b"bad", b"k")
    assert (headers["source-topic"], headers["deliveries"]) == (b"poison", b"2")
    assert list(kafka.committed("poison", "poison").values()) == [2]


@pytest.mark.parametrize("code", ["", "_UNKNOWN_TOPIC"])
async def test_a_dead_letter_that_cannot_be_written_now_is_written_later_and_does_not_run_again(
    kafka: Cluster, opened: Open, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    name, late = f"stuck{code}", f"late{code}"
    kafka.write(name, ["bad", "next"], ["k"])
    topic = opened(name, dead_letters=late, max_deliveries=1)
    (bad,) = await received(topic, 1)
    write, tries = Writer._write, []

    def fail_twice(writer: Writer, *args: Any) -> None:
        tries.append(1)
        if len(tries) <= 2:
            raise BusFailed("The topic late: the message was not stored in time.", details={"code": code})
        write(writer, *args)

    monkeypatch.setattr(Writer, "_write", fail_twice)
    with pytest.raises(BusFailed, match="not stored in time"):
        await topic.release([bad], 1)
    found: list[Message] = []
    async with asyncio.timeout(60):
        while not found:
            with contextlib.suppress(BusFailed):
                found += await topic.receive(1, wait=True)
    assert bodies(found) == ["next"]
    assert (len(tries), kafka.read(late, 1)[0].value()) == (3, b"bad")


async def test_a_dead_letter_that_can_never_be_written_ends_by_name(
    kafka: Cluster, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_sink, "MAX_MESSAGE_BYTES", 2000)
    kafka.write("fat", ["x" * 3000, "next"], ["k"])
    topic = opened("fat", dead_letters="thin", max_deliveries=1)
    (bad,) = await received(topic, 1)
    with pytest.raises(OutputRefused, match=r"MSG_SIZE_TOO_LARGE.*3000 bytes.*fat is partition \d, offset 0"):
        await topic.release([bad], 1)
    (after,) = await received(topic, 1)
    await topic.delete(after)
    assert list(kafka.committed("fat", "fat").values()) == [2]


async def test_members_of_a_group_share_the_partitions(kafka: Cluster, opened: Open) -> None:
    kafka.write("shared", [str(number) for number in range(20)], [f"k{number}" for number in range(20)])
    first = opened("shared")
    held = await received(first, 20)
    second = opened("shared")
    # The second member gets some partitions, and receives their unfinished messages again.
    again: list[Message] = []
    async with asyncio.timeout(60):
        while not again:
            await first.receive(1, wait=False)
            again += await second.receive(100, wait=False)
    assert {one.id for one in again} <= {one.id for one in held}
    moved = {int(one.group.partition(":")[0]) for one in again}
    for one in held:
        # This commits nothing for the partitions that the second member now has.
        await first.delete(one)
    assert not moved & kafka.committed("shared", "shared").keys()


async def test_what_cannot_be_used_is_told(kafka: Cluster, opened: Open) -> None:
    source = KafkaSource(type="kafka", brokers=("127.0.0.1:1",), topic="t", group="g")
    topic, sink = open_topic(source, Identity())
    assert sink is None
    with pytest.raises(BusFailed, match="Check the brokers"):
        await received(topic, 1)
    await topic.close()
    refused, _ = open_topic(source, Identity(access=Access(own_only=True)))
    with pytest.raises(BusFailed, match="not trusted"):
        await refused.receive(1, wait=False)


ANSWERS = """
import gate

def handler(event):
    if event.get("wait"):
        gate.wait(str(event["number"]))
    if event.get("fail"):
        raise ValueError("no")
    return {"number": event["number"], "text": event.get("text", "")}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=1.0) as found:
            yield found


WAITS = """
import gate

def handler(event: object) -> None:
    if event == "long":
        gate.wait("long")
    else:
        gate.say(str(event))
"""


async def test_a_job_that_takes_too_long_blocks_its_key_only_while_it_runs(
    kafka: Cluster, deploy: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KafkaSource, "longest_s", 0.2)
    monkeypatch.setattr(KafkaSource, "backoff_s", 1)
    kafka.write("long", ['"long"', '"next"'], ["k", "k"])
    source = {
        "type": "kafka",
        "brokers": kafka.brokers,
        "topic": "long",
        "group": "f",
    }
    function = await deploy(WAITS, {"source": [source], "scale.max": 1}, gate=gate)
    arrival = await gate.next("long")
    await function.logged("its job did not end")
    arrival.go()
    await gate.next("next")


async def test_a_functions_answers_go_to_another_topic(
    kafka: Cluster, gateway: Gateway, deploy: Any, gate: Gate
) -> None:
    events = [{"number": number} for number in range(8)]
    events[3]["fail"] = True
    kafka.write("orders", [json.dumps(one) for one in events], ["a", "b"])
    source = {
        "type": "kafka", "brokers": kafka.brokers, "topic": "orders", "group": "f", "result": "answers", "dead_letters": "failed",
        "max_deliveries": 1,
    }  # fmt: skip
    function = await deploy(ANSWERS, {"source": [source], "scale.max": 2}, gate=gate)
    answers = await asyncio.to_thread(kafka.read, "answers", 7)
    by_key: dict[bytes, list[int]] = {}
    for one in answers:
        by_key.setdefault(one.key(), []).append(json.loads(one.value())["number"])
    assert by_key == {b"a": [0, 2, 4, 6], b"b": [1, 5, 7]}
    (dead,) = await asyncio.to_thread(kafka.read, "failed", 1)
    assert json.loads(dead.value())["number"] == 3

    async def all_committed() -> bool:
        return sum((await asyncio.to_thread(kafka.committed, "orders", "f")).values()) == 8

    await until(all_committed, "the commit of all messages")
    (shown,) = (await function.status())["sources"]
    assert (shown["state"], shown["completed"]) == ("connected", 7)


async def test_an_answer_that_its_topic_can_never_take_ends_its_message_and_stays_with_the_job(
    kafka: Cluster, gateway: Gateway, deploy: Any, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_sink, "MAX_MESSAGE_BYTES", 2000)
    events = [{"number": 1, "text": "x" * 3000}, {"number": 2}]
    kafka.write("long", [json.dumps(one) for one in events], ["k"])
    source = {
        "type": "kafka", "brokers": kafka.brokers, "topic": "long", "group": "f", "result": "short",
    }  # fmt: skip
    function = await deploy(ANSWERS, {"source": [source]}, gate=gate)
    (answer,) = await asyncio.to_thread(kafka.read, "short", 1)
    assert json.loads(answer.value())["number"] == 2
    line = await function.logged("MSG_SIZE_TOO_LARGE")
    jobs = (await function.client.get(f"/v1/functions/{function.name}/jobs")).json()["jobs"]
    assert sorted((job["status"], job["attempts"]) for job in jobs) == [("COMPLETED", 1)] * 2
    assert any(job["id"] in line["text"] for job in jobs)


async def test_a_message_that_comes_again_after_a_change_of_brokers_is_the_same_job(
    kafka: Cluster, deploy: Any, gate: Gate
) -> None:
    kafka.write("moved", [json.dumps({"number": 1})])
    sources = [
        {"type": "kafka", "brokers": brokers, "topic": "moved", "group": group, "result": "moved-done"}
        for group, brokers in (("g", kafka.brokers), ("h", [*kafka.brokers, "127.0.0.1:1"]))
    ]
    function = await deploy(ANSWERS, {"source": sources}, gate=gate)
    await asyncio.to_thread(kafka.read, "moved-done", 2)
    jobs = (await function.client.get(f"/v1/functions/{function.name}/jobs")).json()["jobs"]
    assert [(job["status"], job["attempts"]) for job in jobs] == [("COMPLETED", 1)]


RECORDS = """
import json
from gate import say

def handler(event, context):
    say(json.dumps(event))
    [records] = event["records"].values()
    failed = [one for one in records if one.get("value") == "ZmFpbHM="]
    return {"batchItemFailures": [{"itemIdentifier": {"offset": one["offset"]}} for one in failed]}
"""


@pytest.mark.parametrize(
    "body",
    [
        b'{"a":1}', b'{"a": 1, "b": 12345678901234567890123}', "plain ä".encode(), b"\xff\x00", b'"quoted"', b"",
        None,
    ],
)  # fmt: skip
async def test_a_lambda_handler_gets_records_as_from_aws(
    kafka: Cluster, deploy: Any, gate: Gate, body: bytes | None
) -> None:
    topic = f"records-{str(body).encode().hex()[:40]}"
    headers = [("trace", b"1"), ("raw", b"\xff\x00"), ("trace", b"2")]
    kafka.producer.produce(topic, key=b"\xfe", value=body, headers=headers, partition=1)
    assert kafka.producer.flush(30) == 0
    source = {"type": "kafka", "brokers": kafka.brokers, "topic": topic, "group": topic}
    settings = {"source": [source], "handler": "lambda:handler.py:handler"}
    await deploy(RECORDS, settings, gate=gate, check=False)
    event = json.loads((await gate.next()).word)
    [record] = event.pop("records")[f"{topic}-1"]
    assert event == {"eventSource": "SelfManagedKafka", "bootstrapServers": ",".join(kafka.brokers)}
    assert abs(record.pop("timestamp") / 1000 - time.time()) < 60
    value = {} if body is None else {"value": base64.b64encode(body).decode()}
    assert record == {
        "topic": topic, "partition": 1, "offset": 0, "timestampType": "CREATE_TIME", "key": "/g==",
        "headers": [{"trace": [49]}, {"raw": [-1, 0]}, {"trace": [50]}], **value,
    }  # fmt: skip


async def test_what_a_lambda_handler_reports_as_failed_is_a_dead_letter(
    kafka: Cluster, deploy: Any, gate: Gate
) -> None:
    kafka.write("reported", [b"fails", b"works"])
    source = {
        "type": "kafka", "brokers": kafka.brokers, "topic": "reported", "group": "reported", "dead_letters": "unreported",
        "max_deliveries": 1,
    }  # fmt: skip
    settings = {"source": [source], "handler": "lambda:handler.py:handler"}
    await deploy(RECORDS, settings, gate=gate, check=False)
    (dead,) = await asyncio.to_thread(kafka.read, "unreported", 1)
    assert dead.value() == b"fails"


async def test_a_deploy_fails_if_its_broker_refuses_the_credentials(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_topic, "CHECK_S", 1.0)
    for name, value in {"KAFKA_USERNAME": "ada", "KAFKA_PASSWORD": "hush-hush"}.items():
        await gateway.client.put(f"/v1/functions/locked/secrets/{name}", json={"value": value})
    with sasl_broker() as broker:
        source = {"type": "kafka", "brokers": [broker], "topic": "orders", "group": "f"}
        error = failure(await gateway.send(ANSWERS, {"source": [source]}, name="locked", check=False))
    assert (error["status"], error["type"]) == (422, "source_denied")
    assert "The topic orders" in error["message"]
    assert "KAFKA_USERNAME" in error["remedy"]
    assert "hush" not in json.dumps(error)
    assert (await gateway.client.get("/v1/functions/locked")).status_code == 404


@pytest.mark.parametrize("listen", [dead_end, sasl_broker])
async def test_a_connection_that_is_closed_is_no_refusal(
    deploy: Any, monkeypatch: pytest.MonkeyPatch, listen: Callable[[], AbstractContextManager[str]]
) -> None:
    monkeypatch.setattr(kafka_topic, "CHECK_S", 1.0)
    with listen() as broker:
        source = {"type": "kafka", "brokers": [broker], "topic": "orders", "group": "f"}
        function = await deploy(ANSWERS, {"source": [source]}, check=False)
        await function.logged("KAFKA_USERNAME")


async def test_a_deploy_does_not_wait_for_brokers_that_are_down(
    deploy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka_topic, "CHECK_S", 0.5)
    source = {"type": "kafka", "brokers": [f"127.0.0.1:{free_port()}"], "topic": "orders", "group": "f"}
    await deploy(ANSWERS, {"source": [source]}, check=False)
