"""The routes of keys and secrets: a secret reaches only its function's workers; a key's token is shown once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import Gateway, failure, gateway_here, gateway_process

pytestmark = pytest.mark.asyncio(loop_scope="module")

TELLS = """
import os
def build(context):
    return os.environ.get("TOKEN")
def setup(context):
    return [context.state, os.environ.get("TOKEN")]
def handler(event, context):
    return [*context.state, os.environ.get("TOKEN"), os.environ.get("OTHER")]
"""
# The import starts a thread, so its workers cannot be forked and are spawned.
SPAWNED = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + TELLS


async def put(gateway: Gateway, function: str, key: str, value: str) -> dict[str, Any]:
    response = await gateway.client.put(f"/v1/functions/{function}/secrets/{key}", json={"value": value})
    assert response.status_code == 200, response.text
    assert value not in response.text
    return dict(response.json())


@pytest.mark.parametrize("source", [TELLS, SPAWNED], ids=["forked", "spawned"])
async def test_a_secret_reaches_setup_and_handler_of_its_function_alone(gateway: Gateway, source: str):
    kind = "forked" if source is TELLS else "spawned"
    mine, other = f"mine-{kind}", f"other-{kind}"
    told = await put(gateway, mine, "TOKEN", "s3cr3t-1")
    assert told == {"function": mine, "secret": "TOKEN", "replaced": False, "deployed": False}
    function = await gateway.deploy(source, name=mine)
    stranger = await gateway.deploy(source, name=other)
    assert bool(function.described["warnings"]) is (kind == "spawned")
    assert await function.answer() == [None, "s3cr3t-1", "s3cr3t-1", None]
    assert await stranger.answer() == [None, None, None, None]


async def test_a_change_reaches_workers_that_start_later(gateway: Gateway):
    function = await gateway.deploy(TELLS, {"env.OTHER": "plain"}, name="changes")
    assert await function.answer() == [None, None, None, "plain"]
    assert (await put(gateway, "changes", "TOKEN", "first"))["deployed"]
    assert (await put(gateway, "changes", "OTHER", "over the settings'"))["replaced"] is False
    # This worker runs already.
    assert await function.answer() == [None, None, None, "plain"]
    again = await gateway.deploy(TELLS, {"env.OTHER": "plain"}, name="changes")
    assert await again.answer() == [None, "first", "first", "over the settings'"]
    listed = await gateway.client.get("/v1/functions/changes/secrets")
    assert listed.json() == {"function": "changes", "secrets": ["OTHER", "TOKEN"]}
    assert (await gateway.client.delete("/v1/functions/changes/secrets/OTHER")).status_code == 200
    error = failure(await gateway.client.delete("/v1/functions/changes/secrets/OTHER"))
    assert (error["status"], error["type"]) == (404, "unknown_secret")


async def test_a_later_function_of_the_same_name_does_not_get_them(gateway: Gateway):
    await put(gateway, "again", "TOKEN", "of the first")
    await gateway.deploy(TELLS, name="again")
    assert (await gateway.client.delete("/v1/functions/again")).status_code == 200
    assert not (gateway.state / "access" / "secrets" / "again.json").exists()
    function = await gateway.deploy(TELLS, name="again")
    assert await function.answer() == [None, None, None, None]


async def test_no_other_process_holds_a_secret(state: Path):
    """Checked in /proc: environments and memory of zygote, base, standby and the other function's worker."""
    # In two parts, so that the text of this file is not found.
    secret = "n0b0dy-" + "w1ll-f1nd"
    async with gateway_process(state) as gateway:
        function = await gateway.deploy(TELLS, name="mine")
        await put(gateway, "mine", "TOKEN", secret)
        function = await gateway.deploy(TELLS, name="mine")
        stranger = await gateway.deploy(TELLS, name="other")
        assert (await function.answer())[1] == secret
        assert await stranger.answer() == [None, None, None, None]
        await function.settled(ready=1, standby=True)
        assert gateway.process is not None
        tree = psutil.Process(gateway.process.pid)
        processes = [tree, *tree.children(recursive=True)]
        for process in processes:
            assert secret.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
        [worker] = await function.pids("worker")
        holders = {process.pid for process in processes if _holds(process.pid, secret.encode())}
        # Otherwise the search found nothing at all.
        assert worker in holders
        assert holders <= {worker, gateway.process.pid}
        said = [await gateway.client.get(path) for path in ("/v1/functions", "/openapi.json", "/metrics")]
        said += [await gateway.client.get(f"/v1/functions/mine{path}") for path in ("", "/secrets", "/logs")]
        assert all(secret not in response.text for response in said)
    assert secret not in (state.parent / "gateway.log").read_text()
    files = [
        path for path in state.rglob("*") if path.is_file() and secret in path.read_text(errors="replace")
    ]
    assert [path.name for path in files] == ["mine.json"]


