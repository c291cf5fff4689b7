"""Alerts of functions: one signed webhook when a condition begins and one when it ends, from any source of calls."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from live import Function, Gateway, gateway_here, gateway_process, short_folder
from pilotflame.runtime.jobs.alerting import conditions
from receiver import Came, Held, Receiver, receiving
from standardwebhooks import Webhook

pytestmark = pytest.mark.asyncio(loop_scope="module")

FAILS = """
def handler(event):
    if event:
        raise ValueError("no")
    return 1
"""
NETWORKS = ("127.0.0.0/8",)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """Yield a gateway whose webhooks may call this machine."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0, webhook_networks=NETWORKS) as found:
            yield found


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let two calls be enough for an alert, without a pause before the next alert."""
    monkeypatch.setattr(conditions, "MIN_CALLS", 2)
    monkeypatch.setattr(conditions, "PAUSE_S", 0.0)


def alerts(receiver: Receiver, **settings: Any) -> dict[str, Any]:
    wanted = {"url": f"{receiver.url}/alerts?token=hidden"} | settings
    return {f"alerts.{key}": value for key, value in wanted.items()}


async def verified(function: Function, came: Came) -> dict[str, Any]:
    """Return the alert. Its signature must be made with the function's secret."""
    response = await function.client.get(f"/v1/functions/{function.name}/webhooks/secret")
    Webhook(response.json()["secret"]).verify(came.body, came.headers)
    return dict(json.loads(came.body))


async def test_too_many_failed_calls_begin_one_alert_and_good_calls_end_it(deploy, receiver: Receiver):
    function = await deploy(FAILS, alerts(receiver, error_share=0.5))
    await function.call(1)
    for _ in range(3):
        # Calls of jobs count as well.
        await function.client.post(f"/v2/{function.name}/runsync", json={"input": 1})
    (came,) = await receiver.received(1)
    begun = await verified(function, came)
    assert begun["type"] == "alert.begun"
    assert begun["data"] == {
        "function": function.name, "revision": (await function.status())["revision"], "condition": "error_share",
        "value": 1.0, "limit": 0.5, "calls": 2, "errors": 2, "window_s": 300.0,
    }  # fmt: skip
    for _ in range(5):
        await function.answer(0)
    _, came = await receiver.received(2)
    ended = await verified(function, came)
    assert (ended["type"], ended["data"]["calls"], ended["data"]["errors"]) == ("alert.ended", 9, 4)
    found = (await function.client.get(f"/v1/functions/{function.name}/webhooks")).json()["deliveries"]
    assert [(one["event"], one["subject"], one["job_id"]) for one in found] == [
        (event, f"alert:{function.name}:error_share", "") for event in ("alert.ended", "alert.begun")
    ]
    again = f"/v1/functions/{function.name}/webhooks/{found[1]['id']}/redeliver"
    assert (await function.client.post(again)).status_code == 200
    *_, came = await receiver.received(3)
    assert (came.event, came.id) == ("alert.begun", found[1]["id"])


async def test_a_pause_keeps_a_condition_that_comes_and_goes_quiet(
    deploy, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conditions, "PAUSE_S", 3600.0)
    function = await deploy(FAILS, alerts(receiver, error_share=1.0))
    await function.call(1)
    await function.call(1)
    await receiver.received(1)
    await function.answer(0)
    other = await deploy(FAILS, alerts(receiver))
    await other.call(1)
    await other.call(1)
    came = await receiver.received(2)
    assert [json.loads(one.body)["data"]["function"] for one in came] == [function.name, other.name]


async def test_errors_of_callers_are_none(deploy, receiver: Receiver):
    function = await deploy("def handler(event: int):\n    return event", alerts(receiver))
    for _ in range(3):
        assert (await function.call("no")).status_code == 422
    other = await deploy(FAILS, alerts(receiver))
    await other.call(1)
    await other.call(1)
    (came,) = await receiver.received(1)
    assert json.loads(came.body)["data"]["function"] == other.name


async def test_calls_that_are_refused_because_no_worker_starts_count(deploy, receiver: Receiver):
    broken = "def setup(context):\n    raise ValueError('no')\ndef handler(event):\n    return 1"
    function = await deploy(broken, alerts(receiver), check=False)
    for _ in range(2):
        assert (await function.call(1)).status_code >= 500
    (came,) = await receiver.received(1)
    assert json.loads(came.body)["data"]["errors"] == 2


async def test_a_slow_cold_start_begins_an_alert(deploy, receiver: Receiver):
    function = await deploy(FAILS, alerts(receiver, cold_start_ms=0.001))
    await function.settled(ready=0)
    response = await function.call(0)
    (came,) = await receiver.received(1)
    alert = await verified(function, came)
    status = await function.status()
    assert alert["data"] == {
        "function": function.name, "revision": status["revision"], "condition": "cold_start", "limit": 0.001,
        "value": pytest.approx(status["last_cold_start_ms"], abs=0.01),
        "request_id": response.headers["X-Request-Id"],
    }  # fmt: skip


async def test_a_deploy_tells_of_a_url_that_may_not_be_called(deploy):
    function = await deploy(FAILS, {"alerts.url": "http://169.254.169.254/latest"})
    assert any("alerts.url" in warning for warning in function.described["warnings"])


async def test_an_alert_survives_the_death_of_the_gateway(receiver: Receiver):
    with short_folder() as folder:
        state = folder / "state"
        async with gateway_process(state, webhook_networks=NETWORKS) as gateway:
            function = await gateway.deploy(FAILS, alerts(receiver, error_share=0.5), name="tone")
            receiver.responses = [Held()]
            for _ in range(20):
                await function.call(1)
            await receiver.received(1)
            assert gateway.process is not None
            gateway.process.kill()
            await gateway.process.wait()
        async with gateway_process(state, webhook_networks=NETWORKS) as gateway:
            function = gateway.function("tone")
            came = await receiver.received(2)
            assert (came[1].id, came[1].event) == (came[0].id, "alert.begun")
            # The alert has begun already, so more failed calls send nothing. Good calls end it.
            for value in (1, 1, 0, 0, 0):
                await function.call(value)
            came = await receiver.received(3)
            assert (await verified(function, came[2]))["type"] == "alert.ended"
