"""Weights from object storage in containers: a real S3, real podman, and torch in the containers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import boto3
import psutil
import pytest
import pytest_asyncio
import torch
from containers import made_image, podman, require_podman, running_engine
from fault_server import Faults, FaultServer
from live import Function, Gateway, gateway_here, short_folder, until
from moto_server import moto_server
from pilotflame.errors import CacheError
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing
from pilotflame.snapshot.caching.cache import Cache
from pilotflame.snapshot.caching.node import node_tiers
from pilotflame.snapshot.caching.stored import is_mounted
from pilotflame.snapshot.converting.push import push
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, REALM_DIGITS
from pilotflame.snapshot.sources.s3 import S3Source
from safetensors.torch import save_file

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

WIDTH, LAYERS, BUCKET = 256, 8, "weights"
FILE = "model.safetensors"
SECRET = "hush/secret+key/of/a/bucket"
HANDLER = """
import os
import torch

def build(context):
    with context.snapshot.skeleton():
        net = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
    context.snapshot.restore(net)
    return net

def mapped():
    lines = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith("model.safetensors")]
    return sorted({(line[5], int(line[4])) for line in lines})

@torch.inference_mode()
def handler(event, context):
    if event and "list" in event:
        return sorted(os.listdir(event["list"]))
    if event and "write" in event:
        return os.open(event["write"], os.O_RDWR | os.O_CREAT)
    answer = context.state(torch.ones(256)).tolist()
    return {"answer": answer, "mapped": mapped(), "environ": dict(os.environ)}
"""


class Weights:
    """A snapshot in a folder, and the answer of its network to an input of ones."""

    def __init__(self, folder: Path, seed: int) -> None:
        folder.mkdir()
        generator = torch.Generator().manual_seed(seed)
        made, answer = {}, torch.ones(WIDTH)
        for layer in range(LAYERS):
            weight = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
            made[f"{layer}.weight"], made[f"{layer}.bias"] = weight, torch.full((WIDTH,), 0.5)
            answer = torch.nn.functional.linear(answer, weight, made[f"{layer}.bias"])
        save_file(made, folder / FILE)
        self.folder, self.manifest = folder, create(folder, chunk_bytes=64 << 10)
        self.manifest.write(folder / MANIFEST_NAME)
        self.right = pytest.approx(answer.tolist(), rel=1e-3, abs=1e-3)


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Weights]]:
    """Push the snapshots s3://weights/one and s3://weights/two. Their credentials are in the gateway's environment."""
    with moto_server() as endpoint, pytest.MonkeyPatch.context() as patched:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "AKIAHUSHHUSHHUSH0000", "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nowhere",
            "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
        }.items():  # fmt: skip
            patched.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        client.close()
        made = {}
        for seed, name in enumerate(("one", "two")):
            made[name] = Weights(tmp_path_factory.mktemp("weights") / name, seed)
            push(made[name].folder, made[name].manifest, S3Source(f"s3://{BUCKET}/{name}"))
        yield made


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def gateway(s3: dict[str, Weights]) -> AsyncIterator[Gateway]:
    del s3
    require_podman()
    with short_folder() as folder, running_engine(folder, lent="torch") as engine:
        cache = folder / "cache"
        async with gateway_here(folder / "state", engine=engine.url, cache_dir=cache) as found:
            roots = [tier.root for tier in node_tiers(cache)]
            yield found
        left = [path.parent for root in roots for path in root.rglob("mounted")]
        assert [path for path in left if is_mounted(path) or not (path / "files").exists()] == []


@pytest.fixture(scope="module")
def image() -> str:
    require_podman()
    return made_image()


def tiers(gateway: Gateway) -> Cache:
    return Cache(node_tiers(gateway.state.parent / "cache"))


def container_of(gateway: Gateway, function: Function) -> str:
    filters = (
        f"--filter=label=pilotflame.gateway={gateway.state}",
        f"--filter=label=pilotflame.function={function.name}",
    )
    (found,) = json.loads(podman("ps", *filters, "--format", "json"))
    return str(found["Id"])


async def deployed(gateway: Gateway, image: str, url: str, *, check: bool = False) -> Function:
    settings = {"image.name": image, "snapshot": url, "scale.idle_timeout_s": 0}
    return await gateway.deploy(HANDLER, settings, check=check)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def one(gateway: Gateway, image: str) -> Function:
    return await deployed(gateway, image, f"s3://{BUCKET}/one")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def two(gateway: Gateway, image: str) -> Function:
    return await deployed(gateway, image, f"s3://{BUCKET}/two")


async def test_weights_of_a_bucket_are_mapped_by_a_container_without_credentials(
    one: Function, s3: dict[str, Weights]
) -> None:
    response = await one.call()
    assert response.status_code == 200, response.text
    assert response.headers["x-cold-start"] == "true"
    assert parse_server_timing(response.headers["server-timing"])["fetch"] > 0
    found = response.json()
    assert found["answer"] == s3["one"].right
    assert [name for name in found["environ"] if name.startswith("AWS_")] == []
    assert SECRET not in response.text


