"""CloudEvents as the SDK's users send them: each event is one job, however often it is sent."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from cloudevents.core.bindings.http import HTTPMessage, from_binary, from_structured, to_binary, to_structured
from cloudevents.core.formats.json import JSONFormat
from cloudevents.core.v1.event import CloudEvent
from live import Function, Gateway, failure, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

SEES = """
def handler(event, context):
    data = event.decode("latin-1") if isinstance(event, bytes) else event
    return {"data": data, "event": context.extra["event"]}
"""
STRUCTURED = "application/cloudevents+json"
BATCH = "application/cloudevents-batch+json"


def made(name: str = "1", data: Any = None, **more: Any) -> CloudEvent:
    attributes = {
        "type": "com.example.made",
        "source": "/tests",
        "id": name,
        "datacontenttype": "application/json",
    }
    return CloudEvent(attributes | more, {"n": 1} if data is None else data)


def batch(*events: CloudEvent) -> HTTPMessage:
    """Return a batch: an array of structured events. The SDK cannot write batches."""
    bodies = [JSONFormat().write(event).decode() for event in events]
    return HTTPMessage({"content-type": BATCH}, f"[{','.join(bodies)}]".encode())


async def send(function: Function, message: HTTPMessage, **headers: str) -> httpx.Response:
    return await function.client.post(
        f"/v2/{function.name}/run", content=message.body, headers={**message.headers, **headers}
    )


async def output(function: Function, job: str) -> Any:
    found: dict[str, Any] = {}

    async def done() -> bool:
        found.update((await function.client.get(f"/v2/{function.name}/status/{job}")).json())
        return found["status"] not in ("IN_QUEUE", "IN_PROGRESS")

    await until(done, f"the end of {job}")
    assert found["status"] == "COMPLETED", found
    return found["output"]


@pytest.mark.parametrize("write", [to_binary, to_structured], ids=["binary", "structured"])
async def test_an_event_is_a_job(deploy, write):
    function = await deploy(SEES)
    response = await send(function, write(made(subject="straße 1", tier="gold"), JSONFormat()))
    assert response.status_code == 202, response.text
    found = response.json()
    assert found["jobs"] == [{"id": found["id"], "status": found["status"]}]
    assert response.headers["X-Job-Id"] == found["id"]
    seen = await output(function, found["id"])
    assert seen["data"] == {"n": 1}
    assert seen["event"].items() >= {
        "specversion": "1.0", "id": "1", "source": "/tests", "type": "com.example.made", "subject": "straße 1",
        "tier": "gold", "datacontenttype": "application/json",
    }.items()  # fmt: skip


@pytest.mark.parametrize("write", [to_binary, to_structured], ids=["binary", "structured"])
async def test_data_that_is_not_json(deploy, write):
    function = await deploy(SEES)
    event = made(data=b"\x00\xff", datacontenttype="application/x-thing")
    found = (await send(function, write(event, JSONFormat()))).json()
    assert (await output(function, found["id"]))["data"] == "\x00\xff"


async def test_a_batch_is_a_job_for_each(deploy):
    function = await deploy(SEES)
    response = await send(function, batch(*(made(str(n), {"n": n}) for n in range(20))))
    assert response.status_code == 202
    jobs = [job["id"] for job in response.json()["jobs"]]
    assert len(set(jobs)) == 20
    assert [(await output(function, job))["event"]["id"] for job in jobs] == [str(n) for n in range(20)]
    assert (await send(function, batch())).json() == {"jobs": []}


async def test_the_same_event_is_the_same_job(deploy):
    function = await deploy(SEES)
    first = await send(function, to_binary(made(), JSONFormat()))
    again = await send(function, to_structured(made(), JSONFormat()))
    assert again.json()["id"] == first.json()["id"]
    assert "Idempotent-Replayed" not in first.headers
    assert again.headers["Idempotent-Replayed"] == "true"
    other = await send(function, to_binary(made(source="/elsewhere"), JSONFormat()))
    assert other.json()["id"] != first.json()["id"]
    twice = (await send(function, batch(made(), made("2"), made("2")))).json()["jobs"]
    assert twice[0]["id"] == first.json()["id"]
    assert twice[1]["id"] == twice[2]["id"]
    error = failure(await send(function, to_binary(made(data={"n": 2}), JSONFormat())))
    assert (error["status"], error["type"]) == (409, "idempotency_conflict")


async def test_a_sender_that_takes_a_body_for_a_reply_gets_none(deploy):
    function = await deploy(SEES)
    response = await send(function, to_binary(made(), JSONFormat()), Prefer="reply")
    assert (response.status_code, response.content) == (202, b"")
    assert (await output(function, response.headers["X-Job-Id"]))["data"] == {"n": 1}


# -- /invoke


async def invoke(function: Function, message: HTTPMessage, **headers: str) -> httpx.Response:
    return await function.client.post(
        function.path, content=message.body, headers={**message.headers, **headers}
    )


@pytest.mark.parametrize("write", [to_binary, to_structured], ids=["binary", "structured"])
async def test_an_event_is_answered(deploy, write):
    function = await deploy(SEES)
    response = await invoke(function, write(made(tier="gold"), JSONFormat()))
    assert response.status_code == 200, response.text
    assert response.json()["data"] == {"n": 1}
    assert response.json()["event"].items() >= {"id": "1", "type": "com.example.made", "tier": "gold"}.items()
    assert not [name for name in response.headers if name.startswith("ce-")]
    raw = await invoke(function, write(made(data=b"\x00\xff", datacontenttype="x/y"), JSONFormat()))
    assert raw.json()["data"] == "\x00\xff"


REPLIES = """
def handler(event):
    give = event.get("give")
    if give == "nothing":
        return None
    if give == "bytes":
        return b"\\x00\\xff"
    if give == "own":
        return {"specversion": "1.0", "type": "shop.paid", "subject": "straße 1", "data": {"paid": True}}
    if give == "wrong":
        return {"specversion": "1.0", "type": ""}
    return {"got": event}
