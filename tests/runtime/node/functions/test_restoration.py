"""Functions are restored after a restart of the gateway."""

from __future__ import annotations

import asyncio
import json
import shutil
import time

import pytest
from live import Gate, failure, gateway_here

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_restart_brings_functions_back_at_zero(state):
    async with gateway_here(state) as gateway:
        for name in ("one", "two"):
            function = await gateway.deploy(f"def handler(event):\n    return '{name}'", name=name)
            assert await function.answer() == name
        await gateway.send("def handler(event):\n    return 'two again'", {"scale.max": 2}, name="two")
    async with gateway_here(state) as gateway:
        listed = (await gateway.client.get("/v1/functions")).json()["functions"]
        assert [one["name"] for one in listed] == ["one", "two"]
        assert [one["workers"] for one in listed] == [
            {"ready": 0, "parked": 0, "starting": 0, "draining": 0}
        ] * 2
        two = gateway.function("two")
        assert (await two.status())["settings"]["scale"]["max"] == 2
        response = await two.call()
        assert (response.json(), response.headers["x-cold-start"]) == ("two again", "true")
        # The imports of `one` take no time, so it has no processes until its first use.
        await gateway.function("one").settled(standby=False, zygote=False)
        assert await gateway.function("one").answer() == "one"
        await gateway.function("one").settled(ready=1, standby=True, zygote=True)
        await gateway.client.delete("/v1/functions/one")
    async with gateway_here(state) as gateway:
        listed = (await gateway.client.get("/v1/functions")).json()["functions"]
        assert [one["name"] for one in listed] == ["two"]


async def test_after_a_start_zygotes_warm_one_after_the_other_by_expected_need(state, gate: Gate):
    source = "import gate, time\ntime.sleep(0.3)\ngate.wait({!r})\ndef handler(event):\n    return event"
    idle_s = {"hourly": 600.0, "busy": 1.0, "never": None, "daily": 6000.0, "often": 60.0}
    async with gateway_here(state) as gateway:
        for name in idle_s:
            deploying = asyncio.create_task(gateway.deploy(source.format(name), name=name, gate=gate))
            (await gate.next(name)).go()
            await deploying
    for name, seconds in idle_s.items():
        file = state / "habits" / "functions" / f"{name}.json"
        idles = {"idles": [seconds] * 20 if seconds else []}
        idling = {"idling": {"since_at": time.time() - (seconds or 24 * 3600), "since_wake_s": 0.0}}
        file.write_text(json.dumps(json.loads(file.read_text()) | idles | idling))
    async with gateway_here(state) as gateway:
        for name in ("busy", "often", "hourly"):
            arrival = await gate.next()
            assert arrival.word == name
            # The other functions wait until this start ends. Otherwise they would arrive within 0.3 s.
            await asyncio.sleep(0.4)
            assert gate.arrived[-1] is arrival
            arrival.go()
        # A caller does not wait for the turn of the function.
        call = asyncio.create_task(gateway.function("never").answer(1))
        first, second = await gate.next(), await gate.next()
        assert {first.word, second.word} == {"daily", "never"}
        for arrival in (first, second):
            arrival.go()
        assert await call == 1


DAMAGE = {
    "a torn record": lambda folder, live: (folder / live / "revision.json").write_text('{"code_dig'),
    "no record": lambda folder, live: (folder / live / "revision.json").unlink(),
    "no code": lambda folder, live: shutil.rmtree(folder / live / "code"),
    "an empty code": lambda folder, live: [path.unlink() for path in (folder / live / "code").glob("*.py")],
    "no folder": lambda folder, live: shutil.rmtree(folder / live),
    "bytes in current": lambda folder, _live: (folder / "current").write_bytes(b"\0\xff"),
    "an empty current": lambda folder, _live: (folder / "current").write_bytes(b""),
    "no current": lambda folder, _live: (folder / "current").unlink(),
}


@pytest.mark.parametrize("harm", DAMAGE)
async def test_a_function_whose_files_are_damaged_is_barred_and_can_be_rolled_back(state, harm: str):
    async with gateway_here(state) as gateway:
        await gateway.deploy("def handler(event):\n    return 1", name="torn")
        await gateway.deploy("def handler(event):\n    return 2", name="torn")
        await gateway.deploy("def handler(event):\n    return 'whole'", name="whole")
    folder = state / "functions" / "torn"
    DAMAGE[harm](folder, (folder / "current").read_text().strip())
    async with gateway_here(state) as gateway:
        torn = gateway.function("torn")
        error = failure(await torn.call())
        assert (error["status"], error["type"]) == (503, "function_barred")
        assert "pilotflame" not in error["message"].lower()
        assert str(state) not in error["message"]
        assert await gateway.function("whole").answer() == "whole"
        listed = (await gateway.client.get("/v1/functions")).json()["functions"]
        assert [(one["name"], bool(one["stopped"])) for one in listed] == [("torn", True), ("whole", False)]
        metrics = (await gateway.client.get("/metrics")).text
        assert 'pilotflame_function_stopped{function="torn",reason="barred"} 1' in metrics
        restarted = failure(await gateway.client.post("/v1/functions/torn/restart"))
        assert (restarted["type"], restarted["status"]) == ("function_barred", 503)
        assert (await gateway.client.post("/v1/functions/torn/rollback", json={})).status_code == 200
        assert await torn.answer() in (1, 2)
    async with gateway_here(state) as gateway:
        assert await gateway.function("torn").answer() in (1, 2)
