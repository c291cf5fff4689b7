"""A revision answers with the bytes that it was deployed with, or a refusal names the file and what to do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import struct
from pathlib import Path
from typing import Any

import pytest
from live import Function, Gateway, failure, gateway_here, gone
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from simulated_device import ADDED

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
FILES = (FILE, "config.json")


def written(
    folder: Path, first: str = "low", second: str = "high", *, value: float = 1.0, count: int = COUNT
) -> dict[str, Any]:
    """Write two tensors in this order, and a config. Return what the handler answers."""
    folder.mkdir(exist_ok=True)
    values = {first: value, second: value + 1}
    size = 4 * count
    header = {
        name: {"dtype": "F32", "shape": [count], "data_offsets": [at * size, (at + 1) * size]}
        for at, name in enumerate(values)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = b"".join(struct.pack("<f", one) * count for one in values.values())
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
    return FILE in text and re.search("eploy (it )?again", text) is not None


async def test_after_a_replacement_a_restart_refuses(deploy, tmp_path):
    right = written(tmp_path)
    function = await deploy(HANDLER, {"snapshot": str(tmp_path)})
    assert await function.answer() == right
    assert written(tmp_path, "high", "low") != right
    assert refused(await order(function, "restart"))


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


async def test_a_revision_without_a_record_compares_all_bytes(gateway, deploy, tmp_path):
    """A revision of an earlier release has no record, and a record may be damaged."""
    right = written(tmp_path)
    function = await deploy(HANDLER, {"snapshot": str(tmp_path)})
    (record,) = gateway.state.glob(f"functions/{function.name}/*/versions.json")
    record.write_text("[]")
    assert await order(function, "restart") is None
    assert await function.answer() == right
    record.unlink()
    assert await order(function, "restart") is None
    (tmp_path / "other").mkdir()
    written(tmp_path / "other", value=7.0)
    (tmp_path / "other" / FILE).replace(tmp_path / FILE)
    # The worker still has the old file.
    assert await function.answer() == right
    assert refused(await order(function, "restart"))


async def test_an_adapter_is_the_deployed_one_or_refused(deploy, tmp_path):
    for name in ("base", "style"):
        written(tmp_path / name)
    source = """
import torch

def handler(event, context):
    return float(context.adapters.open("style").load("low")["low"][0])
"""
    function = await deploy(
        source, {"snapshot": str(tmp_path / "base"), "adapters.style": str(tmp_path / "style")}
    )
    assert await function.answer() == 1.0
    written(tmp_path / "style", value=5.0)
    error = await function.error()
    assert refused(error)
    assert "adapters.style: " in error["message"]
    assert refused(await function.error())


async def test_a_file_that_is_truncated_during_a_call_is_named(deploy, gate, tmp_path):
    written(tmp_path)
    source = HANDLER.replace("    found =", "    gate.wait('runs')\n    found =").replace(
        "import torch", "import gate, torch"
    )
    function = await deploy(source, {"snapshot": str(tmp_path)}, gate=gate)
    running = asyncio.create_task(function.error())
    arrival = await gate.next("runs")
    os.truncate(tmp_path / FILE, 100)
    arrival.go()
    error = await running
    assert error["type"] == "worker_died"
    assert f"{tmp_path / FILE} was truncated; deploy again" in error["message"]


# -- random histories

ON_DEVICE = (
    ADDED
    + """
import torch

def build(context):
    module = torch.nn.Module()
    for one in context.snapshot.manifest.tensors:
        module.register_buffer(one.name, torch.empty(one.shape, device="meta"))
    context.snapshot.restore(module, device=DEVICE)
    return module

def handler(event, context):
    found = {name: float(tensor.cpu()[-1]) for name, tensor in context.state.named_buffers()}
    return found | {"config": (context.snapshot.path / "config.json").read_text()}
