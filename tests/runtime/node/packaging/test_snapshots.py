"""A gateway that requires signatures checks every snapshot of a function, at each deploy and at each of its own starts."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
import torch
from fault_server import Faults, FaultServer, Request
from live import LIMIT_S, Gateway, failure, gateway_here, short_folder
from pilotflame.errors import GatewayError, PackageMissing, SettingsError, SourceError
from pilotflame.runtime.ground.access.deploy_policy import ALL_ALLOWED
from pilotflame.runtime.ground.settings.function_settings import SnapshotPart
from pilotflame.runtime.ground.settings.gateway_settings import read_gateway_settings
from pilotflame.runtime.node.packaging.code import pack
from pilotflame.runtime.node.packaging.snapshots import SourceRules, describe_local, describe_remote
from pilotflame.snapshot.format.compared import ComparedShards
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME, SIGNATURE_NAME, Manifest
from pilotflame.snapshot.format.signature import make_key, sign
from pilotflame.snapshot.format.slices import Slice, part_of
from pilotflame.snapshot.format.verify import verify
from pilotflame.snapshot.sources.source import ReportProgress
from remote_weights import LINEAR
from safetensors.torch import save_file

pytestmark = pytest.mark.asyncio(loop_scope="module")
SHARD = "model.safetensors"


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("keys") / "key.pem"
    make_key(found)
    return found


@pytest.fixture
def weights(tmp_path: Path, key: Path) -> Path:
    """Make the folder of a signed snapshot."""
    folder = tmp_path / "weights"
    folder.mkdir()
    save_file({"weight": torch.eye(64)}, folder / SHARD)
    (folder / "1_Pooling").mkdir()
    for name in ("config.json", "1_Pooling/config.json"):
        (folder / name).write_text("{}")
    manifest = create(folder, chunk_bytes=4096, algorithm="sha256")
    manifest.write(folder / MANIFEST_NAME)
    (folder / SIGNATURE_NAME).write_bytes(sign(manifest, key).to_json())
    return folder


@pytest.fixture(scope="module")
def signer(key: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("any")
    save_file({"weight": torch.eye(2)}, folder / SHARD)
    return sign(create(folder, algorithm="sha256"), key).signer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(signer: str) -> AsyncIterator[Gateway]:
    with short_folder() as state:
        async with gateway_here(state, snapshot_signers=(signer,)) as running:
            yield running


async def refused(gateway: Gateway, **settings: object) -> str:
    """Deploy a function that must be refused because of a signature. Return the error's message."""
    error = failure(await gateway.send(LINEAR, {key: str(value) for key, value in settings.items()}))
    assert (error["status"], error["type"]) == (422, "signature_invalid"), error
    assert error["remedy"]
    message: str = error["message"]
    return message


def flip_the_last_bytes(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-4] + b"evil")


async def test_remote_weights_need_an_accepted_signature(gateway: Gateway, weights: Path) -> None:
    manifest, signature = ((weights / name).read_bytes() for name in (MANIFEST_NAME, SIGNATURE_NAME))
    with FaultServer(weights) as server:
        function = await gateway.deploy(LINEAR, {"snapshot": server.url}, name="net")
        assert await function.answer() == [1.0] * 64
        (weights / SIGNATURE_NAME).unlink()
        assert await refused(gateway, snapshot=server.url) == f"{server.url} has no signature."
        (weights / SIGNATURE_NAME).write_bytes(signature[:-20])
        assert "malformed or cut off" in await refused(gateway, snapshot=server.url)
        (weights / SIGNATURE_NAME).write_bytes(signature)
        altered = json.loads(manifest)
        altered["shards"][0]["chunks"][0] = "0" * 64
        (weights / MANIFEST_NAME).write_text(json.dumps(altered))
        assert "a signature of another manifest" in await refused(gateway, snapshot=server.url)
        (weights / MANIFEST_NAME).unlink()
        assert "no manifest, and so no signature" in await refused(gateway, snapshot=server.url)
        create(weights).write(weights / MANIFEST_NAME)
        server.requests.clear()
        assert "digests of xxh3-128" in await refused(gateway, snapshot=server.url)
        # The snapshot is refused before any asset or shard is read.
        assert {request.name for request in server.requests} == {MANIFEST_NAME}
        # The live revision still answers.
        assert await function.answer() == [1.0] * 64


