"""RunPod's client for JavaScript, from npm, against a gateway: it runs, waits, streams, cancels and counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import npm
import pytest
from live import Gate, Gateway

pytestmark = pytest.mark.asyncio(loop_scope="module")

CLIENT = "runpod-sdk@1.1.2"
ECHO = "def handler(event):\n    return {'twice': event * 2}\n"
WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event\n"
STREAMS = "def handler(event):\n    for n in range(event):\n        yield {'n': n}\n"
SCRIPT = """
import runpodSdk from "runpod-sdk"
const [baseUrl, name, calls] = [process.argv[2], process.argv[3], JSON.parse(process.argv[4])]
const endpoint = runpodSdk("", {baseUrl}).endpoint(name)
for (const [method, ...args] of calls) {
    const shown = []
    if (method === "stream") for await (const piece of endpoint.stream(...args)) shown.push(piece)
    const answer = method === "stream" ? shown : await endpoint[method](...args)
    process.stdout.write(`answer ${JSON.stringify(answer)}\\n`)
}
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client in a folder of its own. Skips the tests without Node or npm."""
    folder = tmp_path_factory.mktemp("npm")
    npm.install(folder, CLIENT)
    (folder / "call.mjs").write_text(SCRIPT)
    return folder / "call.mjs"


async def said(script: Path, gateway: Gateway, function: str, *calls: list[Any]) -> list[Any]:
    """Return the results of the calls of the client's methods."""
    words = (f"{gateway.url}/v2", function, json.dumps(calls))
    output = await npm.finished("node", str(script), *words, cwd=script.parent)
    # Skip other lines, because the client prints how it waits.
    answers = [line for line in output.splitlines() if line.startswith("answer ")]
    return [json.loads(line.removeprefix("answer ")) for line in answers]


async def test_run_sync_waits_by_status_sync(script: Path, gateway: Gateway, deploy, gate: Gate):
    echo = await deploy(ECHO)
    [done] = await said(script, gateway, echo.name, ["runSync", {"input": 5}, 20000])
    assert (done["output"], done["completed"], done["succeeded"]) == ({"twice": 10}, True, True)
    slow = await deploy(WAITS, gate=gate)
    calling = asyncio.ensure_future(said(script, gateway, slow.name, ["runSync", {"input": 5}, 1000]))
    await gate.next("5")
    [late] = await calling
    assert (late["status"], late["completed"]) == ("IN_PROGRESS", False)


async def test_the_other_calls(script: Path, gateway: Gateway, deploy, gate: Gate):
    function = await deploy(STREAMS)
    job = (await function.client.post(f"/v2/{function.name}/run", json={"input": 3})).json()["id"]
    pieces, done, health = await said(
        script, gateway, function.name, ["stream", job], ["status", job], ["health"]
    )
    assert [piece["output"] for piece in pieces] == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert (done["status"], done["succeeded"], health["jobs"]["completed"]) == ("COMPLETED", True, 1)
    slow = await deploy(WAITS, gate=gate)
    job = (await slow.client.post(f"/v2/{slow.name}/run", json={"input": 1})).json()["id"]
    cancelled, purged = await said(script, gateway, slow.name, ["cancel", job], ["purgeQueue"])
    assert (cancelled["status"], purged["status"]) == ("CANCELLED", "completed")
