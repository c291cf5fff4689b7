"""A revision answers with the bytes that it was deployed with, or a refusal names the file and what to do."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
from live import Function, failure, gateway_here
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME

pytestmark = pytest.mark.asyncio(loop_scope="module")

HANDLER = """
import torch

def setup(context):
    return context.snapshot.load("*")

def handler(event, context):
    found = {name: float(tensor[-1]) for name, tensor in context.state.items()}
    return found | {"config": (context.snapshot.path / "config.json").read_text()}
"""
FILE, COUNT = "model.safetensors", 2048


def written(folder: Path, first: str = "low", second: str = "high", *, value: float = 1.0) -> dict[str, Any]:
    """Write two tensors in this order, and a config. Return what the handler answers."""
    folder.mkdir(exist_ok=True)
    values = {first: value, second: value + 1}
    size = 4 * COUNT
    header = {
        name: {"dtype": "F32", "shape": [COUNT], "data_offsets": [at * size, (at + 1) * size]}
        for at, name in enumerate(values)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(struct.pack("<f", one) * COUNT for one in values.values())
    (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data)
    config = json.dumps({"value": value})
    (folder / "config.json").write_text(config)
    return values | {"config": config}


async def outcome(function: Function) -> Any:
    response = await function.call()
    return response.json() if response.status_code == 200 else failure(response)


async def order(function: Function, verb: str, **body: Any) -> Any:
    response = await function.client.post(f"/v1/functions/{function.name}/{verb}", json=body)
    return None if response.status_code == 200 else failure(response)


def refused(error: dict[str, Any] | None) -> bool:
    """Return True if an error names the file, and says what to do."""
    text = json.dumps(error)
    return error is not None and (FILE in text or "config.json" in text) and "eploy again" in text


async def test_after_a_replacement_a_restart_answers_with_the_deployed_bytes_or_refuses(state, tmp_path):
    right = written(tmp_path)
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(HANDLER, {"snapshot": str(tmp_path)})
        assert await function.answer() == right
        other = written(tmp_path, "high", "low")
        assert other != right
        assert refused(await order(function, "restart"))
    async with gateway_here(state) as gateway:
        assert refused(await outcome(gateway.function(function.name)))


async def test_a_rollback_does_not_answer_with_newer_weights(gateway, deploy, tmp_path):
    older = written(tmp_path)
    function = await deploy(HANDLER, {"snapshot": str(tmp_path)})
    newer = written(tmp_path, value=5.0)
    await gateway.deploy(HANDLER, {"snapshot": str(tmp_path)}, name=function.name)
    assert await function.answer() == newer
    assert refused(await order(function, "rollback"))
    # The newer revision is still live.
    assert await function.answer() == newer
    written(tmp_path)
    assert await order(function, "rollback") is None
    assert await function.answer() == older


async def test_a_deploy_refuses_weights_that_their_manifest_does_not_describe(gateway, tmp_path):
    written(tmp_path)
    create(tmp_path).write(tmp_path / MANIFEST_NAME)
    written(tmp_path, value=5.0)
    error = failure(await gateway.send(HANDLER, {"snapshot": str(tmp_path)}))
    assert error["type"] == "snapshot_corrupt"
    assert FILE in error["message"]
    assert "pilotflame snapshot create" in error["remedy"]


@pytest.mark.parametrize("change", ["in place", "truncated"])
async def test_a_ready_worker_refuses_weights_that_were_written_to(deploy, tmp_path, change):
    right = written(tmp_path)
    function = await deploy(HANDLER, {"snapshot": str(tmp_path)})
    if change == "truncated":
        os.truncate(tmp_path / FILE, 100)
    else:
        written(tmp_path, value=5.0)
    assert refused(await outcome(function))
    # The next worker refuses them when it starts.
    assert refused(await outcome(function))
    written(tmp_path)
    assert await function.answer() == right
