"""Clients whose requests go to three gateways in turn, as through a load balancer. `round_robin.py` runs whole suites of clients like this."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
import replicate
from live import Function, Gate, Gateway, short_folder, until
from postgres import PostgresServer, new_schema
from round_robin import SeveralGateways, gateways_here

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")
# RunPod's client gets at most 1000 pieces with each poll, so it needs several polls, which go to several gateways.
PIECES = "def handler(event):\n    yield from range(event['count'])\n"
SDK = """
import sys
import runpod
runpod.api_key = "none"
job = runpod.Endpoint(sys.argv[1]).run({"input": {"count": 1500}})
print([*job.stream()] == [*range(1500)], job.status())
"""
GREETS = """
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    yield Delta(text="hel", tokens=[1])
    yield Delta(text="lo", tokens=[2], finish_reason="stop", usage={"prompt_tokens": 3, "completion_tokens": 2})
"""
WORDS = """
import gate
from cog import AsyncConcatenateIterator, BasePredictor, Input, Path
class Predictor(BasePredictor):
    async def predict(self, text: str, image: Path = Input(default=None)) -> AsyncConcatenateIterator[str]:
        yield text
        if text == "wait":
            await gate.wait_async(text)
        yield image.read_text() + image.suffix if image else "."
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(postgres: PostgresServer) -> AsyncIterator[SeveralGateways]:
    url = new_schema(postgres.url, f"t{secrets.token_hex(8)}")
    with short_folder() as folder:
        async with gateways_here(folder / "state", 3, database=url, drain_s=1.0) as found:
            yield found


async def predictor(deploy: Any, gate: Gate) -> Function:
    function: Function = await deploy(None, files={"predict.py": WORDS}, gate=gate)
    return function


async def test_runpods_client_gets_each_piece_once(gateway: Gateway, deploy: Any) -> None:
    function = await deploy(PIECES)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SDK, function.name, stdout=asyncio.subprocess.PIPE,
        env={"RUNPOD_ENDPOINT_BASE_URL": f"{gateway.url}/v2", "HOME": "/nonexistent"},
    )  # fmt: skip
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    assert out.decode().split() == ["True", "COMPLETED"]


async def test_openais_client_streams(gateway: Gateway, deploy: Any) -> None:
    function = await deploy(GREETS)
    asked = {"model": function.name, "messages": [{"role": "user", "content": "Hi"}]}
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        for _ in range(3):
            stream = await client.chat.completions.create(stream=True, **asked)
            assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"


async def test_replicates_client_uses_a_file_at_any_gateway(
    gateway: SeveralGateways, deploy: Any, gate: Gate, tmp_path: Any
) -> None:
    function, path = await predictor(deploy, gate), tmp_path / "note.txt"
    path.write_text("from a file")
    client = replicate.Client(api_token="any", base_url=f"{gateway.url}/replicate")
    with contextlib.closing(client._client):
        file = await asyncio.to_thread(client.files.create, path)
        for _ in range(3):
            given = {"text": "a", "image": file.urls["get"]}
            output = await asyncio.to_thread(client.run, f"me/{function.name}", given)
            assert "".join(output) == "afrom a file.txt"
            assert (await asyncio.to_thread(client.files.get, file.id)).checksums == file.checksums
            assert [one.id for one in await asyncio.to_thread(client.files.list)] == [file.id]
        assert await asyncio.to_thread(client.files.delete, file.id)
    for one in gateway.gateways:
        path = f"/replicate/v1/files/{file.id}"
        assert (await one.client.get(path)).status_code == 404
        assert (await one.client.get(f"{path}/download")).status_code == 404
        assert (await one.client.get("/replicate/v1/files")).json()["results"] == []