"""
)
CHANGES = ("in place", "rename over", "other size", "link", "truncate", "touch", "put back", "config")
MOVES = ("deploy", "deploy", "restart", "rollback", "worker ends", "zygote dies", "parked", *["call"] * 6)


class History:
    """A function whose weights change, and the right answer of each revision."""

    def __init__(self, root: Path, seed: int) -> None:
        self.root, self.random = root, random.Random(seed)
        self.value, self.steps = 0.0, list[str]()
        self.here: dict[str, Any] | None = written(root)
        self.right = dict[str, tuple[dict[str, Any], dict[str, bytes]]]()
        self.live = ""
        self.answers = self.refusals = 0
        device = self.random.choice(["cpu", "simulated"])
        self.handler = self.random.choice([HANDLER, ON_DEVICE.replace("DEVICE", repr(device))])
        self.settings = {"snapshot": str(root), "scale.park_after_s": 0.0}

    async def deploy(self, gateway: Gateway) -> None:
        response = await gateway.send(self.handler, self.settings, name="history")
        if response.status_code == 201 and self.here is not None:
            self.live = response.json()["revision"]
            self.right[self.live] = self.here, {name: (self.root / name).read_bytes() for name in FILES}
        elif response.status_code == 201:
            # `here` is None while the weights are damaged. Putting the weights back byte for byte sets `here` again.
            raise AssertionError(f"damaged weights were deployed after {self.steps}")

    def change(self, how: str) -> None:
        file = self.root / FILE
        self.value += 2.0
        order = self.random.choice([("low", "high"), ("high", "low")])
        if how == "touch":
            file.touch()
        elif how == "config":
            (self.root / "config.json").write_text(str(self.value))
            if self.here is not None:
                self.here = self.here | {"config": str(self.value)}
        elif how == "truncate":
            os.truncate(file, 4 * self.random.randrange(8))
            self.here = None
        elif how == "put back":
            self.here, files = self.right[self.live]
            for name, content in files.items():
                (self.root / name).write_bytes(content)
        else:
            new = self.root.with_name(f"new{self.value}")
            self.here = written(new, *order, value=self.value, count=COUNT + (how == "other size"))
            if how in {"in place", "other size"}:
                file.write_bytes((new / FILE).read_bytes())
            elif how == "link":
                (new / "link").symlink_to(new / FILE)
                (new / "link").replace(file)
            else:
                (new / FILE).replace(file)
            (new / "config.json").replace(self.root / "config.json")

    async def step(self, gateway: Gateway, what: str) -> None:
        self.steps.append(what)
        function = gateway.function("history")
        if what in CHANGES:
            self.change(what)
        elif what == "deploy":
            await self.deploy(gateway)
        elif what in {"restart", "rollback"}:
            response = await gateway.client.post(f"/v1/functions/history/{what}", json={})
            if response.status_code == 200:
                self.live = response.json()["revision"]
            elif failure(response)["type"] != "unknown_revision":
                self.refuse(failure(response))
        elif what in {"worker ends", "zygote dies"}:
            for pid in await function.pids("worker" if what == "worker ends" else "zygote"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM if what == "worker ends" else signal.SIGKILL)
                await gone(pid)
        elif what == "parked":
            if (await function.status())["workers"]["ready"]:
                await function.settled(parked=1)
        else:
            await self.call(function)

    async def call(self, function: Function) -> None:
        response = await function.call()
        if response.status_code != 200:
            self.refuse(failure(response))
            return
        assert response.json() == self.right[self.live][0], self.steps
        self.answers += 1

    def refuse(self, error: dict[str, Any]) -> None:
        assert refused(error), (error, self.steps)
        self.refusals += 1

    async def play(self, state: Path, count: int, *, restarts: int) -> None:
        for _ in range(1 + restarts):
            async with gateway_here(state) as gateway:
                if not self.live:
                    await self.deploy(gateway)
                for _ in range(count):
                    await self.step(gateway, self.random.choice(self.random.choice([CHANGES, MOVES, MOVES])))
                await self.step(gateway, "call")
                self.steps.append("gateway ends")


async def test_a_random_history_of_a_function_has_only_its_bytes_and_refusals(state, tmp_path):
    history = History(tmp_path / "weights", seed=3)
    await history.play(state, 10, restarts=1)
    assert history.answers
    assert history.refusals


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(12))
async def test_long_random_histories_of_a_function_have_only_its_bytes_and_refusals(state, tmp_path, seed):
    await History(tmp_path / "weights", seed=100 + seed).play(state, 40, restarts=2)