async def test_local_weights_and_weights_in_the_archive_need_one_too(
    gateway: Gateway, weights: Path, tmp_path: Path
) -> None:
    code = tmp_path / "code"
    shutil.copytree(weights, code / "weights")
    (code / "handler.py").write_text(LINEAR)

    async def upload() -> httpx.Response:
        headers, query = (
            {"Content-Type": "application/gzip"},
            {"folder": "carried", "set": "snapshot=weights"},
        )
        return await gateway.client.post("/v1/functions", content=pack(code), headers=headers, params=query)

    assert (await upload()).status_code == 201
    assert await gateway.function("carried").answer() == [1.0] * 64
    (code / "weights" / SIGNATURE_NAME).unlink()
    assert failure(await upload())["type"] == "signature_invalid"
    unsigned = code / "weights"
    assert await refused(gateway, snapshot=unsigned) == f"{unsigned} has no signature."
    # A file that our code would read must be in the signed manifest.
    shutil.copy(weights / SIGNATURE_NAME, unsigned)
    (unsigned / "chat_template.jinja").write_text("evil")
    assert "has the file chat_template.jinja" in failure(await upload())["message"]
    assert "has the file chat_template.jinja" in await refused(gateway, snapshot=unsigned)
    (unsigned / SIGNATURE_NAME).unlink()
    # Named snapshots and adapters need signatures, too.
    style = await refused(gateway, **{"snapshots.base": weights, "snapshots.style": unsigned})
    assert style == f"snapshots.style: {unsigned} has no signature."
    loud = await refused(gateway, **{"snapshot": weights, "adapters.loud": unsigned})
    assert loud == f"adapters.loud: {unsigned} has no signature."


async def test_local_manifests_with_a_part_added_after_signing_are_refused(
    gateway: Gateway, weights: Path
) -> None:
    part_of(Manifest.read(weights), [], {"weight": Slice(dim=0, rank=0, world=2)}).write(
        weights / MANIFEST_NAME
    )
    error = failure(await gateway.send(LINEAR, {"snapshot": str(weights)}))
    assert (error["type"], error["status"]) == ("manifest_invalid", 422)
    assert "it has `part`" in error["message"]


async def test_a_deploy_without_required_signatures_needs_none(state: Path, weights: Path) -> None:
    def faults(status: int, request: Request) -> Faults:
        return Faults(status=status if request.name == SIGNATURE_NAME else None)

    async with gateway_here(state) as gateway:
        with FaultServer(weights) as server:
            for status in (405, 503):
                server.faults = functools.partial(faults, status)
                function = await gateway.deploy(LINEAR, {"snapshot": server.url}, name="net", check=False)
        await function.logged("the signature was not copied")


async def test_bytes_that_differ_from_the_signed_digests_are_refused(gateway: Gateway, weights: Path) -> None:
    flip_the_last_bytes(weights / SHARD)
    local = failure(await gateway.send(LINEAR, {"snapshot": str(weights)}))
    assert local["type"] == "snapshot_corrupt"
    with FaultServer(weights) as server:
        # Without `wait_for_weights`, a worker is ready before its weights have arrived, and only a later call fails.
        settings = {"snapshot": server.url, "wait_for_weights": True}
        remote = failure(await gateway.send(LINEAR, settings))
    assert remote["details"]["cause"] == "snapshot_corrupt"
    for error in (local, remote):
        assert "chunk 4 of 5 (from byte 16384), which holds weight, differs" in error["message"]


async def test_a_start_checks_stored_revisions(
    state: Path, weights: Path, signer: str, tmp_path: Path
) -> None:
    make_key(tmp_path / "other.pem")
    other = sign(Manifest.read(weights), tmp_path / "other.pem").signer
    (plain := tmp_path / "plain").mkdir()
    save_file({"weight": torch.eye(64)}, plain / SHARD)
    with FaultServer(weights) as server:
        async with gateway_here(state) as gateway:
            for name, snapshot in {"remote": server.url, "local": str(weights), "plain": str(plain)}.items():
                await gateway.deploy(LINEAR, {"snapshot": snapshot}, name=name, check=False)
        # The revisions were deployed when signatures were not required. Two of them have signatures.
        async with gateway_here(state, snapshot_signers=(other, signer)) as gateway:
            assert await gateway.function("remote").answer() == [1.0] * 64
            await barred(gateway, "plain", "signature_invalid", "digests of xxh3-128")
            restarted = failure(await gateway.client.post("/v1/functions/plain/restart"))
            assert restarted["type"] == "signature_invalid"
            assert (await gateway.client.post("/v1/functions/local/restart")).status_code == 200
            flip_the_last_bytes(weights / SHARD)
            restarted = failure(await gateway.client.post("/v1/functions/local/restart"))
            assert restarted["type"] == "snapshot_corrupt"
        async with gateway_here(state, snapshot_signers=(signer,)) as gateway:
            await barred(gateway, "local", "snapshot_corrupt", "which holds weight, differs")
        # The key is no longer accepted.
        async with gateway_here(state, snapshot_signers=(other,)) as gateway:
            for name in ("remote", "local"):
                await barred(gateway, name, "signature_invalid", "which is not an accepted key")


