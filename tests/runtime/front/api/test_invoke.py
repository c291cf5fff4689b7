"""POST /invoke over real HTTP: every kind of handler, bodies, statuses, headers, streams, callers that disconnect."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import tracemalloc

import httpx
import numpy as np
import pytest
import safetensors.numpy
from live import LIMIT_S, WAITS_ASYNC, Function, Gate, Gateway, events, failure, gateway_here, gone, until
from pilotflame.runtime.calls.serving import time_limits
from pilotflame.runtime.calls.serving.invocation import Invocation
from pilotflame.runtime.calls.serving.revision import Revision
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"


# -- every kind of handler


@pytest.mark.parametrize(
    "source",
    [
        "def handler(event):\n    return {'twice': event * 2}",
        "def handler(event, context):\n    return {'twice': event * 2, 'id': context.id}",
        "async def handler(event):\n    return {'twice': event * 2}",
        "async def handler(event, context):\n    return {'twice': event * 2, 'id': context.id}",
        "import pilotflame\n@pilotflame.batch(max_size=4)\ndef handler(events):\n"
        "    return [{'twice': event * 2} for event in events]",
        "import pilotflame\n@pilotflame.batch(max_size=4)\nasync def handler(events, context):\n"
        "    return [{'twice': event * 2, 'id': item.id} for event, item in zip(events, context.items)]",
        "class Model:\n    def __call__(self, event):\n        return {'twice': event * 2}\nhandler = Model()",
    ],
    ids=["plain", "plain-context", "async", "async-context", "batch", "async-batch", "callable"],
)
async def test_a_handler_answers(deploy, source: str):
    function = await deploy(source)
    answer = await function.answer(21, X_Request_Id="mine")
    assert answer["twice"] == 42
    assert answer.get("id", "mine") == "mine"


@pytest.mark.parametrize(
    "source",
    [
        "def handler(event):\n    for n in range(event):\n        yield {'n': n}",
        "async def handler(event, context):\n    for n in range(event):\n        yield {'n': n}",
    ],
    ids=["generator", "async-generator"],
)
async def test_a_generator_streams_server_sent_events(deploy, source: str):
    function = await deploy(source)
    response = await function.call(3)
    assert response.headers["content-type"] == "text/event-stream"
    assert events(response.text) == [
        ("1", "output", {"n": 0}),
        ("2", "output", {"n": 1}),
        ("3", "output", {"n": 2}),
        ("4", "completed", {}),
    ]
    # 200 pieces exceed the credit of a stream, so the worker must get new credit.
    assert len(events((await function.call(200)).text)) == 201


async def test_a_stream_is_sent_piece_by_piece(deploy, gate: Gate):
    source = "import gate\ndef handler(event):\n    yield 'first'\n    gate.wait()\n    yield 'second'\n"
    function = await deploy(source, gate=gate)
    async with function.client.stream("POST", function.path, json=None) as response:
        lines = response.aiter_lines()
        assert [await anext(lines) for _ in range(3)] == ["id: 1", "event: output", 'data: "first"']
        (await gate.next()).go()
        assert 'data: "second"' in [line async for line in lines]


async def test_a_generator_that_fails_ends_its_stream_with_the_error(deploy):
    source = "def handler(event):\n    if event:\n        yield 1\n    raise ValueError('no more')\n"
    function = await deploy(source)
    name, kind, data = events((await function.call(1)).text)[-1]
    assert (name, kind, data["type"]) == ("2", "error", "handler_failed")
    # An error before the first piece is an ordinary response with the status of the error.
    assert (await function.error(0))["status"] == 500


async def test_hooks_run_in_their_processes(deploy, gate: Gate):
    source = """
import os, gate
def build(context):
    return {"built_in": os.getpid()}
def setup(context):
    context.state["set_up_in"] = os.getpid()
def teardown(context):
    gate.say(f"torn down {os.getpid()}")
def handler(event, context):
    return {**context.state, "ran_in": os.getpid()}
