"""Functions are deployed and replaced under load."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from live import Function, Gate, failure, gateway_here, gone, until
from pilotflame.errors import Forbidden
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.node.functions.deploy import Deployment
from pilotflame.runtime.node.packaging.code import pack

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAITS = "import gate\ndef handler(event):\n    gate.wait(str(event))\n    return event"


@contextlib.asynccontextmanager
async def called(function: Function) -> AsyncIterator[list[Any]]:
    """Within the block, eight callers invoke a function again and again. Yield the list of their answers."""
    answers: list[Any] = []
    enough = asyncio.Event()

    async def caller() -> None:
        while not enough.is_set():
            answers.append(await function.answer())

    async with asyncio.TaskGroup() as callers:
        for _ in range(8):
            callers.create_task(caller())
        yield answers
        enough.set()


async def test_a_redeploy_under_load_fails_no_request(gateway, deploy):
    def version(number: int) -> str:
        return f"def handler(event):\n    return {number}"

    function = await deploy(version(0), name="busy")
    async with called(function) as answers:
        for number in (1, 2, 3):
            assert (await gateway.send(version(number), name="busy")).status_code == 201
            assert await function.answer() == number
    assert set(answers) <= {0, 1, 2, 3}
    assert (await function.status())["revision"].startswith("r4-")


async def test_a_deploy_tells_which_options_of_the_previous_deploy_are_gone(gateway):
    echo = "def handler(event):\n    return event"
    await gateway.deploy(echo, {"scale.max": 2, "timeout_s": 5}, name="optional")
    sent = (await gateway.send(echo, {"timeout_s": 6}, name="optional")).json()
    (told,) = [text for text in sent["warnings"] if "previous deploy" in text]
    assert told.startswith("scale.max: set as an option of the previous deploy")
    again = (await gateway.send(echo, {"timeout_s": 7}, name="optional")).json()
    assert not any("previous deploy" in text for text in again["warnings"])


async def test_invocations_on_an_old_revision_finish_there(gateway, deploy, gate: Gate):
    function = await deploy(WAITS, {"scale.max": 1}, name="old", gate=gate)
    running = asyncio.create_task(function.answer("runs"))
    worker = (await gate.next("runs")).pid
    waiting = asyncio.create_task(function.answer("waits"))
    await function.settled(ready=1, queued=1)
    await deploy("def handler(event):\n    return 'new'", name="old")
    assert await function.answer(1) == "new"
    gate.open()
    assert await asyncio.gather(running, waiting) == ["runs", "waits"]
    await gone(worker)


SECRET = "import os\nPIDS = []\ndef handler(event):\n    return [os.getpid(), os.environ.get('TOKEN')]"


async def test_a_restart_under_load_fails_no_request_and_brings_the_new_secret(gateway, deploy):
    function = await deploy(SECRET, {"scale.max": 2}, name="renewed")
    path = f"/v1/functions/{function.name}"
    before = (await function.status())["revision"]
    # Make a worker ready first, because a restart starts as many workers as are ready.
    await function.answer()
    async with called(function) as answers:
        for number in range(3):
            await gateway.client.put(f"{path}/secrets/TOKEN", json={"value": f"{number}"})
            response = await gateway.client.post(f"{path}/restart")
            assert response.status_code == 200, response.text
            # The new workers are ready when the restart returns: the next call is not a cold start.
            call = await function.call()
            assert (call.json()[1], call.headers["x-cold-start"]) == (f"{number}", "false")
    assert {token for _, token in answers} >= {"0", "1"}
    assert len({pid for pid, _ in answers}) >= 3
    assert (await function.status())["revision"] == before
    for pid in {pid for pid, token in answers if token == "0"}:
        await gone(pid)


async def test_a_restart_that_fails_leaves_the_old_workers(gateway, deploy):
    source = "import os\ndef setup(context):\n    assert os.environ['TOKEN'] == 'good'\ndef handler(event):\n    return os.getpid()"
    await gateway.client.put("/v1/functions/picky/secrets/TOKEN", json={"value": "good"})
    function = await deploy(source, name="picky")
    pid = await function.answer()
    await gateway.client.put("/v1/functions/picky/secrets/TOKEN", json={"value": "bad"})
    assert failure(await gateway.client.post("/v1/functions/picky/restart"))["type"] == "handler_setup_failed"
    assert await function.answer() == pid
    assert failure(await gateway.client.post("/v1/functions/nobody/restart"))["status"] == 404


async def test_a_restart_needs_only_one_worker_that_is_ready_in_time(deploy, gate: Gate, tmp_path):
    source = (
        "import gate, os, time\ndef setup(context):\n    for place in range(4):\n        try:\n"
        "            open(f\"{os.environ['PLACES']}/{place}\", 'x').close()\n"
        "            return time.sleep(4 if place == 3 else 0)\n"
        "        except FileExistsError:\n            pass\n"
        "def handler(event):\n    gate.wait(event)\n    return os.getpid()"
    )
    limited = {"env.PLACES": str(tmp_path), "scale.max": 2, "start_timeout_s": 1.0}
    function = await deploy(source, limited, name="late", gate=gate)
    for path in tmp_path.iterdir():
        path.unlink()
    calls = [asyncio.create_task(function.answer(f"{number}")) for number in range(2)]
    for _ in calls:
        await gate.next()
    response = await function.client.post("/v1/functions/late/restart")
    assert response.status_code == 200, response.text
    gate.open()
    old = set(await asyncio.gather(*calls))
    assert await function.answer("new") not in old


async def test_a_restart_under_load_has_as_many_workers_as_before_or_as_can_start(
    deploy, gate: Gate, tmp_path
):
    source = (
        "import gate, os\ndef setup(context):\n    for place in range(3):\n        try:\n"
        "            return open(f\"{os.environ['PLACES']}/{place}\", 'x').close()\n"
        "        except FileExistsError:\n            pass\n    raise MemoryError('no place')\n"
        "def handler(event):\n    gate.wait(event)\n    return os.getpid()"
    )
    function = await deploy(source, {"env.PLACES": str(tmp_path), "scale.max": 2}, name="scarce", gate=gate)
    for path in tmp_path.iterdir():
        path.unlink()
    calls = [asyncio.create_task(function.answer(f"{number}")) for number in range(2)]
    await gate.next()
    await gate.next()
    assert len(list(tmp_path.iterdir())) == 2
    # Only one more worker can start. This is enough: the restart needs only one worker that gets ready.
    response = await function.client.post("/v1/functions/scarce/restart")
    assert response.status_code == 200, response.text
    assert len(list(tmp_path.iterdir())) == 3
    gate.open()
    old = set(await asyncio.gather(*calls))
    assert await function.answer("new") not in old
    for path in tmp_path.iterdir():
        path.unlink()
    await function.settled(ready=1)
    assert (await function.client.post("/v1/functions/scarce/restart")).status_code == 200


async def test_uploads_with_the_same_weights_share_them(gateway, deploy, tmp_path):
    (tmp_path / "model.bin").write_bytes(b"w" * (2 << 20))
    (tmp_path / "pilotflame.toml").write_text('name = "heavy"\n')
    for number in (1, 2):
        (tmp_path / "handler.py").write_text(f"def handler(event):\n    return {number}")
        headers = {"Content-Type": "application/gzip"}
        response = await gateway.client.post("/v1/functions", content=pack(tmp_path), headers=headers)
        assert response.status_code == 201, response.text
    copies = list((gateway.state / "functions/heavy").glob("r*/code/model.bin"))
    assert len(copies) == 2
    assert len({path.stat().st_ino for path in copies}) == 1
    found = (await gateway.client.get("/v1/functions/heavy/revisions")).json()["revisions"]
    assert [one["size_bytes"] > 1 << 20 for one in found] == [True, False]
    await gateway.client.delete("/v1/functions/heavy")

    async def removed() -> bool:
        return not list((gateway.state / "weights").iterdir())

    # Wait for the first revision, which may still be retiring.
    await until(removed, "the end of the weights")


@pytest.mark.parametrize(
    "source",
    [
        "def handler(",
        "def handler():\n    pass",
        "def setup(context):\n    1 / 0\ndef handler(event):\n    pass",
    ],
    ids=["import", "signature", "setup"],
)
async def test_a_deploy_that_fails_leaves_the_old_revision(gateway, deploy, source: str):
    function = await deploy("def handler(event):\n    return 'good'", name="stays")
    before = (await function.status())["revision"]
    assert failure(await gateway.send(source, name="stays"))["type"].startswith("handler_")
    assert (await function.status())["revision"] == before
    assert await function.answer() == "good"


async def test_deploys_of_one_name_at_the_same_time(gateway, deploy):
    await deploy("def handler(event):\n    return -1", name="raced")
    sources = [f"def handler(event):\n    return {n}" for n in range(4)]
    responses = await asyncio.gather(*(gateway.send(source, name="raced") for source in sources))
    assert [response.status_code for response in responses] == [201] * 4
    last = max(responses, key=lambda response: response.json()["revision"]).json()["revision"]
    assert (await gateway.function("raced").status())["revision"] == last
    assert await gateway.function("raced").answer() in range(4)


async def test_weights_are_mapped_and_private(deploy, tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    weight = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024)
    save_file({"first.weight": weight, "first.bias": torch.ones(1024)}, tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()
    source = """
