"""The routes of webhooks over real HTTP: listing deliveries, sending one again, and the signing secret."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from live import Function, Gateway, failure, gateway_here, short_folder, until
from pilotflame.runtime.front.api.webhooks import public_url
from receiver import Receiver, receiving
from standardwebhooks import Webhook, WebhookVerificationError

pytestmark = pytest.mark.asyncio(loop_scope="module")

ECHO = "def handler(event):\n    return event\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """Yield a gateway whose webhooks may call this machine."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0, webhook_networks=("127.0.0.0/8",)) as found:
            yield found


@pytest_asyncio.fixture(loop_scope="module")
async def receiver() -> AsyncIterator[Receiver]:
    async with receiving() as found:
        yield found


async def run(function: Function, receiver: Receiver, *events: str) -> str:
    """Submit a job whose webhooks go to the receiver; return its id."""
    order = {
        "input": 1,
        "webhook": f"{receiver.url}/done?token=hidden",
        "webhook_events": events or ["completed"],
    }
    response = await function.client.post(f"/v2/{function.name}/run", json=order)
    assert response.status_code == 200, response.text
    return str(response.json()["id"])


async def deliveries(function: Function, **query: Any) -> list[dict[str, Any]]:
    response = await function.client.get(f"/v1/functions/{function.name}/webhooks", params=query)
    assert response.status_code == 200, response.text
    return list(response.json()["deliveries"])


async def settled(function: Function, count: int, state: str) -> list[dict[str, Any]]:
    """Wait until this number of deliveries is in this state, and return them."""
    found: list[dict[str, Any]] = []

    async def so() -> bool:
        found[:] = await deliveries(function, state=state)
        return len(found) == count

    await until(so, f"{count} {state}")
    return found


async def test_a_delivery_shows_its_attempts(deploy, receiver: Receiver):
    function = await deploy(ECHO)
    assert await deliveries(function) == []
    receiver.responses = [500]
    job = await run(function, receiver)
    (came,) = await receiver.received(1)

    async def so() -> bool:
        return bool((await deliveries(function))[0]["attempts"])

    await until(so, "the attempt, written down")
    (found,) = await deliveries(function)
    assert found["next_at"] >= found["created_at"] > "2026"
    assert (found["id"], found["job_id"], found["event"]) == (came.id, job, "completed")
    assert (found["state"], found["attempts"], found["last_status"]) == ("PENDING", 1, 500)
    assert found["url"] == f"{receiver.url}/done"
    assert [(tried["status"], tried["error"]) for tried in found["log"]] == [(500, found["last_error"])]


async def test_a_delivery_is_sent_again_with_the_same_id(deploy, receiver: Receiver):
    function = await deploy(ECHO)
    await run(function, receiver)
    (found,) = await settled(function, 1, "DELIVERED")
    assert (found["next_at"], found["last_status"]) == (None, 204)
    path = f"/v1/functions/{function.name}/webhooks/{found['id']}/redeliver"
    told = (await function.client.post(path)).json()
    assert (told["id"], told["state"], told["attempts"]) == (found["id"], "PENDING", 0)
    assert [came.id for came in await receiver.received(2)] == [found["id"]] * 2
    await settled(function, 1, "DELIVERED")
    assert len((await deliveries(function))[0]["log"]) == 2


async def test_each_function_has_its_own_signing_secret(deploy, gateway: Gateway, receiver: Receiver):
    function, other = await deploy(ECHO), await deploy(ECHO)
    await run(function, receiver)
    (came,) = await receiver.received(1)
    secrets = []
    for name in (function.name, other.name):
        response = await gateway.client.get(f"/v1/functions/{name}/webhooks/secret")
        assert (response.status_code, response.headers["Cache-Control"]) == (200, "no-store")
        assert response.json()["function"] == name
        secrets.append(response.json()["secret"])
    mine, others = map(Webhook, secrets)
    mine.verify(came.body, came.headers)
    with pytest.raises(WebhookVerificationError):
        others.verify(came.body, came.headers)
    unknown = await gateway.client.get("/v1/functions/nobody/webhooks/secret")
    assert failure(unknown)["type"] == "unknown_function"


