"""Messages of SQS (moto, over HTTP) run by gateways: deleted only after success, and never lost."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import boto3
import pytest
import pytest_asyncio
from aiohttp import web
from live import LIMIT_S, Gate, Gateway, failure, gateway_here, gateway_process, short_folder, until
from pilotflame.errors import BusFailed
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.jobs.events.consumer import Consumer
from pilotflame.runtime.jobs.events.message_queue import Message
from pilotflame.runtime.plugins.sqs.settings import SqsSource
from pilotflame.runtime.plugins.sqs.sinks import QueueSink
from pilotflame.snapshot.sources.access import ANY
from prometheus_client.parser import text_string_to_metric_families

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANDLER = """
from gate import say, wait

def handler(event: object) -> object:
    if event == "boom":
        say("boom")
        raise ValueError("no")
    wait(str(event))
    return {"said": event}
"""
PLAIN = """
def handler(event: object) -> object:
    return {"said": event}
"""
BYTES = """
def handler(event: object) -> bytes:
    return b"\\x00\\xff"
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(moto: str) -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0) as found:
            yield found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a message visible again at once after its job has failed."""
    monkeypatch.setattr(SqsSource, "backoff_s", 0)


def source(queue: Any, **more: Any) -> dict[str, Any]:
    return {
        "source": [{"type": "sqs", "queue": queue.url, **more}],
        "scale.idle_timeout_s": 0.3,
    }


async def metrics(gateway: Gateway, function: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Return the metrics of a function by name and labels."""
    text = (await gateway.client.get("/metrics")).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for sample in samples
        if sample.labels.get("function") == function
    }


async def taken(queue: Any) -> bool:
    return all(message.approximate_receive_count for message in queue.messages)


async def test_a_message_is_run_once_and_deleted_after_that(deploy, gate: Gate, queue) -> None:
    mine = queue()
    function = await deploy(HANDLER, source(mine), gate=gate, check=False)
    # Polling needs no worker.
    await function.settled(ready=0, starting=0)
    await mine.send('"hello"')
    arrival = await gate.next("hello")
    # While the job runs, the message is hidden from others.
    assert mine.bodies == ['"hello"']
    assert await mine.take() == []
    arrival.go()
    await until(mine.empty, "the message is deleted")
    assert [found.word for found in gate.arrived] == ["hello"]
    assert (await function.settled(ready=0, starting=0))["invocations"] == {"queue": {"200": 1}}


async def test_messages_stay_in_the_queue_while_the_plugin_is_off(state, queue) -> None:
    mine = queue()
    await mine.send("1")
    async with gateway_here(state, plugins=("cog",)) as gateway:
        function = await gateway.deploy(PLAIN, source(mine))
        await function.logged("the plugin 'sqs' is not in `plugins`: its messages stay in the queue")
    assert [message["Body"] for message in await mine.take()] == ["1"]


async def test_a_body_that_is_not_json_is_text(deploy, gate: Gate, queue) -> None:
    mine = queue()
    await deploy(HANDLER, source(mine), gate=gate, check=False)
    gate.open()
    await mine.send("not json")
    await gate.next("not json")
    await until(mine.empty, "the message is deleted")


async def test_json_of_python_is_no_text_and_no_rounded_number(deploy, gate: Gate, queue) -> None:
    """A handler gets a large integer exactly. A body that only Python's json.loads accepts makes the job fail with a clear error."""
    dead = queue()
    mine = queue(RedrivePolicy=json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 1}))
    handler = "from gate import wait\n\ndef handler(event: object) -> None:\n    wait(str(event))\n"
    function = await deploy(handler, source(mine), gate=gate, check=False)
    gate.open()
    await mine.send("123456789012345678901")
    await gate.next("123456789012345678901")
    wrong = ['{"x": NaN}', "[-Infinity]", '{"x": "\\ud800"}']
    for body in wrong:
        await mine.send(body)

    async def aside() -> bool:
        return sorted(dead.bodies) == sorted(wrong)

    await until(aside, "the messages are in the dead-letter queue")
    jobs = (await function.client.get(f"/v1/functions/{function.name}/jobs")).json()["jobs"]
    errors = [job["error"]["message"] for job in jobs if job["status"] == "FAILED"]
    assert len(errors) == len(wrong)
    assert all("The body is not JSON" in error for error in errors)
    assert len(gate.arrived) == 1


