"""Weights in S3: only the gateway and its fetcher have the credentials."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
import pytest_asyncio
import torch
from live import Function, Gateway, failure, gateway_process, short_folder, until
from moto_server import moto_server
from pilotflame.runtime.ground.telemetry.timeline import parse_server_timing
from pilotflame.snapshot.converting.push import push
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import Manifest
from pilotflame.snapshot.sources.s3 import S3Source
from safetensors.torch import save_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

WIDTH = 256
BUCKET = "weights"
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIAHUSHHUSHHUSH0000",
    "AWS_SECRET_ACCESS_KEY": "hush/secret+key/of/a/bucket",
    "AWS_SESSION_TOKEN": "hush-token-of-a-session",
}
HANDLER = """
import os
import sys
import torch

def build(context):
    with context.snapshot.skeleton():
        net = torch.nn.Linear(256, 256)
    context.snapshot.restore(net)
    return net

@torch.inference_mode()
def handler(event, context):
    kept = open("/proc/self/environ", "rb").read().decode().split("\\0")
    print("environment:", dict(os.environ))
    print("kept by the kernel:", kept, file=sys.stderr)
    return {
        "answer": context.state(torch.ones(256)).tolist(),
        "environ": dict(os.environ),
        "kept": kept,
        "modules": sorted(sys.modules),
        "pid": os.getpid(),
    }