"""
    function = await deploy(source, {"scale.idle_timeout_s": 0}, gate=gate, check=False)
    answer = await function.answer()
    assert answer["set_up_in"] == answer["ran_in"] != answer["built_in"]
    assert (await gate.next()).word == f"torn down {answer['ran_in']}"


async def test_a_failing_handler_is_a_typed_error_with_its_line(deploy):
    function = await deploy("def handler(event):\n    return 1 / event\n")
    error = await function.error(0)
    assert (error["status"], error["type"]) == (500, "handler_failed")
    assert error["details"]["file"] == "handler.py"
    assert error["details"]["line"] == 2
    assert "ZeroDivisionError" in error["details"]["traceback"]
    assert await function.answer(2) == 0.5


# -- bodies and statuses


async def test_bytes_and_text_are_passed_on(deploy):
    function = await deploy(
        "def handler(event):\n    return event if isinstance(event, bytes) else event.upper()"
    )
    post = function.client.post
    binary = {"Content-Type": "application/octet-stream"}
    response = await post(function.path, content=b"\0\xff", headers=binary)
    assert (response.content, response.headers["content-type"]) == (b"\0\xff", binary["Content-Type"])
    assert (await post(function.path, content=b"abc", headers={"Content-Type": "text/plain"})).json() == "ABC"


async def test_arrays_are_sent_as_bytes_to_callers_that_accept_them(deploy):
    source = """
import numpy as np
def handler(event):
    if isinstance(event, np.ndarray):
        return event * 2
    return {"a": np.arange(3.0), "b": np.ones((1, 2), dtype=np.float16)}
"""
    function = await deploy(source)
    post, file = function.client.post, io.BytesIO()
    np.save(file, np.arange(4, dtype=np.float32))
    sent = {"Content-Type": "application/x-npy"}
    for accept in ("application/x-npy", "application/octet-stream, application/json;q=0.5"):
        answer = await post(function.path, content=file.getvalue(), headers=sent | {"Accept": accept})
        assert answer.headers["content-type"] == accept.partition(",")[0]
        found = np.load(io.BytesIO(answer.content), allow_pickle=False)
        assert (found.dtype, found.tolist()) == (np.float32, [0.0, 2.0, 4.0, 6.0])
    assert (await post(function.path, content=file.getvalue(), headers=sent)).json() == [0.0, 2.0, 4.0, 6.0]
    answer = await function.call(None, Accept="application/vnd.safetensors")
    assert answer.headers["content-type"] == "application/vnd.safetensors"
    assert safetensors.numpy.load(answer.content)["b"].tolist() == [[1.0, 1.0]]
    assert await function.answer() == {"a": [0.0, 1.0, 2.0], "b": [[1.0, 1.0]]}
    broken = failure(await post(function.path, content=b"x", headers=sent))
    assert (broken["status"], "application/x-npy" in broken["message"]) == (400, True)


async def test_a_body_that_is_not_json_is_refused(deploy):
    function = await deploy(ECHO)
    error = failure(await function.client.post(function.path, content=b'{"a": '))
    assert (error["status"], error["type"]) == (400, "bad_json")
    assert error["remedy"]


async def test_an_invalid_input_is_refused_with_its_paths(deploy):
    source = """
from pydantic import BaseModel
class Item(BaseModel):
    size: int
class Input(BaseModel):
    items: list[Item]
def handler(event: Input) -> dict[str, int]:
    return {"total": sum(item.size for item in event.items)}
