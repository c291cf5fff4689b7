"""Loads with a configuration, by Triton's clients: what they change, and what they may not."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio as grpc_aio
import tritonclient.http.aio as http_aio
from live import Gate, short_folder, until
from oip_server import PASSING, Server
from tritonclient.utils import InferenceServerException

pytestmark = pytest.mark.asyncio(loop_scope="package")
MANY = 1000
"""The rows of a call at /invoke: more than all other calls have together."""
CLIENTS = [(http_aio, "http"), (grpc_aio, "grpc")]
# Answers each event with the number of rows and the number of events in its batch.
COUNTING = """
from typing import Annotated
import gate
import numpy
import pilotflame
from pydantic import BaseModel

class X(BaseModel):
    x: Annotated[numpy.ndarray, pilotflame.Tensor("INT64", [-1, 2])]

@pilotflame.batch(max_size=8)
def handler(events: list[X]) -> list[X]:
    gate.wait("begun")
    found = [sum(len(one.x) for one in events), len(events)]
    return [X(x=numpy.array([found])) for _ in events]
"""


def rows(module: Any, count: int) -> list[Any]:
    found = module.InferInput("x", [count, 2], "INT64")
    found.set_data_from_numpy(np.zeros((count, 2), np.int64))
    return [found]


async def config_of(client: Any, name: str) -> dict[str, Any]:
    found = await client.get_model_config(name)
    if isinstance(found, dict):
        return found
    one = found.config
    return {"max_batch_size": one.max_batch_size, "input": [{"dims": list(one.input[0].dims)}]}


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
async def test_a_load_replaces_max_batch_size_until_the_next_load(
    server: Server, module: Any, protocol: str
) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        await server.gateway.deploy(COUNTING.replace("    gate.wait", "    0 and gate.wait"), name="counting")
        assert (await config_of(client, "counting"))["max_batch_size"] == 0
        await client.load_model("counting", config='{"max_batch_size": "3", "backend": "pilotflame"}')
        config = await config_of(client, "counting")
        assert (config["max_batch_size"], config["input"][0]["dims"]) == (3, [2])
        assert (await client.infer("counting", rows(module, 3))).as_numpy("x").tolist() == [[3, 1]]
        with pytest.raises(InferenceServerException, match="batch-size must be <= 3; it is 4"):
            await client.infer("counting", rows(module, 4))
        await client.load_model("counting")
        config = await config_of(client, "counting")
        assert (config["max_batch_size"], config["input"][0]["dims"]) == (0, [-1, 2])
        assert (await client.infer("counting", rows(module, 4))).as_numpy("x").tolist() == [[4, 1]]
        await client.load_model("counting", config='{"max_batch_size": 3}')
        await server.gateway.deploy(COUNTING.replace("    gate.wait", "    1 and gate.wait"), name="counting")
        assert (await config_of(client, "counting"))["max_batch_size"] == 0


@pytest.mark.parametrize(("module", "protocol"), CLIENTS)
@pytest.mark.parametrize(
    ("config", "files", "named"),
    [
        ('"parameters": {"config": {{"max_batch_size": "16"}}}', None, "config is no JSON"),
        ("[]", None, "config is no JSON object"),
        ('{"max_batch_size": "many"}', None, "max_batch_size is 'many'"),
        ('{"max_batch_size": -1}', None, "max_batch_size is -1"),
        ('{"max_batch_size": 4, "instance_group": [{"count": 2}]}', None, "instance_group cannot be changed"),
        ('{"platform": "onnxruntime_onnx"}', None, "platform cannot be changed"),
        ("{}", {"file:1/model.onnx": b"a"}, "'file:1/model.onnx' is not supported"),
    ],
    ids=["no JSON", "list", "text", "negative", "instances", "platform", "file"],
)
async def test_other_changes_are_refused_by_name(
    server: Server, module: Any, protocol: str, config: str, files: Any, named: str
) -> None:
    async with module.InferenceServerClient(getattr(server, protocol)) as client:
        with pytest.raises(InferenceServerException) as found:
            await client.load_model("simple", config=config, files=files)
        assert named in found.value.message()
        assert "failed to load 'simple', failed to poll from model repository" in found.value.message()
        assert found.value.status() == ("StatusCode.INTERNAL" if protocol == "grpc" else "400")
        assert (await config_of(client, "simple"))["max_batch_size"] == 0


async def test_a_model_without_an_axis_for_rows_has_no_max_batch_size(server: Server) -> None:
    await server.gateway.deploy(PASSING.replace("[-1]", "[4]"), name="fixed")
    async with http_aio.InferenceServerClient(server.http) as client:
        with pytest.raises(InferenceServerException, match=r"x has the shape \[4\]"):
            await client.load_model("fixed", config='{"max_batch_size": 4}')


@pytest.mark.parametrize("most", [1, 3])
async def test_batches_keep_max_batch_size(server: Server, most: int) -> None:
    with short_folder() as folder:
        async with Gate(folder / "gate") as gate, http_aio.InferenceServerClient(server.http) as client:
            settings = {"scale.max": 1}
            function = await server.gateway.deploy(COUNTING, settings, name="waiting-rows", gate=gate)
            await client.load_model("waiting_rows", config=f'{{"max_batch_size": {most}}}')
            assert server.gateway.server is not None
            queue = server.gateway.server.functions.live("waiting-rows").dispatcher.queue

            async def queued(count: int) -> bool:
                return len(queue) == count

            first = asyncio.ensure_future(client.infer("waiting_rows", rows(http_aio, 1)))
            await gate.next("begun")
            calls = [client.infer("waiting_rows", rows(http_aio, 1 + n % min(most, 2))) for n in range(6)]
            running = asyncio.gather(*calls)
            await until(lambda: queued(6), "all calls by the protocol wait")
            others = asyncio.gather(*(function.call({"x": [[0, 0]] * MANY}) for _ in range(6)))
            await until(lambda: queued(12), "all calls wait")
            gate.open()
            await first
            found = [tuple(answer.as_numpy("x")[0]) for answer in await running]
            # Leave out batches with calls at /invoke: the gateway limits the number of their calls, but does not count their rows.
            assert max(count for count, _ in found if count < MANY) <= most
            sizes = [answer.json()["x"][0][1] for answer in await others]
            assert max(*sizes, *(size for _, size in found)) == most
