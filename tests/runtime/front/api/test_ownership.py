"""The owner of a function sees all of it. On each route, other keys see only the public part."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import tarfile
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import pytest_asyncio
from live import TRUSTED, Gateway, gateway_here, short_folder
from pilotflame.runtime.front.api import admin
from pilotflame.runtime.front.pages import console
from pilotflame.runtime.node.functions.status import FunctionStatus
from pilotflame.runtime.node.packaging.code import KEPT_FILE
from safetensors.numpy import save_file

pytestmark = pytest.mark.asyncio(loop_scope="module")

ENGINE = "unix:///nonexistent/engine.sock"
ENDLESS_S = 0.3
METHODS = ("get", "post", "put", "delete", "patch")
HANDLER = """
def handler(event):
    # A caller sees what was printed during a job of its own.
    if "planted" in str(event):
        print("planted-log", event)
    raise ValueError("no")  # planted-traceback
"""
BROKEN = """
def setup(context):
    raise RuntimeError("no")  # planted-setup

def handler(event):
    return event
"""
SETTINGS = {
    "env.PLACE": "planted-env", "alerts.url": "https://alerts.example/planted-alert", "request_log.store": "/tmp/planted-store",
    "after": "planted-upstream", "request_log.sample": 1e-9, "budget.seconds_per_day": 1000,
    "schedule": [{"cron": "0 4 1 1 *", "workers": 1}],
}  # fmt: skip
# A handler whose snapshot is deleted after the deploy.
UNREAD = "def setup(context):\n    context.snapshot.open()\n\ndef handler(event):\n    return event\n"
STARTING = ("/invoke/{function}", "/v2/{function}/warmup", "/v2/{function}/runsync")
STARTED = ("victim", "broken", "unread")
PLANTED = ("place", "log", "traceback", "setup", "env", "alert", "store", "input", "upstream")
# The private fields of a function's status, and of its row in the console, as other keys see them.
PRIVATE: dict[str, Any] = {
    "entry": "", "snapshot": None, "snapshots": {}, "next_rung": None, "next_rung_at": None, "cold_because": "", "cold_since": None, "activations": 0, "rest_mb": None,
    "last_cold_start_ms": None, "last_cold_start_phases_ms": {}, "latest_cold_starts": [], "latency_curve": [], "budget": None,
    "failing": None, "warnings": [], "last_errors": [], "sources": [], "schedules": [], "setting_origins": {}, "processes": [],
}  # fmt: skip
PRIVATE_OF_ROW: dict[str, Any] = {
    "next_rung": None, "next_rung_at": None, "cold_because": "", "rest_mb": None, "last_cold_phases_ms": {}, "last_cold_start": None,
}  # fmt: skip
OTHERS: list[dict[str, Any]] = [
    {"name": "containers", "scopes": ["deploy", "invoke"]},
    {"name": "monitor", "scopes": ["read", "invoke"]},
]


class House(NamedTuple):
    """A gateway with the functions of a trusted key, and a job."""

    gateway: Gateway
    admin: httpx.AsyncClient
    owner: httpx.AsyncClient
    job: str

    async def key(self, **fields: Any) -> httpx.AsyncClient:
        made = await self.admin.post("/v1/keys", json=fields)
        assert made.status_code == 201, made.text
        headers = {"Authorization": f"Bearer {made.json()['key']}"}
        return httpx.AsyncClient(base_url=self.gateway.url, headers=headers, timeout=30)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[House]:
    with short_folder() as folder:
        async with (
            gateway_here(folder / "state", auth="always", engine=ENGINE) as gateway,
            gateway.at_home() as admin,
            await House(gateway, admin, admin, "").key(
                name="team", scopes=["deploy", "invoke"], policy=TRUSTED
            ) as owner,
        ):
            gateway.client.headers.update(owner.headers)
            await gateway.deploy(HANDLER, SETTINGS, name="victim")
            await gateway.deploy(BROKEN, name="broken", check=False)
            weights = folder / "planted-place"
            weights.mkdir()
            save_file({"weight": np.eye(8)}, weights / "model.safetensors")
            # Allow one attempt, because `text_of` does not wait for the end of further attempts of a job.
            unread = {"snapshot": str(weights), "attempts": 1}
            await gateway.deploy(UNREAD, unread, name="unread", check=False)
            (weights / "model.safetensors").unlink()
            run = await owner.post("/v2/victim/runsync?wait=20000", json={"input": {"x": "planted-input"}})
            assert run.json()["status"] == "FAILED", run.text
            yield House(gateway, admin, owner, run.json()["id"])


async def text_of(client: httpx.AsyncClient, method: str, url: str, **sent: Any) -> str:
    """Return status, headers and the text that arrives in time: some answers are endless."""
    text = b""
    try:
        async with (
            asyncio.timeout(ENDLESS_S if method == "get" else 30.0),
            client.stream(method, url, **sent) as response,
        ):
            text = f"{response.status_code} {response.headers}".encode()
            async for part in response.aiter_bytes():
                text += part
    except TimeoutError:
        pass
    return text.decode(errors="replace")


async def everything(house: House, client: httpx.AsyncClient) -> dict[str, str]:
    """Try every route about the functions and the job, and return what was answered."""
    document = (await house.admin.get("/openapi.json")).json()
    found = dict[str, str]()
    for path, operations in document["paths"].items():
        for method in (name for name in METHODS if name in operations):
            for function in STARTED if path in STARTING else ("victim",):
                url = path
                while "{" in url:
                    before, _, rest = url.partition("{")
                    name, _, after = rest.partition("}")
                    url = (
                        before
                        + (function if name in ("function", "model", "name", "version") else house.job)
                        + after
                    )
                body = {"input": 1, "model": function, "version": function, "workers": 1, "wait_s": 20}
                sent = {"json": body} if method != "get" else {}
                found[f"{method} {url}"] = await text_of(client, method, url, **sent)
    return found


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: fields["name"])
async def test_no_route_shows_what_is_private_to_another_key(house: House, fields: dict[str, Any]) -> None:
    async with await house.key(**fields) as other:
        answers = await everything(house, other)
    shown = [f"{route}: {text}" for route, text in answers.items() if "planted-" in text]
    assert not shown, shown
    # The answers have the public part.
    assert "model.safetensors cannot be read" in answers["post /invoke/unread"]
    assert '"name":"victim"' in answers["get /v1/functions/victim"]
    assert '"victim"' in answers["get /v1/functions"]


@pytest.mark.parametrize("fields", OTHERS, ids=lambda fields: fields["name"])
async def test_other_keys_see_the_public_fields_of_a_function_alone(
    house: House, fields: dict[str, Any]
) -> None:
    async def seen(client: httpx.AsyncClient, path: str) -> Any:
        return (await client.get(f"/v1/{path}")).json()

    path = "functions/victim"
    async with await house.key(**fields) as other:
        for route in (path, "functions"):
            status = await seen(other, route)
            status = status if route == path else status["functions"][-1]
            assert {name: status[name] for name in PRIVATE} == PRIVATE
            assert (status["name"], status["desired"]["because"]) == ("victim", [])
            assert status["settings"]["schedule"] == []
        rows = [(await seen(client, "console"))["functions"][-1] for client in (other, house.owner)]
        assert (await seen(other, f"{path}/decisions"))["decisions"] == []
        assert (await seen(other, f"{path}/arrivals"))["arrivals"] == []
    assert {name: rows[0][name] for name in PRIVATE_OF_ROW} == PRIVATE_OF_ROW
    assert {name: rows[0][name] for name in console.PUBLIC_FIELDS} == {
        name: rows[1][name] for name in console.PUBLIC_FIELDS
    }
    assert rows[1]["last_cold_start"]["request_id"]
    status = await seen(house.owner, path)
    assert all(status[name] for name in ("entry", "schedules", "latest_cold_starts", "last_errors", "budget"))
    assert all(
        one["cause"] and one["text"] for one in (await seen(house.owner, f"{path}/decisions"))["decisions"]
    )
    assert (await seen(house.owner, f"{path}/arrivals"))["arrivals"]


async def test_a_new_field_of_a_function_is_private_until_this_list_or_that_of_public_fields_has_it() -> None:
    for public, private, every in (
        (admin.PUBLIC_FIELDS | {"settings", "desired"}, PRIVATE, FunctionStatus.model_fields),
        (console.PUBLIC_FIELDS, PRIVATE_OF_ROW, console.ConsoleFunction.__annotations__),
    ):
        assert not public & private.keys()
        assert public | private.keys() == set(every)


async def test_the_owner_sees_all_of_it(house: House) -> None:
    """If the owner did not see the planted words, the tests of other keys would prove nothing."""
    found = [
        await text_of(house.owner, "get", "/v1/functions/victim"),
        await text_of(house.owner, "get", "/v1/functions/victim/logs"),
        await text_of(house.owner, "post", "/invoke/victim", json=1),
        await text_of(house.owner, "post", "/v2/broken/warmup?wait_s=20", json={}),
        await text_of(house.owner, "post", "/v2/unread/warmup?wait_s=20", json={}),
    ]
    for word in PLANTED:
        assert any(f"planted-{word}" in text for text in found), (word, found)


async def test_another_owner_ends_no_warm_up(house: House) -> None:
    async with await house.key(**OTHERS[0]) as other:
        for method, url in (
            ("post", "/v2/victim/warmup?workers=0"),
            ("put", "/torchserve/models/victim?min_worker=0"),
        ):
            assert (await text_of(other, method, url)).startswith("403"), url
            assert not (await text_of(house.owner, method, url)).startswith("403"), url


async def test_an_upload_tells_no_digest_of_another_owner(house: House) -> None:
    """The answer to a kept file with the right digest is the same as with a wrong digest."""
    revision = (await house.owner.get("/v1/functions/victim")).json()["revision"]
    right = hashlib.sha256(HANDLER.encode()).hexdigest()

    async def answer(client: httpx.AsyncClient, digest: str) -> tuple[int, str]:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w:gz") as archive:
            kept = json.dumps({"files": [{"path": "handler.py", "sha256": digest}]}).encode()
            member = tarfile.TarInfo(KEPT_FILE)
            member.size = len(kept)
            archive.addfile(member, io.BytesIO(kept))
        query = {
            "folder": "victim",
            "base": f"victim/{revision}",
            "check": "0",
            "set": "image.name=registry/mine:1",
        }
        response = await client.post(
            "/v1/functions",
            content=packed.getvalue(),
            params=query,
            headers={"Content-Type": "application/gzip"},
        )
        return response.status_code, response.json().get("error", {}).get("message", "")

    async with await house.key(**OTHERS[0]) as other:
        found = [await answer(other, digest) for digest in (right, "0" * 64)]
        files = {"files": [{"path": "handler.py", "sha256": right}]}
        asked = await other.post("/v1/functions/victim/lacking", json=files)
    assert found[0] == found[1]
    assert (found[0][0], asked.status_code) == (403, 403)
    assert (await answer(house.owner, "0" * 64))[0] == 409


async def test_a_container_of_sagemaker_shows_no_traceback_to_another_key() -> None:
    with short_folder() as folder:
        settings = {"auth": "always", "engine": ENGINE, "bare_paths": True}
        async with gateway_here(folder / "state", **settings) as gateway, gateway.at_home() as admin:
            house = House(gateway, admin, admin, "")
            async with (
                await house.key(name="team", scopes=["deploy", "invoke"], policy=TRUSTED) as owner,
                await house.key(**OTHERS[0]) as other,
            ):
                gateway.client.headers.update(owner.headers)
                await gateway.deploy(BROKEN, name="broken", check=False)
                answer = await other.post("/invocations", json=1)
    assert answer.status_code == 500
    assert "planted-setup" not in answer.text


@pytest.mark.parametrize(
    "fields", [*OTHERS, {"name": "caller", "scopes": ["invoke"]}], ids=lambda fields: fields["name"]
)
async def test_lambdas_configuration_tells_another_key_nothing_of_the_code(
    house: House, fields: dict[str, Any]
) -> None:
    async with await house.key(**fields) as other:
        answers = [await one.get("/lambda/2015-03-31/functions/victim") for one in (house.owner, other)]
    assert [one.status_code for one in answers] == [200, 200], [one.text for one in answers]
    mine, theirs = (answer.json()["Configuration"] for answer in answers)
    assert mine["CodeSha256"]
    assert mine["Handler"]
    assert (theirs["CodeSha256"], theirs["Handler"]) == ("", "")
    assert theirs["FunctionName"] == "victim"