"""


@pytest.fixture(scope="module")
def moto() -> Iterator[str]:
    """Serve S3 over HTTP. Yield the endpoint."""
    with moto_server() as endpoint:
        yield endpoint


@pytest.fixture(scope="module")
def credentials(moto: str) -> dict[str, str]:
    return {
        **SECRETS,
        "AWS_ENDPOINT_URL": moto,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_CONFIG_FILE": "/nowhere",
        "AWS_SHARED_CREDENTIALS_FILE": "/nowhere",
    }


@pytest.fixture(scope="module")
def right(credentials: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Push s3://weights/net, and s3://weights/bare without its manifest. Return the network's answer to an input of ones."""
    folder = tmp_path_factory.mktemp("net")
    generator = torch.Generator().manual_seed(4)
    made = {"weight": torch.randn(WIDTH, WIDTH, generator=generator), "bias": torch.arange(float(WIDTH))}
    save_file(made, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    with pytest.MonkeyPatch.context() as patched:
        for name, value in credentials.items():
            patched.setenv(name, value)
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET)
        push(folder, create(folder, chunk_bytes=64 << 10), S3Source(f"s3://{BUCKET}/net"))
        client.upload_file(str(folder / "model.safetensors"), BUCKET, "bare/model.safetensors")
        client.close()
    answer = torch.nn.functional.linear(torch.ones(WIDTH), made["weight"], made["bias"])
    return pytest.approx(answer.tolist(), rel=1e-4, abs=1e-4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(credentials: dict[str, str]) -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        cache_dir = str(folder / "cache")
        async with gateway_process(folder / "state", environ=credentials, cache_dir=cache_dir) as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def function(gateway: Gateway, right: Any) -> Function:
    del right  # `right` has pushed the weights that are deployed here
    return await gateway.deploy(HANDLER, {"snapshot": f"s3://{BUCKET}/net"}, name="net", check=False)


def of_the_cloud(names: Any) -> list[str]:
    # AWS_CA_BUNDLE holds no credentials: it names the trusted certificate authorities, and functions inherit it.
    return [
        name
        for name in names
        if name.upper().startswith(("AWS_", "BOTO")) and name.upper() != "AWS_CA_BUNDLE"
    ]


def holds(pid: int, secret: str) -> bool:
    """Return True if a process has `secret` anywhere in the memory that it may write to."""
    process = Path("/proc", str(pid))
    with (process / "maps").open() as maps, (process / "mem").open("rb", buffering=0) as memory:
        for line in maps:
            extent, rights, _, _, _, *name = line.split()
            begin, end = (int(address, 16) for address in extent.split("-"))
            if rights.startswith("rw") and not (name and name[0].startswith("[v")):
                memory.seek(begin)
                with contextlib.suppress(OSError):  # unmapped meanwhile
                    if secret.encode() in (memory.read(end - begin) or b""):
                        return True
    return False


async def test_the_first_answer_is_right_and_no_worker_has_credentials(
    gateway: Gateway, function: Function, right: Any
) -> None:
    response = await function.call()
    assert response.status_code == 200, response.text
    assert response.headers["x-cold-start"] == "true"
    assert parse_server_timing(response.headers["server-timing"])["fetch"] > 0
    found = response.json()
    assert found["answer"] == right
    assert "PATH" in found["environ"]  # `found` has a real environment
    assert of_the_cloud(found["environ"]) == []
    assert of_the_cloud(entry.partition("=")[0] for entry in found["kept"]) == []
    assert not [name for name in found["modules"] if name.split(".")[0] in ("boto3", "botocore")]
    for secret in SECRETS.values():
        assert secret not in response.text


def processes_of(gateway: Gateway) -> dict[int, str]:
    """Return the pids and command lines of all processes that the gateway started."""
    assert gateway.process is not None
    found = psutil.Process(gateway.process.pid).children(recursive=True)
    return {process.pid: " ".join(process.cmdline()) for process in found}


async def test_neither_logs_nor_files_nor_command_lines_show_them(
    gateway: Gateway, function: Function
) -> None:
    pid = (await function.answer())["pid"]
    await function.logged("kept by the kernel:")
    logged = "\n".join(str(line) for line in await function.lines())
    assert "environment:" in logged
    commands = processes_of(gateway)
    assert pid in commands
    files = [path for path in gateway.state.parent.rglob("*") if path.is_file()]
    written = b"\n".join(path.read_bytes() for path in files).decode("latin-1")
    assert "def handler" in written  # `written` includes the files of the state, and the gateway's log
    for secret in (*SECRETS.values(), "X-Amz-Signature", "X-Amz-Credential"):
        for place in (logged, written, *commands.values()):
            assert secret not in place


async def test_of_all_that_the_gateway_starts_only_the_fetcher_has_them_in_memory(
    gateway: Gateway, function: Function
) -> None:
    """A process's title overwrites the environment that the kernel shows, so the memory is searched."""
    pid = (await function.answer())["pid"]
    processes = processes_of(gateway)
    assert pid in processes
    secret = SECRETS["AWS_SECRET_ACCESS_KEY"]
    try:
        holders = [command for pid, command in processes.items() if holds(pid, secret)]
    except PermissionError:
        pytest.skip("no permission to read the memory of child processes")
    assert [command.strip() for command in holders] == ["pilotflame: fetcher"]


async def test_weights_without_a_manifest_are_served_and_then_have_one(gateway: Gateway, right: Any) -> None:
    bare = await gateway.deploy(HANDLER, {"snapshot": f"s3://{BUCKET}/bare"}, name="bare", check=False)
    (path,) = gateway.state.glob("functions/bare/*/manifest.json")
    deployed = Manifest.read(path)
    assert deployed.observed is not None
    assert not deployed.has_digests
    response = await bare.call()
    assert response.status_code == 200, response.text
    assert response.json()["answer"] == right

    async def learned() -> bool:
        return Manifest.read(path).has_digests

    await until(learned, "the manifest has the digests")
    assert Manifest.read(path).digest == deployed.digest


async def test_a_prefix_without_weights_is_refused(gateway: Gateway, right: Any) -> None:
    del right
    error = failure(await gateway.send(HANDLER, {"snapshot": f"s3://{BUCKET}/empty"}, check=False))
    assert error["status"] == 422
    assert error["type"] == "source_missing"
    assert f"s3://{BUCKET}/empty" in error["message"]


async def test_a_missing_bucket_is_named(gateway: Gateway) -> None:
    error = failure(await gateway.send(HANDLER, {"snapshot": "s3://no-such-bucket/net"}, check=False))
    assert error["status"] == 422
    assert error["type"] == "source_missing"
    assert "s3://no-such-bucket/net" in error["message"]
    assert "NoSuchBucket" in error["message"]
    assert "bucket" in error["remedy"]