async def test_local_weights_are_compared_in_the_background_and_only_after_a_change(
    state: Path, weights: Path, signer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, held, reads, stopped = threading.Event(), threading.Event(), list[Path](), threading.Event()

    def slow(root: Path, manifest: Manifest, progress: ReportProgress) -> None:
        reads.append(root)
        begun.set()
        try:
            while not held.wait(0.01):
                progress(0, manifest.total_bytes)
            verify(root, manifest, progress)
        except GatewayError:
            stopped.set()
            raise

    monkeypatch.setattr("pilotflame.snapshot.format.verify.verify", slow)
    settings = {"snapshot": str(weights)}
    async with gateway_here(state) as gateway:
        await gateway.deploy(LINEAR, settings, name="local", check=False)
    async with gateway_here(state, snapshot_signers=(signer,)):
        assert await asyncio.to_thread(begun.wait, LIMIT_S)
    # The end of the gateway ends the reading.
    assert await asyncio.to_thread(stopped.wait, LIMIT_S)
    reads.clear()
    async with gateway_here(state, snapshot_signers=(signer,)) as gateway:
        # The gateway serves before the weights are read.
        error = failure(await gateway.function("local").call())
        assert (error["status"], error["type"]) == (503, "function_barred")
        assert "still compares the weights" in error["message"]
        held.set()
        await gateway.function("local").logged("the weights have the signed digests")
        assert await gateway.function("local").answer() == [1.0] * 64
        await gateway.deploy(LINEAR, settings, name="local", check=False)
    async with gateway_here(state, snapshot_signers=(signer,)) as gateway:
        await gateway.deploy(LINEAR, settings, name="local", check=False)
        assert reads == [weights]
        os.utime(weights / SHARD)
        await gateway.deploy(LINEAR, settings, name="local", check=False)
        assert reads == [weights] * 2
    shutil.rmtree(weights / "1_Pooling")
    (weights / "1_Pooling").symlink_to("1_Pooling")
    async with gateway_here(state, snapshot_signers=(signer,)) as gateway:
        await barred(gateway, "local", "source_missing", "1_Pooling cannot be followed")


async def test_a_part_that_was_compared_is_not_read_again(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Give the shard a second name: its version then leaves out the time of the last change, which a test cannot set.
    (tmp_path / "second").hardlink_to(weights / SHARD)
    os.utime(weights / SHARD, (1.5, 1.5))
    reads, read = list[int](), ComparedShards._read

    def counted(shards: ComparedShards, number: int, descriptor: int) -> None:
        reads.append(number)
        read(shards, number, descriptor)

    monkeypatch.setattr(ComparedShards, "_read", counted)
    first, second = (SnapshotPart(slices={"weight": Slice(dim=0, rank=rank, world=2)}) for rank in range(2))
    earlier, found = None, list[int]()
    for number, part in enumerate((first, first, second, SnapshotPart(), SnapshotPart(), first)):
        folder = tmp_path / f"r{number}"
        folder.mkdir()
        rules = SourceRules({}, ALL_ALLOWED, "")
        describe_local(weights, folder, part, lambda _: None, rules, earlier=earlier, stored=False)
        found.append(len(reads))
        earlier = folder
    # The second half and the whole have bytes that were not compared before. The first half has none beyond the whole.
    assert found == [1, 1, 2, 3, 3, 3]


async def barred(gateway: Gateway, name: str, code: str, why: str) -> None:
    """Check that a function is barred. The callers learn the code of the error, and the log has the reason."""
    await gateway.function(name).logged(f"A snapshot of {name} is refused ({code}).")
    error = failure(await gateway.function(name).call())
    assert error["type"] == "function_barred"
    assert error["message"].startswith(f"A snapshot of {name} is refused ({code}).")
    await gateway.function(name).logged(why)


async def test_a_gateway_without_cryptography_refuses_to_require_signatures(
    state: Path, signer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(PackageMissing, match="needs cryptography") as refusal:
        async with gateway_here(state, snapshot_signers=(signer,)):
            pass
    assert "pilotflame[signing]" in refusal.value.remedy


async def test_a_signer_is_a_public_key() -> None:
    key = f"ed25519:{'A' * 43}="
    settings = read_gateway_settings({"PILOTFLAME_SNAPSHOT_SIGNERS": f"{key}, {key}"})
    assert settings.snapshot_signers == (key, key)
    with pytest.raises(SettingsError, match=r"snapshot_signers has 'key\.pem', which is no public key"):
        read_gateway_settings({"PILOTFLAME_SNAPSHOT_SIGNERS": "key.pem"})


async def test_a_slow_server_does_not_hold_a_deploy(
    tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pilotflame.runtime.node.packaging.snapshots.DESCRIBE_S", 0.3)
    rules = SourceRules({}, ALL_ALLOWED, "")
    with FaultServer(weights, Faults(bytes_per_s=500)) as slow:
        described = functools.partial(
            describe_remote, slow.url, tmp_path / "folder", SnapshotPart(), lambda _: None, rules
        )
        (tmp_path / "folder").mkdir()
        with pytest.raises(SourceError, match="is read too slowly"):
            await asyncio.to_thread(described)