import os, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(1024, 1024)
def build(context):
    with context.snapshot.skeleton():
        net = Net().requires_grad_(False)
    context.snapshot.restore(net)
    return net
def smaps():
    found, ours = {}, False
    for line in open("/proc/self/smaps"):
        head = line.split()
        if "-" in head[0]:
            ours = line.rstrip().endswith("model.safetensors")
        elif ours and head[0].startswith(("Shared_", "Anonymous")):
            key = head[0].partition("_")[0].rstrip(":")
            found[key] = found.get(key, 0) + int(head[1])
    return found
def handler(event, context):
    net = context.state
    answer = float(net.first(torch.ones(1024))[0])
    if event == "write":
        net.first.weight.zero_()
    return {"pid": os.getpid(), "answer": answer, "smaps": smaps()}
"""
    function = await deploy(source, {"snapshot": str(tmp_path), "scale.max": 2})
    right = float(weight[0].sum() + 1)
    await function.client.post(f"/v2/{function.name}/warmup", params={"workers": "2"})
    await function.settled(ready=2)
    seen: dict[int, dict] = {}
    while len(seen) < 2:
        for answer in await asyncio.gather(*(function.answer() for _ in range(4))):
            assert answer["answer"] == right
            seen[answer["pid"]] = answer["smaps"]
    # By now both workers have read all weights. `Shared` is in KiB and includes dirty pages, because the kernel may not have
    # written the file to the disk yet.
    again = (await function.answer())["smaps"]
    assert again["Shared"] >= 4096
    assert again["Anonymous"] == 0
    writer = await function.answer("write")
    assert writer["smaps"]["Anonymous"] >= 4096
    assert (tmp_path / "model.safetensors").read_bytes() == before
    others = {
        answer["pid"]: answer["answer"]
        for answer in await asyncio.gather(*(function.answer() for _ in range(8)))
    }
    others.pop(writer["pid"], None)
    assert all(answer == right for answer in others.values())


async def test_a_deploy_whose_caller_disconnects_leaves_nothing(gateway, deploy, gate: Gate):
    """The caller disconnects while the handler is still being built."""
    source = "import gate\ndef build(context):\n    gate.wait('build')\ndef handler(event):\n    return event"
    deploying = asyncio.create_task(gateway.send(source, name="left", gate=gate))
    zygote = (await gate.next("build")).pid
    deploying.cancel()
    gate.open()
    await gone(zygote)
    response = await gateway.client.get("/v1/functions/left")
    assert response.status_code == 404


async def test_what_accepts_deploys_is_asked_for_the_owner_of_the_name_only(
    gateway: Any, tmp_path: Path
) -> None:
    """Otherwise the secrets of a function that another key has deployed meanwhile would be sent to the sources of this deploy."""
    (tmp_path / "handler.py").write_text("def handler(event):\n    return event\n")
    rollouts, asked, taken, waits = gateway.server.node.rollouts, list[str](), False, asyncio.Event()

    def authorize(_name: str) -> None:
        if taken:
            raise Forbidden("taken")
        loop.call_soon_threadsafe(waits.set)

    async def accept(settings: FunctionSettings, _key_id: str) -> None:
        asked.append(settings.name)

    loop, deployment = (
        asyncio.get_running_loop(),
        Deployment(path=tmp_path, overrides={"name": "mine"}, check=False),
    )
    rollouts.functions.events.deploying.append(accept)
    try:
        async with asyncio.timeout(20), rollouts.functions.lock("mine"):
            deploying = asyncio.create_task(rollouts.deploy(replace(deployment, authorize=authorize)))
            await waits.wait()
            taken = True
        with pytest.raises(Forbidden):
            await deploying
        assert asked == []
        # `dev` and `serve FOLDER` deploy without a caller, so `accept` is not asked and cannot refuse the deploy.
        await rollouts.deploy(deployment)
        assert asked == []
        taken = False
        await rollouts.deploy(replace(deployment, authorize=authorize))
        assert asked == ["mine"]
    finally:
        rollouts.functions.events.deploying.remove(accept)


async def test_a_deploy_warns_of_a_larger_body_than_the_gateway_takes(state: Path) -> None:
    source = "def handler(event):\n    return event\n"
    async with gateway_here(state, max_body_bytes=1000) as gateway:
        function = await gateway.deploy(source, {"max_body_bytes": 2000})
        (warning,) = (await function.status())["warnings"]
        assert warning.startswith(
            "max_body_bytes is 2000, but requests to this gateway have at most 1000 bytes"
        )
        for settings in ({}, {"max_body_bytes": 1000}):
            function = await gateway.deploy(source, settings)
            assert (await function.status())["warnings"] == []