async def test_messages_in_flight_are_limited(deploy, gate: Gate, queue) -> None:
    mine = queue()
    await deploy(
        HANDLER, {**source(mine, concurrency=3), "concurrency": 8, "scale.max": 1}, gate=gate, check=False
    )
    for number in range(12):
        await mine.send(str(number))
    first = [await gate.next() for _ in range(3)]
    assert sum(message.approximate_receive_count for message in mine.messages) == 3
    gate.open()
    await until(mine.empty, "all messages are deleted")
    assert len(first) == 3
    assert sorted(int(found.word) for found in gate.arrived) == list(range(12))


async def test_a_message_stays_hidden_while_its_job_runs(
    deploy, gate: Gate, queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqsSource, "visibility_s", 1)
    mine = queue()
    await deploy(HANDLER, source(mine), gate=gate, check=False)
    await mine.send('"long"')
    arrival = await gate.next("long")
    [message] = mine.messages
    began = message.visible_at

    async def renewed() -> bool:
        # The message stays hidden for longer than the first visibility timeout.
        return bool(message.visible_at > began + 1000)

    await until(renewed, "the message is renewed")
    assert message.approximate_receive_count == 1
    arrival.go()
    await until(mine.empty, "the message is deleted")
    assert len(gate.arrived) == 1


async def test_a_message_whose_worker_was_killed_is_delivered_again(deploy, gate: Gate, queue) -> None:
    mine = queue()
    function = await deploy(HANDLER, source(mine), gate=gate, check=False)
    await mine.send('"again"')
    arrival = await gate.next("again")
    os.kill(arrival.pid, signal.SIGKILL)
    again = await gate.next("again")
    [message] = mine.messages
    assert message.approximate_receive_count == 2
    again.go()
    await until(mine.empty, "the message is deleted")
    await function.logged("left to the queue")


async def test_a_message_that_fails_too_often_is_dead_lettered(deploy, gate: Gate, queue) -> None:
    dead = queue()
    mine = queue(RedrivePolicy=json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 2}))
    await deploy(HANDLER, source(mine), gate=gate, check=False)
    gate.open()
    await mine.send('"boom"')
    await mine.send('"fine"')

    async def aside() -> bool:
        return dead.bodies == ['"boom"'] and not mine.messages

    await until(aside, "the message is in the dead-letter queue")
    assert sorted(found.word for found in gate.arrived) == ["boom", "boom", "fine"]


ORDERED = {"FifoQueue": "true", "ContentBasedDeduplication": "true"}


async def test_the_messages_of_a_group_run_in_their_order(deploy, gate: Gate, queue) -> None:
    mine = queue(**ORDERED)
    for word in ("a1", "a2", "a3", "b1", "b2", "b3"):
        await mine.send(json.dumps(word), MessageGroupId=word[0])
    await deploy(HANDLER, {**source(mine), "concurrency": 8, "scale.max": 1}, gate=gate, check=False)
    first = {arrival.word: arrival for arrival in [await gate.next(), await gate.next()]}
    assert sorted(first) == ["a1", "b1"]
    # While a1 runs, all messages of group b run, and the other messages of group a wait.
    first["b1"].go()
    for word in ("b2", "b3"):
        arrival = await gate.next()
        assert arrival.word == word
        arrival.go()
    first["a1"].go()
    for word in ("a2", "a3"):
        arrival = await gate.next()
        assert arrival.word == word
        arrival.go()
    await until(mine.empty, "all messages are deleted")


FLAKY = """
import pathlib
from gate import say

def handler(event):
    say(event["word"])
    flag = pathlib.Path(event["flag"])
    if event["word"] == "2" and not flag.exists():
        flag.touch()
        raise ValueError("not yet")
"""


