"""Logs over HTTP: they outlive the gateway and the function, and name the author of each change and of each call."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import TRUSTED, Gate, Gateway, failure, gateway_here, gateway_process, until
from pilotflame.runtime.front.api import logs
from pilotflame.runtime.ground.access.deploy_policy import DeployPolicies

SOURCE = """
def handler(event, context):
    print("printed", event)
    context.log.warning("logged %s", event)
    if event == "raises":
        raise ValueError("no " + event)
    return event
"""


async def read(client: httpx.AsyncClient, path: str, **query: Any) -> list[dict[str, Any]]:
    response = await client.get(path, params=query)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


async def key(gateway: Gateway, *scopes: str, **more: Any) -> httpx.AsyncClient:
    policy = {"policy": TRUSTED} if "deploy" in scopes else {}
    async with gateway.at_home() as home:
        made = (await home.post("/v1/keys", json={"name": "test", "scopes": scopes, **policy, **more})).json()
    headers = {"Authorization": f"Bearer {made['key']}", "X-Key": made["id"]}
    return httpx.AsyncClient(base_url=gateway.url, headers=headers, timeout=60)


async def container_key(gateway: Gateway) -> httpx.AsyncClient:
    async with gateway.at_home() as home:
        made = (await home.post("/v1/keys", json={"name": "test", "scopes": ["deploy", "invoke"]})).json()
    return httpx.AsyncClient(
        base_url=gateway.url, headers={"Authorization": f"Bearer {made['key']}"}, timeout=60
    )


async def test_the_lines_of_one_worker(state: Path):
    async with gateway_here(state, drain_s=1.0) as gateway:
        function = await gateway.deploy(SOURCE, {"scale.max": 1})
        first = (await function.call("one")).headers["X-Worker-Id"]
        await gateway.client.post(f"/v1/functions/{function.name}/restart")
        second = (await function.call("two")).headers["X-Worker-Id"]
        assert first != second
        await function.logged("printed two")
        path = f"/v1/functions/{function.name}/logs"
        for worker, word in ((first, "one"), (second, "two")):
            lines = await read(gateway.client, path, worker=worker)
            assert [line["text"] for line in lines] == [f"printed {word}", f"logged {word}"]
            assert {line["source"] for line in lines} == {worker}
        assert await read(gateway.client, path, worker="none") == []


async def test_a_log_survives_a_restart_and_the_deletion_of_its_function(state: Path):
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(SOURCE, name="kept")
        revision = (await function.status())["revision"]
        await function.answer("one", X_Request_Id="first")
        assert failure(await function.call("raises", X_Request_Id="second"))["type"] == "handler_failed"
        await function.logged("no raises")
        await gateway.client.delete("/v1/functions/kept")
        assert gateway.process is not None
        gateway.process.kill()
        await gateway.process.wait()
    async with gateway_process(state) as gateway:
        path = "/v1/functions/kept/logs"
        lines = await read(gateway.client, path, lines=1000)
        texts = [line["text"] for line in lines]
        assert texts.index("printed one") < texts.index("printed raises")
        assert "kept was deleted" in texts
        assert lines == sorted(lines, key=lambda line: line["at"])
        mine = await read(gateway.client, path, request="second")
        assert [line["level"] for line in mine] == ["info", "warning", "error"]
        assert {(line["function"], line["revision"]) for line in mine} == {("kept", revision)}
        assert "handler.py" in mine[-1]["text"]
        assert "ValueError: no raises" in mine[-1]["text"]
        (printed,) = [line for line in lines if line["text"] == "printed one"]
        later = await read(gateway.client, path, since=printed["at"] + 1e-6, lines=1000)
        assert later == lines[lines.index(printed) + 1 :]
        assert (await read(gateway.client, path, until=printed["at"], lines=1)) == [printed]
        warned = await read(gateway.client, path, level="warning", request="first")
        assert [line["text"] for line in warned] == ["logged one"]
        assert failure(await gateway.client.get("/v1/functions/never/logs"))["type"] == "unknown_function"
        for query in ("level=loud", "since=yesterday", "lines=-1", "until=nan"):
            assert failure(await gateway.client.get(f"{path}?{query}"))["status"] == 400, query


async def test_a_follower_gets_stored_lines_then_new_ones_without_gap_or_repeat(state: Path):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    print('line', event)\n")
        for number in range(20):
            await function.answer(number)
        seen = []
        path = f"/v1/functions/{function.name}/logs?follow=1&lines=1000"
        async with gateway.client.stream("GET", path) as response:
            async for raw in response.aiter_lines():
                if (line := json.loads(raw))["text"].startswith("line "):
                    seen.append(line["text"])
                    if len(seen) < 40:
                        await function.answer(19 + len(seen))
                if "line 39" in seen:
                    break
        assert seen == [f"line {number}" for number in range(40)]


async def test_a_followed_log_ends_when_its_key_is_revoked_or_expires(state: Path):
    async with gateway_here(state, auth="always") as gateway, gateway.at_home() as home:
        admin = await key(gateway, "admin")
        gateway.client.headers.update(admin.headers)
        await gateway.deploy(SOURCE, name="followed")
        revoked, expiring = await key(gateway, "deploy"), await key(gateway, "deploy", expires_in_s=1.0)

        async def follow(reader: httpx.AsyncClient) -> int:
            async with reader.stream("GET", "/v1/functions/followed/logs?follow=1") as response:
                begun.release()
                async for _ in response.aiter_lines():
                    pass
            return response.status_code

        begun = asyncio.Semaphore(0)
        async with admin, revoked, expiring, asyncio.timeout(10):
            readers = [asyncio.create_task(follow(one)) for one in (revoked, expiring)]
            for _ in readers:
                await begun.acquire()
            await home.delete(f"/v1/keys/{revoked.headers['X-Key']}")
            assert await asyncio.gather(*readers) == [200, 200]
            assert (await revoked.get("/v1/functions/followed/logs")).status_code == 401


async def test_the_audit_log_says_who_changed_what(state: Path):
    async with gateway_here(state) as gateway:
        admin = await key(gateway, "admin")
        async with admin:
            gateway.client.headers.update(admin.headers)
            await gateway.deploy(SOURCE, name="audited")
            await admin.put("/v1/functions/audited/secrets/TOKEN", json={"value": "hidden value"})
            other = (await admin.post("/v1/keys", json={"name": "of Ada"})).json()
            await admin.delete(f"/v1/keys/{other['id']}")
            await admin.get("/v1/functions")
            await admin.delete("/v1/functions/audited")
            await admin.delete("/v1/functions/audited")
            lines = await read(admin, "/v1/logs/audit")
        by = f'by="key {admin.headers["X-Key"]}"'
        assert 'did="Start the gateway"' in lines.pop(0)["text"]
        texts = [line["text"] for line in lines]
        # The first key was made over the control socket, which works without a key.
        assert 'by="no key" from="the control socket" did="Create an API key"' in texts[0]
        assert all(by in text for text in texts[1:])
        for text, *facts in zip(
            texts[1:],
            ("Deploy", "secret", "Create an API key", "Revoke", "Delete a function", "Delete a function"),
            ('function="audited"', 'key="TOKEN"', 'name="of Ada"', other["id"], "audited", "audited"),
            ('outcome="201"', 'outcome="200"', 'outcome="201"', 'outcome="200"', 'outcome="200"',
             'outcome="404 unknown_function"'),
            strict=True,
        ):  # fmt: skip
            assert all(fact in text for fact in facts), (text, facts)
        assert "hidden value" not in "".join(texts)
        assert other["key"] not in "".join(texts)
        assert lines[-1]["level"] == "warning"


async def test_the_access_log_has_a_line_for_each_request_if_it_is_on(state: Path):
    async with gateway_here(state, access_log=True) as gateway:
        function = await gateway.deploy(SOURCE, name="called")
        await function.answer("fast", X_Request_Id="r-fast")
        await function.call("raises", X_Request_Id="r-raises")
        await function.client.post("/v2/called/run", json={"input": "job"})
        await function.client.get("/nothing/here")

        async def four() -> bool:
            return len(await read(gateway.client, "/v1/logs/access", lines=1000)) >= 5

        await until(four, "the lines of the requests")
        lines = await read(gateway.client, "/v1/logs/access", lines=1000)
        found = [(line["text"].split(" ms ")[0].rpartition(" ")[0], line["request_id"]) for line in lines]
        assert ("POST /invoke/{function} 200", "r-fast") in found
        assert ("POST /invoke/{function} 500", "r-raises") in found
        assert any(text == "POST /v2/{function}/run 200" for text, _ in found)
        assert any(text == "GET - 404" for text, _ in found)
        assert "function=called" in next(line for line in lines if line["request_id"] == "r-fast")["text"]


async def test_the_client_behind_a_trusted_proxy_is_named(state: Path, capfd: pytest.CaptureFixture[str]):
    proxied = {"X-Forwarded-For": "192.0.2.9, 198.51.100.7"}
    async with gateway_here(
        state, access_log=True, log_format="collector", trusted_proxies=("127.0.0.0/8", "::1/128")
    ) as gateway:
        function = await gateway.deploy(SOURCE, name="called")
        # The first request is a plain call. aiohttp reads the second request.
        await function.answer("plain", X_Forwarded_For=proxied["X-Forwarded-For"])
        await gateway.client.post("/v2/called/run", json={"input": "job"}, headers=proxied)
        await gateway.client.delete("/v1/functions/called", headers=proxied)
    found = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    access = {one["path"]: one for one in found if one["log"] == "access"}
    for path in ("/invoke/{function}", "/v2/{function}/run"):
        line = access[path]
        assert (line["from"], line["status"], line["function"]) == ("198.51.100.7", 200, "called")
    deleted = [one for one in found if one["log"] == "audit" and one.get("function") == "called"][-1]
    assert (deleted["from"], deleted["outcome"]) == ("198.51.100.7", "200")
    assert "printed plain" in [one["text"] for one in found if one["log"] == "function"]


async def test_without_the_setting_there_is_no_access_log(state: Path):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(SOURCE)
        await function.answer("one")
        assert await read(gateway.client, "/v1/logs/access") == []


async def test_warnings_and_the_last_errors_are_shown_also_after_a_restart(state: Path):
    threaded = "import threading\nevent = threading.Event()\nthreading.Thread(target=event.wait, daemon=True).start()\n"
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(threaded + SOURCE, name="warned")
        (warning,) = (await function.status())["warnings"]
        await function.call("raises", X_Request_Id="failed-1")
        await function.logged("no raises")
        refused = await gateway.send("def setup():\n    raise OSError('no disk')\n" + SOURCE, name="warned")
        assert failure(refused)["type"] == "handler_setup_failed"
    async with gateway_here(state) as gateway:
        status = await gateway.function("warned").status()
        assert status["warnings"] == [warning]
        assert "spawned, not forked" in warning
        first, last = status["last_errors"][0], status["last_errors"][-1]
        assert (first["request_id"], "no raises" in first["text"]) == ("failed-1", True)
        assert "was not deployed" in last["text"]
        assert "no disk" in last["text"]
        assert "Traceback" not in first["text"]


async def test_a_follower_ends_when_the_function_is_deleted(state: Path):
    async with gateway_here(state) as gateway:
        await gateway.deploy(SOURCE, name="followed")
        begun = asyncio.Event()

        async def follow() -> str:
            async with gateway.client.stream("GET", "/v1/functions/followed/logs?follow=1") as response:
                begun.set()
                return [json.loads(raw)["text"] async for raw in response.aiter_lines()][-1]

        async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
            following = tasks.create_task(follow())
            await begun.wait()
            await gateway.client.delete("/v1/functions/followed")
        assert following.result() == "followed was deleted"


async def test_a_former_owners_lines_and_secret_are_not_the_next_owners(
    state: Path, monkeypatch: pytest.MonkeyPatch
):
    async with gateway_here(state, auth="always", engine="unix:///nonexistent/engine.sock") as gateway:
        admin, container = await key(gateway, "admin"), await container_key(gateway)
        gateway.client.headers.update(admin.headers)
        async with admin, container:
            function = await gateway.deploy(SOURCE, name="taken")
            assert (await function.call("raises")).status_code == 500
            await function.logged("printed raises")
            path, secret = "/v1/functions/taken/logs", "/v1/functions/taken/webhooks/secret"
            before = (await admin.get(secret)).json()["secret"]
            await admin.delete("/v1/functions/taken")
            assert "printed raises" in [line["text"] for line in await read(admin, path)]
            await gateway.deploy(SOURCE, name="taken")
            assert (await admin.get("/v1/functions/taken")).json()["last_errors"] == []
            assert (await admin.get(secret)).json()["secret"] == before
            # Act as if a key that is not trusted had deployed the function.
            monkeypatch.setattr(DeployPolicies, "confined", lambda _policies, _key: True)
            assert "printed raises" not in [line["text"] for line in await read(container, path)]
            own = (await container.get(secret)).json()["secret"]
            assert own != before


async def test_what_a_deleted_function_still_prints_is_not_in_the_next_functions_log(
    state: Path, monkeypatch: pytest.MonkeyPatch
):
    source = "import gate\ndef handler(event):\n    print('early')\n    gate.wait()\n    print('late')\n    return event\n"
    async with (
        gateway_here(state, auth="always", engine="unix:///nonexistent/engine.sock") as gateway,
        Gate(state.parent / "gate") as gate,
    ):
        admin, container = await key(gateway, "admin"), await container_key(gateway)
        gateway.client.headers.update(admin.headers)
        async with admin, container:
            function = await gateway.deploy(source, name="taken", gate=gate)
            running = asyncio.create_task(function.answer("one"))
            await gate.next()
            await admin.delete("/v1/functions/taken")
            path = "/v1/functions/taken/logs"
            failed = await gateway.send("print('tried')\nraise OSError('refused')", name="taken")
            assert "refused" in failure(failed)["message"]
            assert "tried" in [line["text"] for line in await read(admin, path)]
            next_one = await gateway.deploy(SOURCE, name="taken")
            await next_one.answer("next")
            gate.open()
            assert await running == "one"
            await next_one.logged("logged next")
            # Act as if a key that is not trusted had deployed the function.
            monkeypatch.setattr(DeployPolicies, "confined", lambda _policies, _key: True)
            texts = [line["text"] for line in await read(container, path)]
            assert "printed next" in texts
            assert not {"early", "late", "tried"} & set(texts)
            assert not any("refused" in text for text in texts)


async def test_lines_that_are_sent_share_a_room(state: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logs, "MAX_SENDING_BYTES", 1 << 20)
    async with gateway_here(state) as gateway:
        await gateway.deploy(SOURCE, name="long")
        refused = await gateway.client.get("/v1/functions/long/logs?lines=10000")
        assert (refused.status_code, failure(refused)["type"]) == (503, "overloaded")
        assert await read(gateway.client, "/v1/functions/long/logs", lines=10)
