"""Warm-ups over HTTP: by callers that expect load, and by the hooks of platforms."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import TRUSTED, Function, failure, gateway_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"
FAILS = "def setup(context):\n    raise OSError('no licence')\ndef handler(event):\n    return event\n"
IDLE = {"scale.idle_timeout_s": 0}


async def warm(function: Any, **request: Any) -> httpx.Response:
    return await function.client.post(f"/v2/{function.name}/warmup", **request)


def causes(gateway: Any, function: Any) -> list[str]:
    """Return the causes of the starts that a signal asked for."""
    history = gateway.server.functions.get(function.name).workers.function
    return [one.cause for one in history.decisions.since(0) if one.action == "start" and one.cause != "load"]


async def test_no_cold_start_in_a_burst_after_a_warm_up(deploy: Any):
    function = await deploy(ECHO, IDLE | {"scale.max": 3})
    await function.settled(ready=0)
    response = await warm(function, params={"workers": "2", "wait_s": "60"})
    assert response.json() == {"workers": {"ready": 2, "parked": 0, "starting": 0, "draining": 0}}
    answers = await asyncio.gather(*(function.call(n) for n in range(100)))
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-cold-start"] for answer in answers} == {"false"}


async def test_the_number_of_workers(deploy: Any, client: httpx.AsyncClient):
    function = await deploy(ECHO, {"scale.max": 3})
    assert (await warm(function)).status_code == 200
    await function.settled(ready=1)
    assert (await function.call(1)).headers["x-cold-start"] == "false"
    assert (await warm(function, params={"workers": "3"})).status_code == 200
    await function.settled(ready=3)
    assert failure(await warm(function, params={"workers": "4"}))["status"] == 400
    assert failure(await warm(function, json={"workers": 4}))["status"] == 400
    assert failure(await client.post("/v2/nobody/warmup"))["status"] == 404


async def test_workers_are_kept_as_long_as_was_asked(deploy: Any):
    function = await deploy(ECHO, IDLE)
    await warm(function, params={"workers": "2", "wait_s": "60", "for_s": "300"})
    await warm(function, params={"workers": "1", "wait_s": "60"})
    await function.answer(1)
    await function.settled(ready=2)
    assert (await warm(function, params={"workers": "3", "for_s": "1", "wait_s": "60"})).status_code == 200
    await function.settled(ready=2)


async def test_a_long_warm_up_needs_the_scope_deploy_and_can_be_ended(state: Path):
    async with gateway_here(state) as gateway:
        await gateway.deploy(ECHO, IDLE | {"scale.max": 3}, name="kept")
        clients = dict[str, Function]()
        async with gateway.at_home() as home:
            for scope in ("invoke", "deploy"):
                policy = {"policy": TRUSTED} if scope == "deploy" else {}
                wanted = {"name": scope, "scopes": ["invoke", scope], **policy}
                made = (await home.post("/v1/keys", json=wanted)).json()
                headers = {"Authorization": f"Bearer {made['key']}"}
                client = httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60)
                clients[scope] = Function("kept", client, {})
        caller, owner = clients["invoke"], clients["deploy"]
        async with caller.client, owner.client:
            for request in ({"for_s": "61"}, {"workers": "0"}):
                assert failure(await warm(caller, params=request))["type"] == "forbidden"
            assert (await warm(caller, params={"for_s": "60", "wait_s": "60"})).status_code == 200
            assert (
                await warm(owner, params={"workers": "2", "for_s": "86400", "wait_s": "60"})
            ).status_code == 200
            assert (await warm(owner, params={"workers": "0"})).status_code == 200
            await owner.settled(ready=0)


async def test_the_body_of_a_hook(gateway: Any, deploy: Any):
    function = await deploy(ECHO, IDLE)
    sent = {
        "workers": 2,
        "wait_s": 60,
        "cause": "rollout",
        "receiver": "team",
        "alerts": [{"status": "firing"}],
    }
    assert (await warm(function, json=sent)).json()["workers"]["ready"] == 2
    # The query overrides the body, and a body that is no JSON object is ignored.
    assert (await warm(function, json={"workers": 1}, params={"workers": "3", "wait_s": "60"})).json() == {
        "workers": {"ready": 3, "parked": 0, "starting": 0, "draining": 0}
    }
    assert (await warm(function, json=["anything"])).status_code == 200
    assert (await warm(function, content=b"\xff", headers={"Content-Type": "text/plain"})).status_code == 200
    assert causes(gateway, function) == ["hook rollout", "warmup"]


async def test_a_cloud_event_names_its_type_as_the_cause(gateway: Any, deploy: Any):
    binary = {
        "ce-id": "1",
        "ce-source": "/keda",
        "ce-specversion": "1.0",
        "ce-type": "keda.scaledobject.ready.v1",
    }
    event = {
        "specversion": "1.0",
        "id": "2",
        "source": "/ping",
        "type": "dev.knative.sources.ping",
        "data": {},
    }
    for request in (
        {"headers": binary, "json": {"a": 1}},
        {"headers": {"Content-Type": "application/cloudevents+json"}, "json": event},
    ):
        function = await deploy(ECHO, IDLE)
        assert (await warm(function, params={"wait_s": "60"}, **request)).status_code == 200
        assert causes(gateway, function) in (
            ["hook keda.scaledobject.ready.v1"],
            ["hook dev.knative.sources.ping"],
        )


async def test_what_is_malformed(deploy: Any):
    function = await deploy(ECHO, IDLE)
    malformed: list[dict[str, Any]] = [
        {"params": {"cause": "two words"}},
        {"params": {"cause": "x" * 65}},
        {"json": {"cause": "\n"}},
        {"json": {"workers": "2"}},
        {"json": {"for_s": 0}},
        {"json": {"wait_s": 301}},
        {"params": {"wait_s": "soon"}},
        {"content": b"{", "headers": {"Content-Type": "application/json"}},
    ]
    for request in malformed:
        assert failure(await warm(function, **request))["status"] == 400, request
    assert failure(await warm(function, json={"text": "x" * 70_000}))["status"] == 413
    assert (await function.status())["workers"]["starting"] == 0


async def test_the_error_of_a_start_that_fails_while_a_caller_waits(deploy: Any):
    function = await deploy(FAILS, IDLE, check=False)
    error = failure(await warm(function, params={"wait_s": "60"}))
    assert error["type"] == "handler_setup_failed"
    assert "no licence" in error["message"]
    failing = (await function.status())["failing"]
    assert failing["failures"] == 1
    assert "no licence" in failing["error"]
    (decision,) = (await function.client.get(f"/v1/functions/{function.name}/decisions")).json()["decisions"][
        -1:
    ]
    assert decision["text"].startswith("a worker did not start, handler setup failed: 1 failure in a row")
    # After too many failed starts, a caller gets the error without a wait.
    found = [failure(await function.call(1))["type"] for _ in range(6)]
    assert found[-1] == "crash_loop"
    assert failure(await warm(function, params={"wait_s": "60"}))["type"] == "crash_loop"


async def test_a_caller_who_waits_too_long(deploy: Any, gate: Any):
    source = "import gate\ndef setup(context):\n    gate.wait()\ndef handler(event):\n    return event"
    function = await deploy(source, IDLE, check=False, gate=gate)
    error = failure(await warm(function, params={"wait_s": "1"}))
    assert (error["status"], error["type"]) == (503, "activation_timeout")
    waiting = asyncio.create_task(warm(function, params={"wait_s": "60"}))
    gate.open()
    assert (await waiting).json()["workers"]["ready"] == 1


async def test_those_who_wait_hear_of_a_delete(deploy: Any, client: httpx.AsyncClient, gate: Any):
    source = "import gate\ndef setup(context):\n    gate.wait()\ndef handler(event):\n    return event"
    function = await deploy(source, IDLE, check=False, gate=gate)
    waiting = asyncio.create_task(warm(function, params={"wait_s": "60"}))
    await gate.next()
    deleting = asyncio.create_task(client.delete(f"/v1/functions/{function.name}"))
    assert failure(await waiting)["type"] == "revision_retired"
    gate.open()
    await deleting