async def test_deliveries_are_filtered(deploy, receiver: Receiver):
    function = await deploy(ECHO)
    first = await run(function, receiver, "start", "completed")
    await settled(function, 2, "DELIVERED")
    second = await run(function, receiver)
    await settled(function, 3, "DELIVERED")
    assert [row["job_id"] for row in await deliveries(function)] == [second, first, first]
    assert [row["event"] for row in await deliveries(function, job=first)] == ["completed", "start"]
    assert [row["job_id"] for row in await deliveries(function, limit=1)] == [second]
    assert await deliveries(function, state=["dead", "pending"]) == []
    assert await deliveries(function, job="job-x") == []


async def test_unknown_and_invalid_requests_are_refused(deploy, gateway: Gateway, receiver: Receiver):
    function, other = await deploy(ECHO), await deploy(ECHO)
    await run(function, receiver)
    (found,) = await settled(function, 1, "DELIVERED")
    for path, kind in (
        ("nobody/webhooks", "unknown_function"),
        (f"{function.name}/webhooks?state=lost", "bad_json"),
        (f"{function.name}/webhooks?limit=0", "bad_json"),
        (f"{function.name}/webhooks?limit=many", "bad_json"),
    ):
        assert failure(await gateway.client.get(f"/v1/functions/{path}"))["type"] == kind
    for name in (other.name, "nobody"):
        path = f"/v1/functions/{name}/webhooks/{found['id']}/redeliver"
        assert failure(await gateway.client.post(path))["type"] == "unknown_delivery"
    await gateway.client.delete(f"/v1/functions/{function.name}")
    assert [row["id"] for row in await deliveries(function)] == [found["id"]]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://a.example/hook", "https://a.example/hook"),
        ("https://me:secret@a.example:8443/hook?key=secret#secret", "https://a.example:8443/hook"),
        ("http://[::1]:80/?x=1", "http://[::1]:80/"),
    ],
)
async def test_a_url_is_shown_without_its_secrets(url: str, shown: str):
    assert public_url(url) == shown


async def test_jobs_webhooks_and_keys_are_in_the_metrics(deploy, gateway: Gateway, receiver: Receiver):
    function = await deploy(ECHO, {"attempts": 1})
    receiver.responses = [500, 200]
    await run(function, receiver)
    await receiver.received(1)

    def of(text: str) -> dict[str, float]:
        lines = [line for line in text.splitlines() if f'function="{function.name}"' in line]
        pairs = [line.replace(f'function="{function.name}"', "").rsplit(" ", 1) for line in lines]
        return {name.replace("{,", "{").replace("{}", ""): float(number) for name, number in pairs}

    async def counted() -> bool:
        found = of((await gateway.client.get("/metrics")).text)
        return found['pilotflame_webhook_attempts_total{outcome="failed"}'] == 1

    async def first_attempt() -> bool:
        return "webhook_attempts_total{" in (await gateway.client.get("/metrics")).text and await counted()

    await until(first_attempt, "the failed attempt in the metrics")
    text = (await gateway.client.get("/metrics")).text
    found = of(text)
    assert found['pilotflame_jobs_ended_total{state="completed"}'] == 1
    assert found['pilotflame_jobs{state="in_queue"}'] == found["pilotflame_job_queue_bytes"] == 0
    assert found["pilotflame_webhooks_pending"] == 1
    assert found["pilotflame_job_retries_total"] == 0
    assert 'pilotflame_keys{state="valid"} 0.0' in text
    assert "pilotflame_key_requests_running 0.0" in text
    await gateway.client.delete(f"/v1/functions/{function.name}")
    sent = next(one for one in await gateway.server.jobs.readings() if one.name == "webhook_attempts")
    assert not any(name == function.name for name, _ in sent.values)