"""
    function = await deploy(source)
    assert await function.answer({"items": [{"size": 1}, {"size": 2}]}) == {"total": 3}
    error = await function.error({"items": [{"size": 1}, {"size": "x"}]})
    assert (error["status"], error["type"]) == (422, "input_invalid")
    assert [problem["path"] for problem in error["details"]["problems"]] == ["input.items[1].size"]
    assert "input.items[1].size" in error["message"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def handler(event):\n    return {'a': [object()]}", "answer.a[0] is of type object"),
        ("def handler(event):\n    return float('nan')", "NaN"),
        ("def handler(event) -> int:\n    return 'x'", "answer"),
        ("def handler(event):\n    yield object()", "answer is of type object"),
    ],
    ids=["object", "nan", "annotation", "stream"],
)
async def test_an_output_that_is_not_json_is_an_error(deploy, source: str, said: str):
    function = await deploy(source)
    error = await function.error()
    assert (error["status"], error["type"]) == (500, "output_invalid")
    assert said in error["message"]
    assert error["remedy"]


async def test_statuses_of_paths_and_methods(deploy, client: httpx.AsyncClient):
    function = await deploy(ECHO)
    error = failure(await client.post("/invoke/nobody", json=1))
    assert (error["status"], error["type"]) == (404, "unknown_function")
    assert (await client.get(function.path)).status_code == 405
    assert (await client.get("/nowhere")).status_code == 404


async def test_a_body_over_the_limit_is_refused(deploy):
    function = await deploy(ECHO, {"max_body_bytes": 1000})
    assert len(await function.answer("x" * 998)) == 998

    async def pieces():
        for _ in range(100):
            yield b"x" * 100

    # The first body has a Content-Length, the second body is chunked.
    for content in (b"x" * 1001, pieces()):
        error = failure(await function.client.post(function.path, content=content))
        assert (error["status"], error["type"]) == (413, "input_too_large")
        assert "1000 bytes" in error["message"]
        assert "max_body_bytes in pilotflame.toml" in error["remedy"]


async def test_the_remedy_for_a_large_body_names_the_limit_that_it_exceeds(deploy):
    function = await deploy(ECHO)
    for path, told in (
        (function.path, "PILOTFLAME_MAX_BODY_BYTES"),
        (f"/v2/{function.name}/run", "call and wait"),
    ):
        error = failure(await function.client.post(path, content=b"1" * ((20 << 20) + 1)))
        assert (error["status"], error["type"]) == (413, "input_too_large")
        assert told in error["remedy"], error
        assert "send its address" in error["remedy"]


async def test_refusals_are_counted_by_their_reason(deploy, client: httpx.AsyncClient):
    function = await deploy("def handler(event):\n    return 1 / event\n", {"max_body_bytes": 10})
    await function.error("x" * 100)
    await function.error(0)
    await function.error(1, X_Priority="9")
    told = (await client.get("/metrics")).text
    of = f'pilotflame_refusals_total{{function="{function.name}",reason='
    found = [line for line in told.splitlines() if line.startswith(of)]
    assert sorted(found) == [f'{of}"bad_json"}} 1.0', f'{of}"input_too_large"}} 1.0']
    exec_ = f'pilotflame_phase_seconds_count{{function="{function.name}",phase="exec"}} 1.0'
    assert exec_ in told


async def test_a_body_that_arrives_too_slowly_is_refused(state, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pilotflame.runtime.front.http.requests.BODY_TIMEOUT_S", 0.05)
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(ECHO)
        head = f"POST {function.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n12345"
        status, body = await raw(gateway, head)
        assert (status, body["error"]["type"]) == (408, "input_timeout")


@pytest.mark.parametrize("sent", ["", "POST /invoke/f HTTP/1.1\r\nHos"], ids=["nothing", "half-a-header"])
async def test_a_silent_connection_is_closed(state, sent: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pilotflame.runtime.front.http.connection.HEADER_TIMEOUT_S", 0.05)
    async with gateway_here(state) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.address)
        writer.write(sent.encode())
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_malformed_chunked_body_is_refused(deploy, gateway: Gateway):
    function = await deploy(ECHO)
    head = f"POST {function.path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
    assert (await raw(gateway, head))[0] == 400
    assert await function.answer(1) == 1


# -- headers


async def test_the_response_has_request_id_and_worker_id(deploy, gateway: Gateway):
    function = await deploy("def handler(event, context):\n    return [context.id, context.traceparent]")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    response = await function.call(None, X_Request_Id="abc-1", traceparent=trace)
    assert response.json() == ["abc-1", trace]
    assert response.headers["x-request-id"] == "abc-1"
    assert response.headers["traceparent"] == trace
    assert response.headers["x-worker-id"].startswith(f"{function.name}-r1-")
    # If the request has no id or an invalid id, the gateway makes an id.
    for given in ("", "two words", "x" * 129):
        other = (await function.call(None, X_Request_Id=given)).headers["x-request-id"]
        assert len(other) == 16


async def test_a_worker_cannot_inject_headers_into_the_response(deploy, gateway: Gateway):
    function = await deploy(ECHO)
    for name in ("X-Request-Id", "traceparent"):
        for value in ("a\rX-Evil: 1", "a\tX-Evil: 1", "a\x01", "a\x7fé"):
            head = f"POST {function.path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{name}: {value}\r\nContent-Length: 1\r\n\r\n1"
            reader, writer = await asyncio.open_connection(*gateway.address)
            writer.write(head.encode("latin-1"))
            async with asyncio.timeout(LIMIT_S):
                answer = await reader.read()
            writer.close()
            names = [
                line.partition(b":")[0].lower() for line in answer.partition(b"\r\n\r\n")[0].split(b"\r\n")
            ]
            assert b"x-evil" not in names
            assert answer.split()[1] in (b"200", b"400"), answer[:200]


@pytest.mark.parametrize("header", ["X-Request-Timeout", "X-Scale-Up-Timeout"])
async def test_an_invalid_time_is_refused(deploy, header: str):
    function = await deploy(ECHO)
    for value in ("soon", "-1", "0", "nan", "inf"):
        error = await function.error(1, **{header: value})
        assert (error["status"], error["type"]) == (400, "bad_json")
        assert header in error["message"]


async def test_cold_then_warm_and_the_phases_sum(deploy):
    function = await deploy(ECHO)
    await function.settled()
    for cold in ("true", "false"):
        response = await function.call(1)
        assert response.headers["x-cold-start"] == cold
        phases = parse_server_timing(response.headers["server-timing"])
        total = phases.pop("total")
        assert sum(phases.values()) == pytest.approx(total, rel=0.02)
        assert ("fork" in phases) == ("restore" in phases) == (cold == "true")


# -- time


async def test_a_deadline_passes_and_the_stuck_worker_is_replaced(
    deploy, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(time_limits, "CANCEL_GRACE_S", 0.0)
    source = (
        "import gate, os\ndef handler(event):\n    if event:\n        gate.wait()\n    return os.getpid()"
    )
    function = await deploy(source, {"scale.max": 1, "timeout_s": 0.5}, gate=gate)
    before = await function.answer(0)
    error = await function.error(1, X_Request_Timeout="0.05")
    assert (error["status"], error["type"]) == (504, "deadline_exceeded")
    # The caller's header sets the limit, so the error must not advise to change the setting of the function.
    assert "caller's" in error["message"]
    assert ("X-Request-Timeout" in error["remedy"], "pilotflame.toml" in error["remedy"]) == (True, False)
    await gone(before)
    assert await function.answer(0) != before


async def test_a_handler_sees_its_deadline(deploy):
    source = "def handler(event, context):\n    return [context.remaining_ms(), context.cancelled, context.attempt]"
    function = await deploy(source, {"timeout_s": 1000.0})
    remaining, cancelled, attempt = await function.answer(None, X_Request_Timeout="20")
    assert 0 < remaining <= 20_000
    assert (cancelled, attempt) == (False, 1)
    # A longer limit of the caller does not extend the function's own limit.
    assert (await function.answer(None, X_Request_Timeout="2000"))[0] <= 1_000_000


@pytest.mark.parametrize("header", ["grpc-timeout: 20S", "x-envoy-expected-rq-timeout-ms: 20000", "x-stainless-read-timeout: 20"])  # fmt: skip
async def test_deadlines_of_other_conventions_count(deploy, header: str):
    function = await deploy("def handler(event, context):\n    return context.remaining_ms()")
    name, _, value = header.partition(": ")
    assert 0 < await function.answer(None, **{name: value}) <= 20_000
    assert await function.answer(None, **{name: "nonsense"}) > 20_000


async def test_a_request_has_a_priority_and_a_tenant(deploy, monkeypatch):
    function = await deploy(ECHO)
    seen = submitted(monkeypatch)
    assert await function.answer(1, X_Priority="1") == 1
    assert await function.answer(2) == 2
    assert [(one.priority, one.tenant) for one in seen] == [(1, ""), (3, "")]
    error = await function.error(3, X_Priority="urgent")
    assert (error["status"], error["type"]) == (400, "bad_json")
    assert "X-Priority" in error["message"]


async def test_the_tenant_is_the_owner_of_the_key(state, monkeypatch):
    async with gateway_here(state, auth="always") as gateway:
        async with gateway.at_home() as home:
            key = (await home.post("/v1/keys", json={"name": "k", "scopes": ["admin"]})).json()
        gateway.client.headers["Authorization"] = f"Bearer {key['key']}"
        function = await gateway.deploy(ECHO)
        seen = submitted(monkeypatch)
        await function.answer(1)
        path = f"/lambda/2015-03-31/functions/{function.name}/invocations"
        assert (await gateway.client.post(path, content=b"1", headers={"X-Priority": "2"})).json() == 1
        (await gateway.client.post(f"/v2/{function.name}/runsync", json={"input": 1})).raise_for_status()
        low = {"input": 1, "policy": {"lowPriority": True}}
        (await gateway.client.post(f"/v2/{function.name}/runsync", json=low)).raise_for_status()
        assert [one.tenant for one in seen] == [key["id"]] * 4
        assert [one.priority for one in seen] == [3, 2, 3, 5]
        plain = (await gateway.client.post("/v1/keys", json={"name": "p", "scopes": ["invoke"]})).json()[
            "key"
        ]
        gateway.client.headers["Authorization"] = f"Bearer {plain}"
        for way in (function.path, path):
            headers = {"X-Priority": "1"}
            (await gateway.client.post(way, content=b"1", headers=headers)).raise_for_status()
        await function.answer(1, X_Priority="4")
        # Only an admin's key gets a priority above the default.
        assert [one.priority for one in seen[4:]] == [3, 3, 4]


async def test_the_hold_time_passes_while_setup_waits(deploy, gate: Gate):
    source = "import gate\ndef setup(context):\n    gate.wait('setup')\ndef handler(event):\n    return event"
    function = await deploy(source, {"hold_s": 0.05}, gate=gate, check=False)
    response = await function.call(1)
    error = failure(response)
    assert (error["status"], error["type"]) == (503, "activation_timeout")
    assert int(response.headers["retry-after"]) >= 1
    patient = asyncio.create_task(function.answer(2, X_Scale_Up_Timeout="60"))
    # The activation goes on after the first call has failed.
    (await gate.next("setup")).go()
    assert await patient == 2
    assert await function.answer(3) == 3


async def test_a_full_queue_refuses(deploy, gate: Gate):
    source = "import gate\ndef handler(event):\n    gate.wait()\n    return event"
    function = await deploy(source, {"scale.max": 1, "max_queue": 2}, gate=gate)
    running = asyncio.create_task(function.answer(0))
    await gate.next()
    waiting = [asyncio.create_task(function.answer(n)) for n in (1, 2)]
    await function.settled(ready=1, queued=2)
    response = await function.call(3)
    error = failure(response)
    assert (error["status"], error["type"]) == (429, "queue_full")
    assert "max_queue" in error["remedy"]
    assert int(response.headers["retry-after"]) >= 1
    gate.open()
    assert await asyncio.gather(running, *waiting) == [0, 1, 2]


# -- callers that disconnect


async def test_an_async_handler_is_cancelled_when_its_caller_disconnects(deploy, gate: Gate):
    function = await deploy(WAITS_ASYNC, gate=gate)
    async with leaving(function):
        worker = (await gate.next("begun")).pid
    assert (await gate.next("cancelled")).pid == worker
    # Wait until the gateway has ended the call. Otherwise the next call would be the second in flight and start another worker.
    await function.settled(ready=1, in_flight=0)
    later = asyncio.create_task(function.answer(2))
    (await gate.next("begun")).go()
    assert await later == 2
    assert await function.pids("worker") == [worker]


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "generator"])
async def test_a_handler_on_a_thread_is_notified_when_its_caller_disconnects(
    deploy, gate: Gate, stream: bool
):
    source = f"""