async def test_the_messages_behind_a_failed_one_wait_for_it(
    deploy, gate: Gate, queue, tmp_path, monkeypatch
) -> None:
    # Use short polls, because moto does not notice during a poll that a group has become free.
    monkeypatch.setattr("pilotflame.runtime.plugins.sqs.queue.POLL_S", 1)
    mine = queue(**ORDERED)
    for word in "1234":
        await mine.send(json.dumps({"word": word, "flag": str(tmp_path / "flag")}), MessageGroupId="g")
    await deploy(FLAKY, {**source(mine), "concurrency": 8, "scale.max": 1}, gate=gate, check=False)
    await until(mine.empty, "all messages are deleted")
    assert [arrival.word for arrival in gate.arrived] == ["1", "2", "2", "3", "4"]


async def test_outputs_go_to_a_queue(deploy, gate: Gate, queue) -> None:
    mine, answers = queue(), queue()
    function = await deploy(PLAIN, source(mine, result=f"sqs://{answers.name}"), check=False)
    message_id = await mine.send('{"a": 1}')
    await until(mine.empty, "the message is deleted")
    [answer] = await answers.take()
    assert json.loads(answer["Body"]) == {"said": {"a": 1}}
    facts = {name: value["StringValue"] for name, value in answer["MessageAttributes"].items()}
    assert facts["message-id"] == message_id
    assert facts["function"] == function.name
    assert facts["job-id"].startswith("job-")


async def test_outputs_that_are_bytes_go_as_base64(deploy, queue) -> None:
    mine, answers = queue(), queue()
    await deploy(BYTES, source(mine, result=answers.url), check=False)
    await mine.send("1")
    await until(mine.empty, "the message is deleted")
    [answer] = await answers.take()
    assert answer["Body"] == "AP8="
    assert answer["MessageAttributes"]["encoding"]["StringValue"] == "base64"


async def test_outputs_go_to_s3(deploy, queue, moto: str) -> None:
    mine = queue()
    store = boto3.client("s3", endpoint_url=moto)
    await asyncio.to_thread(store.create_bucket, Bucket="answers")
    await deploy(PLAIN, source(mine, result="s3://answers/below/here/", endpoint_url=moto), check=False)
    message_id = await mine.send("[7]")
    await until(mine.empty, "the message is deleted")
    found = await asyncio.to_thread(store.get_object, Bucket="answers", Key=f"below/here/{message_id}.json")
    assert json.loads(found["Body"].read()) == {"said": [7]}
    assert found["ContentType"] == "application/json"
    assert found["Metadata"]["job-id"].startswith("job-")
    found["Body"].close()
    store.close()