async def test_containers_of_two_functions_map_the_same_file(
    gateway: Gateway, image: str, one: Function
) -> None:
    again = await deployed(gateway, image, f"s3://{BUCKET}/one", check=True)
    ((path, inode),) = (await one.answer())["mapped"]
    assert (await again.answer())["mapped"] == [[path, inode]]
    # The inode is that of the file on the host, so nothing was copied.
    assert Path(path).stat().st_ino == inode
    assert container_of(gateway, one) != container_of(gateway, again)


def in_cache(folder: Path, weights: Weights) -> str:
    """Return the name of a snapshot in a folder of the cache. The name ends with digits of the realm."""
    (name,) = [
        found.name
        for found in folder.iterdir()
        if found.name.startswith(weights.manifest.digest[:-REALM_DIGITS])
    ]
    return name


async def test_a_container_sees_its_own_snapshot_only_and_cannot_write_to_it(
    one: Function, two: Function, s3: dict[str, Weights]
) -> None:
    assert (await two.answer())["answer"] == s3["two"].right
    ((path, _),) = (await one.answer())["mapped"]
    folder = Path(path).parents[1]
    assert in_cache(folder.parent, s3["two"]) != folder.name
    assert await one.answer({"list": str(folder.parent)}) == [folder.name]
    for target in (path, folder / "fetching", folder / "files" / "new"):
        assert "Read-only file system" in (await one.error({"write": str(target)}))["message"]


SEVERAL = """
import os
import torch

def build(context):
    nets = {}
    for name in context.snapshots:
        with context.snapshots.skeleton():
            nets[name] = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(8)])
        context.snapshots[name].restore(nets[name])
    return nets

@torch.inference_mode()
def handler(event, context):
    if event:
        return sorted(os.listdir(event))
    lines = [line.split() for line in open("/proc/self/maps") if line.rstrip().endswith("model.safetensors")]
    answers = {name: net(torch.ones(256)).tolist() for name, net in context.state.items()}
    return {"answers": answers, "mapped": sorted({line[5] for line in lines})}
"""


async def test_a_container_with_several_snapshots_sees_these_and_no_others(
    gateway: Gateway, image: str, two: Function, s3: dict[str, Weights], tmp_path: Path
) -> None:
    await two.answer()
    extra = Weights(tmp_path / "extra", 9)
    with FaultServer(extra.folder) as server:
        urls = {"a": f"s3://{BUCKET}/one", "b": server.url, "same": server.url}
        named = {f"snapshots.{name}": url for name, url in urls.items()}
        function = await gateway.deploy(SEVERAL, {"image.name": image, "scale.idle_timeout_s": 0, **named})
        found = await function.answer()
        right = {"a": s3["one"].right, "b": extra.right, "same": extra.right}
        assert {name: found["answers"][name] == right[name] for name in right} == dict.fromkeys(right, True)
        folders = {Path(path).parents[1] for path in found["mapped"]}
        (parent,) = {folder.parent for folder in folders}
        own = {in_cache(parent, s3["one"]), in_cache(parent, extra)}
        assert {folder.name for folder in folders} == set(await function.answer(str(parent))) == own
        assert in_cache(parent, s3["two"]) not in own


async def test_a_snapshot_that_was_evicted_is_fetched_again_for_the_same_container(
    gateway: Gateway, two: Function, s3: dict[str, Weights]
) -> None:
    await two.answer()
    container = container_of(gateway, two)
    (tier,) = [tier for tier in tiers(gateway).tiers if tier.kind == "disk"]
    digest = in_cache(tier.root / "snapshots", s3["two"])
    await two.settled(ready=0)

    async def evicted() -> bool:
        # Try again: the fetcher releases the snapshot a moment after the end of the last worker.
        with contextlib.suppress(CacheError):
            await asyncio.to_thread(tiers(gateway).evict, digest)
        return not any(tier.has(digest) for tier in tiers(gateway).tiers)

    await until(evicted, "the eviction")
    assert (await two.answer())["answer"] == s3["two"].right
    assert container_of(gateway, two) == container


async def test_the_first_answer_comes_while_weights_arrive_and_a_killed_fetcher_is_replaced(
    gateway: Gateway, image: str, tmp_path: Path
) -> None:
    weights = Weights(tmp_path / "late", 7)
    with FaultServer(weights.folder) as server:
        function = await deployed(gateway, image, server.url)
        # The response with the weights stalls after a few bytes, so the fetch cannot end before the fetcher is killed.
        server.faults = lambda request: Faults(
            stall_share=float("model" in request.name), stall_s=60.0, stall_at=10_000
        )
        call = asyncio.create_task(function.call())

        async def stalled() -> bool:
            return any(one.sent >= 10_000 for one in server.requests if "model" in one.name)

        await until(stalled, "a stalled fetch")
        server.faults = Faults(bytes_per_s=4e6)
        fetchers = [child for child in psutil.Process().children() if "fetcher" in " ".join(child.cmdline())]
        os.kill(fetchers[0].pid, signal.SIGKILL)
        response = await call
        assert response.status_code >= 500 or response.json()["answer"] == weights.right, response.text
        await function.settled(ready=0)
        answer = await function.call()
        assert answer.status_code == 200, answer.text
        assert answer.json()["answer"] == weights.right
        assert parse_server_timing(answer.headers["server-timing"])["fetch"] > 0