import gate, time
def handler(event, context):
    gate.say("runs")
    try:
        while not context.cancelled:
            {"yield 0" if stream else "time.sleep(0.001)"}
    finally:
        gate.say("stopped")
"""
    function = await deploy(source, gate=gate)
    async with leaving(function):
        worker = (await gate.next("runs")).pid
    assert (await gate.next("stopped")).pid == worker
    await function.settled(ready=1, in_flight=0)
    assert await function.pids("worker") == [worker]


async def test_an_async_generator_is_closed_when_its_caller_disconnects(deploy, gate: Gate):
    source = """
import gate
async def handler(event):
    gate.say("runs")
    try:
        while True:
            yield 0
    finally:
        gate.say("closed")
"""
    function = await deploy(source, gate=gate)
    async with leaving(function):
        await gate.next("runs")
    await gate.next("closed")
    await function.settled(ready=1, in_flight=0)


async def test_a_waiting_invocation_is_dropped_when_its_caller_disconnects(deploy, gate: Gate):
    source = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event"
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    first = asyncio.create_task(function.answer("a"))
    await gate.next("a")
    async with leaving(function, "b"):
        await function.settled(ready=1, queued=1)
    await function.settled(ready=1, queued=0)
    gate.open()
    assert await first == "a"
    assert await function.answer("c") == "c"
    assert [arrival.word for arrival in gate.arrived] == ["a", "c"]


# -- batches


BATCH = """
import gate, pilotflame
@pilotflame.batch(max_size=8)
def handler(events):
    gate.wait(str(len(events)))
    return [ValueError("bad") if event == "bad" else [event, len(events)] for event in events]