async def test_another_gateway_waits_for_a_prediction_streams_it_and_cancels_it(
    gateway: SeveralGateways, deploy: Any, gate: Gate
) -> None:
    function = await predictor(deploy, gate)
    put = {"json": {"version": function.name, "input": {"text": "wait"}}, "timeout": 30}
    waiting = [
        asyncio.create_task(one.client.put("/cog/predictions/mine", **put)) for one in gateway.gateways
    ]
    arrival = await gate.next("wait")
    made = (await gateway.client.get("/replicate/v1/predictions/mine")).json()

    async def streamed(one: Gateway) -> str:
        path = made["urls"]["stream"].removeprefix(gateway.url)
        async with asyncio.timeout(30):
            return (await one.client.get(path)).text

    streams = [asyncio.create_task(streamed(one)) for one in gateway.gateways]
    arrival.go()
    assert [(await one).json()["output"] for one in waiting] == [["wait", "."]] * 3
    for stream in streams:
        told = await stream
        assert [line for line in told.splitlines() if line.startswith("data")] == [
            "data: wait", "data: .", "data: {}"
        ]  # fmt: skip
    assert len(gate.arrived) == 1
    for one in gateway.gateways:
        made = (await gateway.client.post("/replicate/v1/predictions", **put)).json()
        arrival = await gate.next("wait")
        found = await one.client.post(f"/replicate/v1/predictions/{made['id']}/cancel")
        assert found.json()["status"] == "canceled"
        await arrival.left()


async def test_equal_idempotency_keys_are_one_job(gateway: Gateway, deploy: Any) -> None:
    function = await deploy("def handler(event):\n    return event\n")
    headers = {"Idempotency-Key": "once"}

    async def run(path: str) -> str:
        answer = await gateway.client.post(f"/v2/{function.name}/{path}", json={"input": 1}, headers=headers)
        return str(answer.json()["id"])

    jobs = await asyncio.gather(*(run(path) for path in ("run", "runsync") * 15))
    assert len(set(jobs)) == 1
    found = await gateway.client.get(f"/v2/{function.name}/requests")
    assert len(found.json()["requests"]) == 1
    other = await gateway.client.post(f"/v2/{function.name}/run", json={"input": 2}, headers=headers)
    assert other.status_code == 409


async def test_jobs_of_openais_api_are_polled_at_any_gateway(gateway: SeveralGateways, deploy: Any) -> None:
    function = await deploy(GREETS)
    asked = {"openai_route": "/v1/chat/completions", "openai_input": {"messages": [{"role": "user", "content": "Hi"}], "stream": True}}  # fmt: skip
    job = (await gateway.client.post(f"/v2/{function.name}/run", json={"input": asked})).json()["id"]
    pieces, empty = list[str](), 0
    while empty < 1:
        found = (await gateway.client.get(f"/v2/{function.name}/stream/{job}")).json()
        pieces += [one["output"] for one in found["stream"]]
        empty += found["status"] == "COMPLETED" and not found["stream"]
    events = [line.removeprefix("data: ") for line in "".join(pieces).splitlines() if line]
    assert events.pop() == "[DONE]"
    texts = [json.loads(one)["choices"][0]["delta"].get("content") or "" for one in events]
    assert "".join(texts) == "hello"
    # The next poll begins with the first piece again, at any gateway.
    again = (await gateway.client.get(f"/v2/{function.name}/stream/{job}")).json()["stream"]
    assert [one["output"] for one in again] == pieces


async def test_keys_and_secrets_reach_all_gateways(gateway: SeveralGateways, deploy: Any) -> None:
    source = "import os\ndef handler(event):\n    return os.environ.get('TOKEN', '')\n"
    function = await deploy(source)
    path = f"/v1/functions/{function.name}/secrets/TOKEN"
    assert (await gateway.client.put(path, json={"value": "shared"})).json()["deployed"]

    async def renewed() -> bool:
        functions = [one.function(function.name) for one in gateway.gateways]
        return {await one.answer(1) for one in functions} == {"shared"}

    await until(renewed, "workers with the secret at all gateways")
