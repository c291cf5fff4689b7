"""What keys and gateways allow to be deployed: checked at a deploy, at a restart of the gateway, and after a key's end."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from fault_server import FaultServer
from live import TRUSTED, Gateway, failure, gateway_here
from pilotflame.errors import SourceDenied
from pilotflame.runtime.node.packaging.code import pack
from pilotflame.runtime.startup import server
from pilotflame.runtime.startup.stored_calls import identity
from safetensors.torch import save_file

ECHO = "def handler(event):\n    return event\n"
ENGINE = "unix:///nonexistent/engine.sock"
GZIP = {"Content-Type": "application/gzip"}


async def key(gateway: Gateway, **fields: Any) -> dict[str, Any]:
    """Make a key with the scopes `deploy` and `invoke`, and let the client send it."""
    async with gateway.at_home() as home:
        response = await home.post(
            "/v1/keys", json={"name": "team", "scopes": ["deploy", "invoke"], **fields}
        )
    assert response.status_code == 201, response.text
    made: dict[str, Any] = response.json()
    gateway.client.headers["Authorization"] = f"Bearer {made['key']}"
    return made


async def upload(gateway: Gateway, folder: Path, *settings: str) -> httpx.Response:
    folder.mkdir(exist_ok=True)
    (folder / "handler.py").write_text(ECHO)
    query = [("folder", "mine"), ("check", "0"), *(("set", text) for text in settings)]
    return await gateway.client.post("/v1/functions", content=pack(folder), headers=GZIP, params=query)


async def test_a_new_key_deploys_only_containers_and_needs_an_engine_for_it(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "find_engine", lambda: None)
    async with gateway_here(state) as gateway, gateway.at_home() as home:
        error = failure(await home.post("/v1/keys", json={"name": "team", "scopes": ["deploy"]}))
        assert error["status"] == 400
        assert "no container engine" in error["message"]
        assert "--trusted" in error["remedy"]
        assert (await home.get("/v1/keys")).json()["keys"] == []
        made = await key(gateway, policy=TRUSTED)
        assert made["policy"]["kind"] == "trusted"
        assert (await upload(gateway, tmp_path)).status_code == 201


async def test_a_key_that_is_not_trusted_deploys_no_process(state: Path, tmp_path: Path) -> None:
    async with gateway_here(state, engine=ENGINE) as gateway:
        made = await key(gateway)
        assert made["policy"]["kind"] == "container"
        error = failure(await upload(gateway, tmp_path))
        assert (error["status"], error["type"]) == (403, "policy_violation")
        assert f"The policy of the API key {made['id']} does not allow mine" in error["message"]
        assert "image.name is not set" in error["message"]
        async with gateway.at_home() as home:
            refused = (await home.get("/v1/logs/audit")).text.splitlines()[-1]
        assert 'function=\\"mine\\"' in refused
        assert "policy_violation" in refused
        image = "image.name=registry/mine:1"
        assert (
            "resources.network is 'host'"
            in failure(await upload(gateway, tmp_path, image, "resources.network=host"))["message"]
        )
        # The gateway does not read the snapshot, so all messages are the same. Otherwise, errors would tell which files exist.
        messages = {
            failure(await upload(gateway, tmp_path, image, f"snapshot={path}"))["message"]
            for path in ("/etc/passwd", "/no/such/file", "../handler.py", "http://127.0.0.1:1/w")
        }
        assert len(messages) == 1
        folder = {"path": str(tmp_path), "overrides": {"image.name": "registry/mine:1"}}
        error = failure(await gateway.client.post("/v1/functions", json=folder))
        assert "allows no folders of the gateway's machine" in error["message"]
        assert (await gateway.client.get("/v1/functions")).json()["functions"] == []


async def test_a_gateway_that_has_lost_its_engine_names_the_keys_that_need_it(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway_here(state, engine=ENGINE) as gateway:
        await key(gateway)
    monkeypatch.setattr(server, "find_engine", lambda: None)
    async with gateway_here(state) as gateway, gateway.at_home() as home:
        lines = (await home.get("/v1/logs/gateway")).text
        assert "there is no container engine" in lines
        assert "may only deploy containers: team." in lines


async def test_a_policy_that_became_narrower_keeps_a_function_from_running(
    state: Path, tmp_path: Path
) -> None:
    async with gateway_here(state) as gateway:
        await key(gateway, policy=TRUSTED)
        assert (await upload(gateway, tmp_path)).status_code == 201
        assert await gateway.function("mine").answer(1) == 1
        authorization = gateway.client.headers["Authorization"]
    async with gateway_here(state, policy_kind="container") as gateway:
        gateway.client.headers["Authorization"] = authorization
        function = gateway.function("mine")
        error = await function.error(1)
        assert (error["status"], error["type"]) == (503, "function_barred")
        assert "The policy of the gateway does not allow mine" in error["message"]
        status = await function.status(memory=True)
        assert (status["stopped"], status["zygote"], status["processes"]) == ("barred", False, [])
        assert any("policy of the gateway" in line["text"] for line in await function.lines())
        assert failure(await upload(gateway, tmp_path))["type"] == "policy_violation"
        assert failure(await gateway.client.post("/v1/functions/mine/restart"))["type"] == "policy_violation"
    async with gateway_here(state) as gateway:
        gateway.client.headers["Authorization"] = authorization
        assert await gateway.function("mine").answer(2) == 2


async def test_the_policy_of_a_revoked_key_holds_for_what_was_deployed_with_it(
    state: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    save_file({"w": torch.zeros(1)}, weights / "model.safetensors")
    async with gateway_here(state) as gateway:
        made = await key(gateway, policy={"kind": "trusted", "snapshots": [f"{tmp_path}/*"]})
        assert (await upload(gateway, tmp_path / "code", f"snapshot={weights}")).status_code == 201
        async with gateway.at_home() as home:
            await home.delete(f"/v1/keys/{made['id']}")
    async with gateway_here(state) as gateway:
        await key(gateway, policy=TRUSTED)
        assert await gateway.function("mine").answer(1) == 1
    narrowed = (state / "access" / "keys.json").read_text().replace(f"{tmp_path}/*", "/elsewhere/*")
    (state / "access" / "keys.json").write_text(narrowed)
    async with gateway_here(state) as gateway:
        await key(gateway, policy=TRUSTED)
        error = await gateway.function("mine").error(1)
        assert error["type"] == "function_barred"
        assert f"The policy of the API key {made['id']} does not allow mine: snapshot" in error["message"]
        # A new deploy needs only the policy of the key that sends it.
        assert (await upload(gateway, tmp_path / "code", f"snapshot={weights}")).status_code == 201
        assert await gateway.function("mine").answer(2) == 2


async def test_a_key_that_is_not_trusted_changes_only_its_own_functions(state: Path, tmp_path: Path) -> None:
    """Otherwise, such a key could set an environment variable, such as LD_PRELOAD, for the process of another owner."""
    async with gateway_here(state, engine=ENGINE) as gateway:
        await key(gateway, name="owner", policy=TRUSTED)
        assert (await upload(gateway, tmp_path)).status_code == 201
        await key(gateway)
        client, mine = gateway.client, "/v1/functions/mine"
        changes: list[tuple[str, str, Any]] = [
            ("PUT", f"{mine}/secrets/LD_PRELOAD", {"value": "/evil.so"}),
            ("DELETE", f"{mine}/secrets/A", None),
            ("GET", f"{mine}/secrets", None),
            ("GET", f"{mine}/logs", None),
            ("GET", f"{mine}/webhooks/secret", None),
            ("POST", f"{mine}/restart", None),
            ("POST", f"{mine}/rollback", None),
            ("POST", f"{mine}/reset", None),
            ("POST", f"{mine}/pause", None),
            ("POST", f"{mine}/prefetch", None),
            ("DELETE", mine, None),
        ]
        for method, path, body in changes:
            error = failure(await client.request(method, path, json=body))
            assert (error["status"], error["type"]) == (403, "forbidden"), path
        assert (
            "deployed with another key"
            in failure(await upload(gateway, tmp_path, "image.name=a/b:1"))["message"]
        )
        # A secret needs an existing function. Otherwise, it would reach the next function of this name, whose owner may be another key.
        response = await client.put("/v1/functions/nobody/secrets/LD_PRELOAD", json={"value": "/evil.so"})
        assert failure(response)["type"] == "unknown_function"
        assert (await client.get(mine)).status_code == 200
        assert await gateway.function("mine").answer(1) == 1


async def test_a_key_that_is_not_trusted_learns_nothing_of_folders(state: Path, tmp_path: Path) -> None:
    (tmp_path / "payroll.py").write_text("def handler(event): ...")
    async with gateway_here(state, engine=ENGINE) as gateway:
        await key(gateway)
        messages = {
            failure(await gateway.client.post("/v1/functions", json={"path": path}))["message"]
            for path in (str(tmp_path), "/no/such/folder", "/etc")
        }
        assert len(messages) == 1


async def test_a_barred_function_reads_no_queue_and_fetches_nothing(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    queue = (
        '[[source]]\ntype = "sqs"\nqueue = "http://127.0.0.1:1/000000000000/orders"\nregion = "us-east-1"\n'
    )
    (tmp_path / "pilotflame.toml").write_text(queue)
    async with gateway_here(state) as gateway:
        assert (await upload(gateway, tmp_path)).status_code == 201
        assert (await gateway.function("mine").status())["sources"]
    async with gateway_here(state, policy_kind="container") as gateway:
        assert (await gateway.function("mine").status())["sources"] == []
        error = failure(await gateway.client.post("/v1/functions/mine/prefetch"))
        assert error["type"] == "function_barred"


@pytest.mark.parametrize("facts", [{"dialect": "nosuch", "entry": "FIFO"}, {"dialect": ["x"]}, {"entry": 7}])
async def test_a_zygote_that_lies_about_its_handler_does_not_stop_the_gateway(
    state: Path, tmp_path: Path, facts: dict[str, Any]
) -> None:
    # A gateway that opened this FIFO for reading would wait for a writer and not start.
    os.mkfifo(fifo := tmp_path / "handler.py")
    async with gateway_here(state) as gateway:
        await gateway.deploy(ECHO, name="liar")
        assert gateway.server is not None
        record = gateway.server.functions.get("liar").record
    file = state / "functions" / "liar" / record.revision / "revision.json"
    stored = json.loads(file.read_text())
    stored["handler"] |= {name: str(fifo) if value == "FIFO" else value for name, value in facts.items()}
    file.write_text(json.dumps(stored))
    async with asyncio.timeout(30), gateway_here(state) as gateway:
        response = await gateway.client.get("/v1/functions")
        assert [one["name"] for one in response.json()["functions"]] == ["liar"]
        await gateway.deploy(ECHO, name="liar")
        assert await gateway.function("liar").answer(1) == 1


async def test_snapshots_of_a_key_that_is_not_trusted_come_only_from_allowed_networks(
    state: Path, tmp_path: Path
) -> None:
    net = tmp_path / "net"
    net.mkdir()
    save_file({"w": torch.zeros(1)}, net / "model.safetensors")
    with FaultServer(net) as server:
        settings = ("image.name=registry/mine:1", f"snapshot={server.url}/model.safetensors")
        policy = {"kind": "container", "snapshots": [f"{server.url}/*"]}
        async with gateway_here(state, engine=ENGINE) as gateway:
            await key(gateway, policy=policy)
            error = failure(await upload(gateway, tmp_path / "code", *settings))
            assert error["type"] == "source_denied"
            assert "its address may not be connected to: loopback" in error["message"]
            assert "PILOTFLAME_SNAPSHOT_NETWORKS" in error["remedy"]
            assert server.requests == []
            authorization = gateway.client.headers["Authorization"]
        async with gateway_here(state, engine=ENGINE, snapshot_networks=("127.0.0.0/8",)) as gateway:
            gateway.client.headers["Authorization"] = authorization
            # The gateway may read the weights now. The deploy fails only afterwards, because the engine does not exist.
            error = failure(await upload(gateway, tmp_path / "code", *settings))
            assert "engine" in error["message"]
            assert server.requests != []


async def test_a_stored_revision_is_fetched_by_the_rule_of_the_present_policies(
    state: Path, tmp_path: Path
) -> None:
    net = tmp_path / "net"
    net.mkdir()
    save_file({"w": torch.zeros(1)}, net / "model.safetensors")
    with FaultServer(net) as server:
        async with gateway_here(state) as gateway:
            await key(gateway, policy=TRUSTED)
            snapshot = f"snapshot={server.url}/model.safetensors"
            assert (await upload(gateway, tmp_path / "code", snapshot)).status_code == 201
            authorization = gateway.client.headers["Authorization"]
            assert gateway.server is not None
            assert not identity(gateway.server.functions, "mine").access.own_only
        counted = len(server.requests)
        async with gateway_here(state, policy_kind="container") as gateway:
            gateway.client.headers["Authorization"] = authorization
            error = failure(await gateway.client.post("/v1/functions/mine/prefetch"))
            assert error["type"] == "function_barred"
            assert gateway.server is not None
            spec = gateway.server.functions.get("mine").revision.spec
            with pytest.raises(SourceDenied, match="its address may not be connected to: loopback"):
                await gateway.server.node.revisions.weights.prefetch(spec, {})
            # The present policies also decide which credentials its event sources may use.
            assert identity(gateway.server.functions, "mine").access.own_only
        assert len(server.requests) == counted