def _holds(pid: int, what: bytes) -> bool:
    """Return True if a process has these bytes in writable memory."""
    folder = Path(f"/proc/{pid}")
    with (folder / "maps").open() as maps, (folder / "mem").open("rb", 0) as memory:
        for line in maps:
            span, access, *_ = line.split()
            begin, end = (int(part, 16) for part in span.split("-"))
            if not access.startswith("rw") or end - begin > 256 << 20:
                continue
            try:
                memory.seek(begin)
                if what in memory.read(end - begin):
                    return True
            # The mapping was removed, or is not readable.
            except OSError:
                continue
    return False


@pytest.mark.parametrize(
    ("key", "body", "status"),
    [
        ("TOKEN", b"", 400),
        ("TOKEN", b'"s3cr3t"', 400),
        ("TOKEN", b'{"value": 5}', 400),
        ("TOKEN", b'{"value": "s3cr3t", "more": 1}', 400),
        ("TOKEN", b'{"value": "s3cr3t\\u0000"}', 400),
        ("TOKEN", b'{"value": "s3cr3t\\ud800"}', 400),
        ("TOKEN", b'{"value": "s3cr3t\xff"}', 400),
        ("NOT-ONE", b'{"value": "s3cr3t"}', 400),
        ("TOKEN", b'{"value": "' + b"s3cr3t" * 20_000 + b'"}', 400),
        ("TOKEN", b'{"value": "' + b"s3cr3t" * 200_000 + b'"}', 413),
    ],
)
async def test_an_invalid_secret_is_refused_and_not_quoted(
    gateway: Gateway, key: str, body: bytes, status: int
):
    response = await gateway.client.put(f"/v1/functions/refused/secrets/{key}", content=body)
    assert failure(response)["status"] == status
    assert "s3cr3t" not in response.text
    assert (await gateway.client.get("/v1/functions/refused/secrets")).json()["secrets"] == []


async def test_invalid_function_names_are_refused(gateway: Gateway):
    for name in ("Not.One", "..%2F..%2Fkeys", "models"):
        response = await gateway.client.put(f"/v1/functions/{name}/secrets/TOKEN", json={"value": "x"})
        assert failure(response)["type"] == "settings_invalid", name


async def test_a_token_is_shown_once_and_a_key_can_be_revoked(state: Path):
    async with gateway_here(state) as gateway:
        made = await gateway.client.post(
            "/v1/keys", json={"name": "a", "functions": ["f"], "rate_per_s": 1.5}
        )
        assert made.status_code == 201
        key = made.json()
        token = key.pop("key")
        async with gateway.at_home() as owner:
            listed = await owner.get("/v1/keys")
            assert listed.json() == {"keys": [key]}
            assert token.rpartition("_")[2] not in listed.text
            error = failure(await owner.post("/v1/keys", content=b'{"name": 5}'))
            assert (error["status"], error["type"]) == (400, "bad_json")
            assert (await owner.delete(f"/v1/keys/{key['id']}")).json() == {"revoked": key["id"], "name": "a"}
            error = failure(await owner.delete(f"/v1/keys/{key['id']}"))
            assert (error["status"], error["type"]) == (404, "unknown_key")
        said = json.dumps([path.read_text(errors="replace") for path in state.rglob("*") if path.is_file()])
        assert token.rpartition("_")[2] not in said