"""


async def test_callers_are_batched_and_one_bad_item_fails_alone(deploy, gate: Gate):
    function = await deploy(BATCH, {"scale.max": 1}, gate=gate)
    first = asyncio.create_task(function.answer("first"))
    await gate.next("1")
    rest = [asyncio.create_task(function.call(event)) for event in ("a", "bad", "b", "c", "d", "e", "f")]
    await function.settled(ready=1, in_flight=1, queued=7)
    gate.open()
    assert await first == ["first", 1]
    answers = await asyncio.gather(*rest)
    assert [answer.status_code for answer in answers] == [200, 500, 200, 200, 200, 200, 200]
    assert [answer.json()[1] for answer in answers if answer.status_code == 200] == [7] * 6
    assert failure(answers[1])["type"] == "handler_failed"
    assert [arrival.word for arrival in gate.arrived] == ["1", "7"]


async def test_a_batch_of_the_wrong_length_fails_as_a_whole(deploy):
    function = await deploy("import pilotflame\n@pilotflame.batch()\ndef handler(events):\n    return []")
    error = await function.error(1)
    assert error["type"] == "output_invalid"
    assert "1 events and returned 0 answers" in error["message"]


async def test_a_bad_body_in_a_batch_fails_alone(deploy, gate: Gate):
    function = await deploy(BATCH, {"scale.max": 1}, gate=gate)
    first = asyncio.create_task(function.answer("first"))
    await gate.next("1")
    broken = asyncio.create_task(function.client.post(function.path, content=b"{"))
    good = asyncio.create_task(function.answer("good"))
    await function.settled(ready=1, in_flight=1, queued=2)
    gate.open()
    assert (await broken).status_code == 400
    assert await good == ["good", 1]
    await first


# -- helpers


def submitted(monkeypatch) -> list[Invocation]:
    """Collect all invocations that are submitted from now on."""
    seen: list[Invocation] = []
    real = Revision.submit

    def submit(self: Revision, invocation: Invocation) -> None:
        seen.append(invocation)
        real(self, invocation)

    monkeypatch.setattr(Revision, "submit", submit)
    return seen


async def raw(gateway: Gateway, request: str) -> tuple[int, dict]:
    """Send these bytes and read one response. Return its status and its body; {} if the body is no JSON object."""
    reader, writer = await asyncio.open_connection(*gateway.address)
    try:
        writer.write(request.encode())
        async with asyncio.timeout(LIMIT_S):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
            body = await reader.readexactly(length)
            return int(head.split()[1]), json.loads(body) if body.startswith(b"{") else {}
    finally:
        writer.close()


class leaving:  # noqa: N801
    """A caller who closes the connection at the end of the block."""

    def __init__(self, function, event: object = None) -> None:
        self._url, self._path, self._body = function.client.base_url, function.path, json.dumps(event)

    async def __aenter__(self) -> None:
        _, self._writer = await asyncio.open_connection(self._url.host, self._url.port)
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(self._body)}\r\n\r\n"
        self._writer.write((head + self._body).encode())

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()
        await self._writer.wait_closed()


@pytest.mark.parametrize("prefer", ["respond-async", "Respond-Async", 'foo="a", RESPOND-ASYNC; x=y'])
async def test_preferences_have_any_case(deploy, prefer: str):
    function = await deploy("def handler(event):\n    return event")
    response = await function.client.post(function.path, json=1, headers={"Prefer": prefer})
    assert (response.status_code, response.headers["Preference-Applied"]) == (202, "respond-async")
    other = await function.client.post(function.path, json=1, headers={"Prefer": "not-respond-async"})
    assert other.status_code == 200


FAILING = {
    "handler": "def handler(event):\n    raise ValueError('no')",
    "stream": "def handler(event):\n    yield 1\n    raise ValueError('no')",
    "worker": "import os\ndef handler(event):\n    os._exit(3)",
}


PATHS = (
    "/invoke/{}", "/v2/{}/runsync", "/lambda/2015-03-31/functions/{}/invocations", "/sagemaker/endpoints/{}/invocations",
    "/kserve/v1/models/{}:predict", "/tensorflow-serving/v1/models/{}:predict",
    "/vertex/v1/projects/p/locations/l/endpoints/{}:predict", "/torchserve/predictions/{}",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("failing", FAILING)
async def test_a_failed_call_keeps_nothing(deploy, failing: str, path: str):
    """The end of a call frees its body at once: no cycle of references keeps the body until the garbage collector runs."""
    function: Function = await deploy(FAILING[failing])
    body = json.dumps({"instances" if ":predict" in path else "input": ["x" * 1_000_000]}).encode()
    gc.collect()
    # Hide the objects of earlier tests from `gc.get_objects`. A search in millions of objects takes seconds, and the invocations of
    # earlier tests must not count.
    gc.freeze()
    gc.disable()
    tracemalloc.start()
    try:
        for headers in ({}, {"Prefer": "nothing"}):
            await function.client.post(path.format(function.name), content=body, headers=headers)

        async def freed() -> bool:
            kept = [found for found in gc.get_objects() if type(found) is Invocation]
            return not kept and tracemalloc.get_traced_memory()[0] < 1_000_000

        # The end of a request, and of a job, takes some turns of the event loop.
        await until(freed, "the end of all references to the bodies")
    finally:
        tracemalloc.stop()
        gc.enable()
        gc.unfreeze()


async def test_a_form_of_several_parts_is_refused_unless_the_handler_takes_bytes(deploy):
    for source, status in (
        ("def handler(event):\n    return 1\n", 415),
        ("def handler(event: bytes):\n    return 1\n", 200),
    ):
        function = await deploy(source)
        answer = await function.client.post(function.path, files={"a": b"b"})
        assert answer.status_code == status, answer.text
        assert status == 200 or answer.json()["error"]["type"] == "unsupported_media"