"""


@pytest.mark.parametrize("prefer", ["reply", "Reply, wait=5", "foo=bar; x=y, REPLY"])
async def test_the_reply_is_an_event_if_asked_for(deploy, prefer: str):
    function = await deploy(REPLIES)
    response = await invoke(function, to_binary(made("a1"), JSONFormat()), Prefer=prefer)
    found = from_binary(HTTPMessage(dict(response.headers), response.content), JSONFormat())
    assert found.get_data() == {"got": {"n": 1}}
    assert (found.get_type(), found.get_source()) == ("pilotflame.output", function.path)
    assert found.get_id() == response.headers["X-Request-Id"]
    assert found.get_extension("causationid") == "a1"
    own = await invoke(function, to_binary(made(data={"give": "own"}), JSONFormat()), Prefer=prefer)
    found = from_binary(HTTPMessage(dict(own.headers), own.content), JSONFormat())
    assert (found.get_type(), found.get_subject(), found.get_data()) == (
        "shop.paid",
        "straße 1",
        {"paid": True},
    )
    raw = await invoke(function, to_binary(made(data={"give": "bytes"}), JSONFormat()), Prefer=prefer)
    assert (raw.content, raw.headers["Content-Type"]) == (b"\x00\xff", "application/octet-stream")
    nothing = await invoke(function, to_binary(made(data={"give": "nothing"}), JSONFormat()), Prefer=prefer)
    assert (nothing.status_code, nothing.content, nothing.headers.get("ce-id")) == (204, b"", None)
    wrong = failure(
        await invoke(function, to_binary(made(data={"give": "wrong"}), JSONFormat()), Prefer=prefer)
    )
    assert (wrong["status"], wrong["type"]) == (500, "output_invalid")


async def test_the_reply_is_structured_if_asked_for(deploy):
    function = await deploy(REPLIES)
    for give, wanted in (("x", {"got": {"give": "x"}}), ("bytes", b"\x00\xff")):
        response = await invoke(
            function, to_binary(made(data={"give": give}), JSONFormat()), Accept=STRUCTURED
        )
        assert response.headers["Content-Type"] == STRUCTURED
        found = from_structured(HTTPMessage(dict(response.headers), response.content), JSONFormat())
        assert found.get_data() == wanted


async def test_an_event_to_invoke_that_is_refused(deploy, gateway: Gateway):
    function = await deploy(REPLIES)
    assert failure(await invoke(function, batch(made("1"), made("2"))))["status"] == 415
    headers = dict(to_binary(made(), JSONFormat()).headers)
    del headers["ce-id"]
    assert failure(await invoke(function, HTTPMessage(headers, b"{}")))["type"] == "event_invalid"
    unknown = await gateway.client.post("/invoke/none", headers=to_binary(made(), JSONFormat()).headers)
    assert failure(unknown)["status"] == 404


async def test_an_event_to_invoke_may_become_a_job(deploy):
    function = await deploy(SEES)
    response = await invoke(function, to_binary(made("j"), JSONFormat()), Prefer="Respond-Async")
    assert response.status_code == 202
    assert (await output(function, response.headers["X-Job-Id"]))["event"]["id"] == "j"


async def test_an_invalid_event_is_refused_with_its_reason(deploy):
    function = await deploy(SEES)
    headers = dict(to_binary(made(), JSONFormat()).headers)
    del headers["ce-id"]
    error = failure(await send(function, HTTPMessage(headers, b"{}")))
    assert (error["status"], error["type"]) == (400, "event_invalid")
    assert "'id'" in error["message"]
    error = failure(await send(function, HTTPMessage({"content-type": "application/cloudevents+avro"}, b"")))
    assert (error["status"], error["type"]) == (415, "unsupported_media")
    body = json.dumps([{"specversion": "1.0"}]).encode()
    assert failure(await send(function, HTTPMessage({"content-type": BATCH}, body)))["status"] == 400
    twice = [("ce-specversion", "1.0"), ("ce-id", "1"), ("ce-id", "2"), ("ce-type", "t"), ("ce-source", "s")]
    response = await function.client.post(f"/v2/{function.name}/run", headers=twice)
    assert "twice" in failure(response)["message"]
    assert failure(await function.client.post("/v2/none/run", headers=headers))["status"] == 404


@pytest.mark.parametrize("path", ["/v2/{}/run", "/invoke/{}"])
async def test_the_handshake(deploy, path: str):
    function = await deploy(SEES)
    url = path.format(function.name)

    async def asked(**headers: str) -> httpx.Response:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return await function.client.options(url, headers=named)

    response = await asked(WebHook_Request_Origin="eventemitter.example.com", WebHook_Request_Rate="120")
    assert response.status_code == 200
    assert response.headers["WebHook-Allowed-Origin"] == "eventemitter.example.com"
    assert response.headers["WebHook-Allowed-Rate"] == "*"
    assert "POST" in response.headers["Allow"]
    assert failure(await asked())["type"] == "event_invalid"
    for rate in ("0", "-1", "often", "²"):
        refused = await function.client.options(
            url,
            headers=[(b"WebHook-Request-Origin", b"x"), (b"WebHook-Request-Rate", rate.encode())],
        )
        assert refused.status_code == 400
    unknown = await function.client.options(path.format("none"), headers={"WebHook-Request-Origin": "x"})
    assert failure(unknown)["status"] == 404


async def sent(function: Function, way: str, text: str) -> httpx.Response:
    """Send a JSON text as the event of a function: to /invoke, as a job, or as a CloudEvent."""
    named = {"type": "a", "source": "/tests", "id": way}
    paths = {"invoke": function.path, "jobs": f"/v1/functions/{function.name}/jobs?wait_s=60"}
    path = paths.get(way, f"/v2/{function.name}/run")
    headers, body = {"Content-Type": "application/json"}, f'{{"input":{text}}}'
    if way in ("invoke", "binary"):
        body = text
    if way == "binary":
        headers |= {"ce-specversion": "1.0", **{f"ce-{name}": value for name, value in named.items()}}
    if way == "structured":
        body = f'{json.dumps({"specversion": "1.0", **named})[:-1]},"data":{text}}}'
        headers["Content-Type"] = STRUCTURED
    return await function.client.post(path, content=body, headers=headers)


@pytest.mark.parametrize("way", ["invoke", "jobs", "run", "binary", "structured"])
async def test_a_value_arrives_as_pythons_json_reads_it_or_is_refused(deploy, way: str):
    function = await deploy("def handler(event):\n    return repr(event)\n")
    text = '{"ids": [123456789012345678901, -9223372036854775809, 18446744073709551615, 1.5, -0.0, "\\ud83d\\ude00"]}'
    response = await sent(function, way, text)
    assert response.status_code in (200, 202), response.text
    answer = response.json()
    if way == "jobs":
        answer = answer["output"]
    elif way != "invoke":
        answer = await output(function, answer["id"])
    assert answer == repr(json.loads(text))
    for wrong in ("NaN", '{"a": [-Infinity]}', "1e999", '"\\ud800"', "9" * 5000):
        error = failure(await sent(function, way, wrong))
        assert error["status"] == 400, wrong
        assert "not JSON" in error["message"], wrong
