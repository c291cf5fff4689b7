"""The recorded history of a function over HTTP: decisions with their figures, the load over time, and arrivals."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from live import Gate, Gateway, failure, gateway_here

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait()\n    return event\n"
ONE_AT_A_TIME = {"scale.max": 1}


async def test_a_burst_is_explained_with_its_queue_and_its_cold_starts(
    gateway: Gateway, deploy: Any, gate: Gate
):
    function = await deploy(WAITS, ONE_AT_A_TIME, gate=gate, check=False)
    begun_at = time.time()
    calls = [asyncio.create_task(function.answer(number)) for number in range(5)]
    await gate.next()
    # These calls start no worker, because scale.max is reached. The history must count them all the same.
    calls += [asyncio.create_task(function.answer(number)) for number in range(5, 8)]
    await function.settled(ready=1, queued=7, in_flight=1)
    gate.open()
    await asyncio.gather(*calls)
    path = f"/v1/functions/{function.name}"
    found = (await gateway.client.get(f"{path}/decisions", params={"since": begun_at})).json()["decisions"]
    (start,) = [one for one in found if one["action"] == "start"]
    assert start["cause"] == "load"
    assert start["figures"]["workers"] == 1
    assert start["text"].startswith("started 1 worker: 1 invocation waited, 0 workers ready")
    load = (await gateway.client.get(f"{path}/load", params={"since": begun_at})).json()
    samples = load["samples"]
    assert max(one["queued"] for one in samples) >= 7
    assert max(one["ready"] for one in samples) == 1
    assert 1 <= sum(one["cold"] for one in samples) <= 5
    assert max(one["slowest_cold_s"] for one in samples) > 0
    assert samples[-1]["rung"] == "ready"
    assert samples[-1]["at"] <= load["now"]
    arrivals = (await gateway.client.get(f"{path}/arrivals")).json()
    assert len(arrivals["arrivals"]) == 8
    assert [one["rung"] for one in arrivals["rungs"]] == ["ready", "zygote", "local"]
    assert arrivals["rungs"][0]["held_bytes"] > arrivals["rungs"][2]["held_bytes"]
    assert arrivals["rungs"][0]["wake_s"] == 0 < arrivals["rungs"][1]["wake_s"]
    later = (await gateway.client.get(f"{path}/arrivals", params={"since": time.time() + 1})).json()
    assert later["arrivals"] == []
    assert (await gateway.client.get(f"{path}/decisions?lines=0")).json()["decisions"] == []
    for kind in ("decisions", "load", "arrivals"):
        assert failure(await gateway.client.get(f"{path}/{kind}?since=soon"))["status"] == 400
        assert failure(await gateway.client.get(f"/v1/functions/never/{kind}"))["status"] == 404


async def test_a_key_sees_only_the_history_of_its_functions(state: Path):
    async with gateway_here(state) as gateway:
        for name in ("mine", "other"):
            await gateway.deploy("def handler(event):\n    return event\n", name=name, check=False)
        async with gateway.at_home() as home:
            body = {"name": "dashboard", "scopes": ["read"], "functions": ["mine"]}
            made = (await home.post("/v1/keys", json=body)).json()
            body = {"name": "caller", "scopes": ["invoke"]}
            caller = (await home.post("/v1/keys", json=body)).json()
        for kind in ("decisions", "load", "arrivals"):
            for key, name, status in (
                (made["key"], "mine", 200), (made["key"], "other", 404), (caller["key"], "mine", 403),
            ):  # fmt: skip
                headers = {"Authorization": f"Bearer {key}"}
                response = await gateway.client.get(f"/v1/functions/{name}/{kind}", headers=headers)
                assert response.status_code == status, (kind, name)