async def test_a_message_whose_output_cannot_be_stored_now_is_not_deleted(
    deploy, queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead, answers = queue(), queue()
    mine = queue(RedrivePolicy=json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": 2}))
    function = await deploy(PLAIN, source(mine, result=answers.url), check=False)

    async def unreachable(*_: object) -> None:
        raise BusFailed("Outputs to the queue: the request to SQS failed (EndpointConnectionError).")

    monkeypatch.setattr(QueueSink, "put", unreachable)
    await mine.send("1")

    async def aside() -> bool:
        return dead.bodies == ["1"]

    await until(aside, "the message is in the dead-letter queue")
    line = await function.logged("EndpointConnectionError")
    assert "left to the queue" in line["text"]
    health = (await function.client.get(f"/v2/{function.name}/health")).json()
    # The message was received twice, but its job has run only once.
    assert health["jobs"]["completed"] == 1


@pytest.mark.parametrize(
    ("result", "code"),
    [("too large", "InvalidParameterValue"), ("gone", "NonExistentQueue"), ("s3://nowhere", "NoSuchBucket")],
)
async def test_an_output_that_can_never_be_sent_ends_its_message_and_stays_with_the_job(
    gateway: Gateway, deploy, queue, sqs, moto: str, result: str, code: str
) -> None:
    mine, answers = queue(), queue(MaximumMessageSize="1024")
    to = result if "://" in result else f"sqs://{answers.name}"
    function = await deploy(PLAIN, source(mine, result=to, endpoint_url=moto), check=False)
    if result == "gone":
        await asyncio.to_thread(sqs.delete_queue, QueueUrl=answers.url)
    said = "x" * 2000
    await mine.send(json.dumps(said))
    await until(mine.empty, "the message is deleted")
    line = await function.logged(code)
    assert "The output has 2011 bytes." in line["text"]
    jobs = (await function.client.get(f"/v1/functions/{function.name}/jobs")).json()["jobs"]
    assert [(job["status"], job["attempts"]) for job in jobs] == [("COMPLETED", 1)]
    assert jobs[0]["id"] in line["text"]
    found = (await function.client.get(f"/v2/{function.name}/status/{jobs[0]['id']}")).json()
    assert found["output"] == {"said": said}
    counted = await metrics(gateway, function.name)
    labels = frozenset({"function": function.name, "source": mine.name, "outcome": "unsent"}.items())
    assert counted["pilotflame_source_messages_total", labels] == 1


async def test_a_deploy_fails_if_its_results_have_no_queue(gateway: Gateway, queue) -> None:
    error = failure(await gateway.send(PLAIN, source(queue(), result="sqs://nowhere"), name="aimless"))
    assert (error["status"], error["type"]) == (422, "source_denied")
    assert "sqs://nowhere" in error["message"]
    assert "NonExistentQueue" in error["message"]
    assert (await gateway.client.get("/v1/functions/aimless")).status_code == 404


async def test_a_message_whose_job_was_cancelled_is_delivered_again(deploy, gate: Gate, queue) -> None:
    mine = queue()
    function = await deploy(HANDLER, source(mine), gate=gate, check=False)
    await mine.send('"cancelled"')
    await gate.next("cancelled")
    [job] = (await function.client.get(f"/v2/{function.name}/requests")).json()["requests"]
    await function.client.post(f"/v2/{function.name}/cancel/{job['id']}")
    (await gate.next("cancelled")).go()
    await until(mine.empty, "the message is deleted")


async def test_messages_of_a_deleted_function_are_released(deploy, gate: Gate, queue) -> None:
    mine = queue()
    settings = {**source(mine, concurrency=2), "scale.max": 1}
    function = await deploy(HANDLER, settings, gate=gate, check=False)
    await mine.send('"one"')
    await mine.send('"two"')
    running = await gate.next()
    await until(lambda: taken(mine), "both messages are taken")
    deleting = asyncio.create_task(function.client.delete(f"/v1/functions/{function.name}"))

    async def back() -> bool:
        return all(message.visible for message in mine.messages)

    await until(back, "both are released")
    assert mine.bodies == ['"one"', '"two"']
    running.go()
    assert (await deleting).status_code < 300
    # A new function with the same name gets the released messages.
    await deploy(HANDLER, settings, gate=gate, name=function.name, check=False)
    gate.open()
    await until(mine.empty, "both messages are deleted")


async def test_a_new_revision_keeps_the_source(deploy, gate: Gate, queue) -> None:
    mine = queue()
    function = await deploy(HANDLER, source(mine), gate=gate, check=False)
    await mine.send('"old"')
    old = await gate.next("old")
    await deploy(HANDLER, source(mine), gate=gate, name=function.name, check=False)
    await mine.send('"new"')
    (await gate.next("new")).go()
    old.go()
    await until(mine.empty, "both messages are deleted")
    assert len(gate.arrived) == 2


async def test_a_missing_queue_is_logged_and_in_the_status_until_it_is_there(deploy, queue, sqs) -> None:
    mine = queue()
    mine.url = mine.url.replace(mine.name, "nowhere")
    function = await deploy(PLAIN, source(mine), check=False)
    line = await function.logged("NonExistentQueue")
    assert "Check the queue's URL" in line["text"]
    assert "hush" not in json.dumps(await function.lines())
    (found,) = (await function.status())["sources"]
    assert (found["queue"], found["state"], found["lag_s"]) == (mine.url, "failing", None)
    assert "NonExistentQueue" in found["last_error"]
    assert found["last_error_at"]
    await asyncio.to_thread(sqs.create_queue, QueueName="nowhere")

    async def cured() -> bool:
        (found,) = (await function.status())["sources"]
        return found["state"] == "connected"

    await until(cured, "the answer of the new queue")
    (found,) = (await function.status())["sources"]
    assert (found["last_error"], found["last_error_at"]) == ("", None)


async def test_a_source_tells_its_state_its_lag_and_what_became_of_its_messages(
    gateway, deploy, gate: Gate, queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SqsSource, "backoff_s", 900)
    mine = queue()
    function = await deploy(HANDLER, source(mine, concurrency=2), gate=gate, check=False)

    async def connected() -> bool:
        (found,) = (await function.status())["sources"]
        return (found["state"], found["lag_s"], found["last_error_at"]) == ("connected", 0.0, None)

    # The first receive is not a long poll of 20 s, so the source is connected at once.
    await until(connected, "the answer of an empty queue")
    await mine.send('"boom"')
    await mine.send('"fine"')
    await gate.next("fine")

    async def counted() -> bool:
        (found,) = (await function.status())["sources"]
        return (found["in_flight"], found["completed"], found["left"]) == (1, 0, 1)

    await until(counted, "one that failed and one that runs")
    found = await metrics(gateway, function.name)
    labels = {("function", function.name), ("source", mine.name)}
    total = {key: value for key, value in found.items() if key[0] == "pilotflame_source_messages_total"}
    assert total == {("pilotflame_source_messages_total", frozenset({*labels, ("outcome", "left")})): 1.0}
    assert found["pilotflame_source_messages_in_flight", frozenset(labels)] == 1.0
    assert found["pilotflame_source_connected", frozenset(labels)] == 1.0
    assert found["pilotflame_source_lag_seconds", frozenset(labels)] < LIMIT_S
    gate.open()

    async def completed() -> bool:
        (found,) = (await function.status())["sources"]
        return (found["in_flight"], found["completed"], found["left"]) == (0, 1, 1)

    await until(completed, "the end of the other message")


async def test_malformed_responses_are_logged_and_end_nothing(deploy, queue) -> None:
    # The check of the deploy gets the first answer.
    answers = [b"{}", b'{"Messages":[{}]}', b'{"Messages":7}', b'{"Messages":[{"MessageId":"a","ReceiptHandle":"b","Body":"1",'
               b'"Attributes":{"ApproximateReceiveCount":"many"}}]}', b"[]", b"nonsense"]  # fmt: skip
    async with nonsense(answers) as url:
        function = await deploy(PLAIN, source(queue(), endpoint_url=url), check=False)
        line = await function.logged("the response of SQS is malformed (KeyError('MessageId'))")
        assert "Check that the endpoint" in line["text"]
        await function.logged("the request to SQS failed (ValueError)")
    # Other sources still work.
    mine = queue()
    await deploy(PLAIN, source(mine), check=False)
    await mine.send("1")
    await until(mine.empty, "the message is deleted")


@asynccontextmanager
async def nonsense(answers: list[bytes], status: int = 200) -> AsyncIterator[str]:
    """Run a server that is not SQS. It sends these responses in order, and then the last one forever."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        body = answers.pop(0) if len(answers) > 1 else answers[0]
        return web.Response(status=status, body=body, content_type="application/x-amz-json-1.0")

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def test_a_message_that_is_delivered_again_before_its_release_is_confirmed_runs_again(
    deploy, gate: Gate
) -> None:
    function = await deploy(HANDLER, {"scale.idle_timeout_s": 0.3}, gate=gate, check=False)
    async with hasty() as (url, deleted):
        queue = {
            "type": "sqs",
            "queue": f"{url}/1/hasty",
            "concurrency": 5,
        }
        await deploy(HANDLER, {"source": [queue]}, gate=gate, name=function.name, check=False)
        first = await gate.next("once")
        os.kill(first.pid, signal.SIGKILL)
        (await gate.next("once")).go()
        async with asyncio.timeout(LIMIT_S):
            await deleted.wait()


@asynccontextmanager
async def hasty() -> AsyncIterator[tuple[str, asyncio.Event]]:
    """Run an SQS with one message. When a release is requested, it delivers the message again before it confirms the release."""
    visible, delivered, deleted = asyncio.Event(), asyncio.Event(), asyncio.Event()
    visible.set()

    async def answer(request: web.Request) -> web.Response:
        action, body = request.headers["X-Amz-Target"].rpartition(".")[2], await request.json()
        found: dict[str, Any] = {}
        if action == "ReceiveMessage":
            await visible.wait()
            visible.clear()
            delivered.set()
            found = {"Messages": [{"MessageId": "m", "ReceiptHandle": "r", "Body": '"once"'}]}
        elif action == "ChangeMessageVisibilityBatch" and body["Entries"][0]["VisibilityTimeout"] == 0:
            delivered.clear()
            visible.set()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    await delivered.wait()
        elif action == "DeleteMessage":
            deleted.set()
        return web.json_response(found, content_type="application/x-amz-json-1.0")

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", deleted
    finally:
        await runner.cleanup()


class Broken:
    """A queue and sink whose methods raise unexpected errors."""

    name, batch = "broken", 10

    def __init__(self) -> None:
        self.messages = [Message("one", "receipt", b"1", 1, {}, 0.0)]
        self.asked = asyncio.Event()

    async def receive(self, limit: int, *, wait: bool) -> list[Message]:
        if self.messages:
            return [self.messages.pop()]
        self.asked.set()
        raise ZeroDivisionError("secret")

    async def fail(self, *_: Any) -> Any:
        raise ZeroDivisionError("secret")

    extend = delete = release = close = put = fail


class Lengthless(Broken):
    """A queue that gives ten messages and does not tell how many it has."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.given = False

    async def receive(self, limit: int, *, wait: bool) -> list[Message]:
        if self.given:
            self.asked.set()
            await asyncio.Event().wait()
        self.given = True
        return [Message(str(number), "receipt", b"1", 1, {}, 0.0) for number in range(10)]

    async def depth(self) -> int:
        raise BusFailed("The queue: SQS refuses the request (AccessDenied).")

    async def nothing(self, *_: Any) -> list[str]:
        return []

    extend = delete = release = close = put = nothing  # type: ignore[assignment]


async def test_a_queue_that_does_not_tell_its_length_is_read_nevertheless() -> None:
    logged, backlogs = list[str](), list[int]()
    queue: Any = Lengthless()
    source = SqsSource(type="sqs", queue="https://sqs.us-east-1.amazonaws.com/1/lengthless")
    settings = FunctionSettings(name="lengthless", concurrency=20)
    async with asyncio.timeout(20), BackgroundTasks() as tasks:
        consumer = Consumer(
            settings, source, cast("Any", None), queue, None, logged.append, backlogs.append, ANY
        )  # fmt: skip
        consumer.start(tasks)
        await queue.asked.wait()
        assert (consumer.status().state, consumer.status().backlog, backlogs) == ("connected", None, [])
        await consumer.close(1.0)
    assert [text for text in logged if "not known" in text] == [
        "the number of waiting messages is not known: The queue: SQS refuses the request (AccessDenied)."
    ]


async def test_a_backlog_starts_workers_before_its_messages_are_received(
    gateway: Gateway, deploy, gate: Gate, queue
) -> None:
    mine = queue()
    for number in range(40):
        await mine.send(str(number))
    settings = source(mine) | {"concurrency": 10, "scale.max": 3}
    function = await deploy(HANDLER, settings, gate=gate, check=False)
    # The first ten messages need two workers. The third worker starts for the waiting messages.
    await function.settled(ready=3, in_flight=30)
    history = gateway.server.functions.get(function.name).workers.function  # type: ignore[union-attr]
    assert "backlog" in {one.cause for one in history.decisions.since(0) if one.action == "start"}
    (found,) = (await function.status())["sources"]
    assert 10 <= found["backlog"] <= 30
    labels = frozenset({("function", function.name), ("source", mine.name)})
    assert (await metrics(gateway, function.name))["pilotflame_source_backlog", labels] == found["backlog"]
    gate.open()
    await until(mine.empty, "all messages are deleted")


async def test_an_unexpected_error_does_not_end_the_gateway() -> None:
    logged: list[str] = []
    broken: Any = Broken()
    settings = FunctionSettings(name="broken")
    source = SqsSource(type="sqs", queue="https://sqs.us-east-1.amazonaws.com/1/broken")
    async with asyncio.timeout(20), BackgroundTasks() as tasks:
        # The consumer gets None instead of jobs, so that submitting also fails.
        consumer = Consumer(
            settings, source, cast("Any", None), broken, broken, logged.append, lambda _backlog: None, ANY
        )  # fmt: skip
        consumer.start(tasks)
        await broken.asked.wait()
        # Other tasks of this group log the lines. Let them run until all lines are logged.
        while consumer._messages.latest or len(logged) < 3:
            await asyncio.sleep(0)
        await consumer.close(1.0)
    assert any(text.startswith("message one: Unexpected error (AttributeError)") for text in logged)
    assert any(text.startswith("messages could not be released") for text in logged)
    assert "Unexpected error (ZeroDivisionError); please report it as a bug of Pilotflame." in logged
    assert not any("secret" in text for text in logged)


async def test_a_gateway_that_stops_finishes_running_jobs(moto: str, state, gate: Gate, queue) -> None:
    mine = queue()
    async with gateway_process(state, drain_s=20.0) as gateway:
        settings = {**source(mine, concurrency=2), "scale.max": 1}
        function = await gateway.deploy(HANDLER, settings, gate=gate)
        await mine.send('"one"')
        await mine.send('"two"')
        running = await gate.next()
        await until(lambda: taken(mine), "both messages are taken")

        async def one_runs() -> bool:
            health = (await function.client.get(f"/v2/{function.name}/health")).json()
            return bool(health["jobs"]["inProgress"] == 1)

        await until(one_runs, "it is stored that one runs")
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGTERM)

        async def back() -> bool:
            return any(message.visible for message in mine.messages)

        await until(back, "the one that waited is released")
        running.go()
        # The exit does not wait for the long poll of 20 s.
        async with asyncio.timeout(10):
            assert await gateway.process.wait() == 0
    assert len(mine.messages) == 1


async def test_a_message_runs_again_after_its_gateway_was_killed(
    moto: str, state, gate: Gate, queue: Callable[..., Any]
) -> None:
    mine = queue()
    async with gateway_process(state) as gateway:
        # With a concurrency of 1, no poll waits at the queue when the gateway is killed. Such a poll could take the message again.
        await gateway.deploy(HANDLER, source(mine, concurrency=1), gate=gate)
        await mine.send('"survives"')
        await gate.next("survives")
        assert gateway.process is not None
        gateway.process.kill()
        await gateway.process.wait()
    [message] = mine.messages
    # End the visibility timeout, so that the next gateway can receive the message.
    message.visible_at = 0
    async with gateway_process(state):
        (await gate.next("survives")).go()
        await until(mine.empty, "the message is deleted")
    assert len(gate.arrived) == 2


async def test_the_messages_of_a_paused_function_stay_in_the_queue(
    gateway: Gateway, deploy, gate: Gate, queue
) -> None:
    mine = queue()
    function = await deploy(HANDLER, source(mine), gate=gate, check=False)
    await mine.send('"before"')
    arrival = await gate.next("before")
    paused = await gateway.client.post(f"/v1/functions/{function.name}/pause")
    assert paused.json()["sources"] == []
    arrival.go()
    await until(mine.empty, "the end of the message that ran")
    await mine.send('"while"')
    await function.settled(zygote=False, standby=False, in_flight=0)
    assert mine.bodies == ['"while"']
    assert [found.word for found in gate.arrived] == ["before"]
    gate.open()
    assert (await gateway.client.post(f"/v1/functions/{function.name}/resume")).status_code == 200
    await until(mine.empty, "the end of the message that waited")


RECORDS = """
import json
from gate import say

def handler(event, context):
    [record] = event["Records"]
    say(json.dumps(record))
    failed = "fails" in record["body"]
    return {"batchItemFailures": [{"itemIdentifier": record["messageId"]}] if failed else []}
"""


@pytest.mark.parametrize(
    "body", ['{"a":1}', '{"a": 1, "b": 12345678901234567890123}', "plain ä", '"quoted"', "7"]
)
async def test_a_lambda_handler_gets_records_as_from_aws(deploy, gate: Gate, queue, body: str) -> None:
    mine = queue()
    await deploy(RECORDS, {**source(mine), "handler": "lambda:handler.py:handler"}, gate=gate, check=False)
    attributes = {
        "kind": {"DataType": "String", "StringValue": "x"},
        "raw": {"DataType": "Binary", "BinaryValue": b"\xff"},
    }
    sent = await mine.send(body, MessageAttributes=attributes)
    record = json.loads((await gate.next()).word)
    await until(mine.empty, "the message is deleted")
    assert (record["messageId"], record["body"], record["md5OfBody"]) == (
        sent, body, hashlib.md5(body.encode()).hexdigest(),
    )  # fmt: skip
    assert (record["eventSource"], record["eventSourceARN"], record["awsRegion"]) == (
        "aws:sqs", mine.arn, "us-east-1",
    )  # fmt: skip
    assert record["attributes"]["ApproximateReceiveCount"] == "1"
    assert record["messageAttributes"] == {
        "kind": {"dataType": "String", "stringValue": "x", "stringListValues": [], "binaryListValues": []},
        "raw": {"dataType": "Binary", "binaryValue": "/w==", "stringListValues": [], "binaryListValues": []},
    }


async def test_what_a_lambda_handler_reports_as_failed_stays_in_the_queue(deploy, gate: Gate, queue) -> None:
    dead = queue()
    policy = json.dumps({"deadLetterTargetArn": dead.arn, "maxReceiveCount": "2"})
    mine = queue(RedrivePolicy=policy)
    await deploy(RECORDS, {**source(mine), "handler": "lambda:handler.py:handler"}, gate=gate, check=False)
    await mine.send("works")
    await mine.send("fails")

    async def ended() -> bool:
        return not mine.messages and dead.bodies == ["fails"]

    await until(ended, "the message that fails is in the dead-letter queue")


async def test_other_handlers_find_the_message_beside_its_body(deploy, gate: Gate, queue) -> None:
    mine, text = (
        queue(),
        "import gate\ndef handler(event, context):\n    gate.say(context.extra['message']['messageId'])\n",
    )
    await deploy(text, source(mine), gate=gate, check=False)
    sent = await mine.send("1")
    assert (await gate.next()).word == sent


@pytest.mark.parametrize(
    "code", ["InvalidClientTokenId", "SignatureDoesNotMatch", "UnrecognizedClientException", "ExpiredToken"]
)
async def test_a_deploy_fails_if_aws_refuses_the_credentials_of_its_source(
    gateway: Gateway, queue: Callable[..., Any], code: str
) -> None:
    async with nonsense([json.dumps({"__type": code, "message": "no"}).encode()], status=403) as endpoint:
        settings = source(queue(), endpoint_url=endpoint)
        error = failure(await gateway.send(PLAIN, settings, name="locked", check=False))
    assert (error["status"], error["type"]) == (422, "source_denied")
    assert "The queue http" in error["message"]
    assert code in error["message"]
    assert "credentials" in error["remedy"] or "Log in" in error["remedy"]
    assert (await gateway.client.get("/v1/functions/locked")).status_code == 404


async def test_a_deploy_needs_no_right_that_it_tries(deploy, queue: Callable[..., Any]) -> None:
    answer = json.dumps({"__type": "AccessDeniedException", "message": "no"}).encode()
    async with nonsense([answer], status=403) as endpoint:
        await deploy(PLAIN, source(queue(), endpoint_url=endpoint), check=False)


async def test_a_deploy_fails_if_its_source_has_no_credentials(
    gateway: Gateway, queue: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = queue()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    error = failure(await gateway.send(PLAIN, source(mine), name="locked", check=False))
    assert (error["status"], error["type"]) == (422, "source_denied")
    assert mine.url in error["message"]
    assert "AWS_ACCESS_KEY_ID" in error["remedy"]
