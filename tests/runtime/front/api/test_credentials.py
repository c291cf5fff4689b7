"""The routes of keys and secrets: a secret reaches only its function's workers; a key's token is shown once."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import psutil
import pytest
from live import Gate, Gateway, failure, gateway_here, gateway_process, gone, until
from pilotflame.runtime.plugins.images.build_context import write_context

pytestmark = pytest.mark.asyncio(loop_scope="module")

TELLS = """
import os
imported = os.environ.get("TOKEN")
def build(context):
    return [imported, os.environ.get("TOKEN")]
def setup(context):
    return [*context.state, os.environ.get("TOKEN")]
def handler(event, context):
    return [*context.state, os.environ.get("TOKEN"), os.environ.get("OTHER")]
"""
# The import of this handler starts a thread, so its workers cannot be forked and are spawned.
SPAWNED = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n" + TELLS


async def put(gateway: Gateway, function: str, key: str, value: str) -> dict[str, Any]:
    response = await gateway.client.put(f"/v1/functions/{function}/secrets/{key}", json={"value": value})
    assert response.status_code == 200, response.text
    assert value not in response.text
    return dict(response.json())


@pytest.mark.parametrize("source", [TELLS, SPAWNED], ids=["forked", "spawned"])
async def test_a_secret_reaches_all_code_of_its_function_and_no_other_function(gateway: Gateway, source: str):
    kind = "forked" if source is TELLS else "spawned"
    mine, other = f"mine-{kind}", f"other-{kind}"
    told = await put(gateway, mine, "TOKEN", "s3cr3t-1")
    assert told == {"function": mine, "secret": "TOKEN", "replaced": False, "deployed": False}
    function = await gateway.deploy(source, name=mine)
    stranger = await gateway.deploy(source, name=other)
    assert bool(function.described["warnings"]) is (kind == "spawned")
    assert await function.answer() == [*["s3cr3t-1"] * 4, None]
    assert await stranger.answer() == [None] * 5


def number_of(worker: str) -> int:
    return int(worker.rpartition("-")[2])


async def test_a_changed_secret_replaces_zygote_and_workers_and_loses_no_call(gateway: Gateway, gate: Gate):
    source = TELLS.replace(
        "def handler(event, context):", "def handler(event, context):\n    event and gate.wait()"
    )
    function = await gateway.deploy(
        "import gate\n" + source, {"env.OTHER": "plain", "concurrency": 2}, name="changes", gate=gate
    )
    assert await function.answer() == [*[None] * 4, "plain"]
    [zygote] = await function.pids("zygote")
    used = number_of((await function.call()).headers["x-worker-id"])
    waiting = asyncio.create_task(function.answer(1))
    arrival = await gate.next()
    assert (await put(gateway, "changes", "TOKEN", "first"))["deployed"]
    assert (await put(gateway, "changes", "OTHER", "over the settings'"))["replaced"] is False

    async def changed() -> bool:
        return await function.answer() == [*["first"] * 4, "over the settings'"]

    await until(changed, "an answer with the new secrets")
    assert number_of((await function.call()).headers["x-worker-id"]) > used
    # The old worker still runs its call, in the old environment.
    arrival.go()
    assert await waiting == [*[None] * 4, "plain"]
    await gone(zygote)
    listed = await gateway.client.get("/v1/functions/changes/secrets")
    assert listed.json() == {"function": "changes", "secrets": ["OTHER", "TOKEN"]}
    assert (await gateway.client.delete("/v1/functions/changes/secrets/OTHER")).status_code == 200
    error = failure(await gateway.client.delete("/v1/functions/changes/secrets/OTHER"))
    assert (error["status"], error["type"]) == (404, "unknown_secret")


async def test_a_change_starts_nothing_of_a_function_that_rests(gateway: Gateway):
    settings = {"scale.idle_timeout_s": 0, "scale.rest": "local"}
    function = await gateway.deploy(TELLS, settings, name="rests")
    await function.settled(zygote=False)
    await put(gateway, "rests", "TOKEN", "new")
    status = await function.settled(zygote=False)
    assert await function.answer() == [*["new"] * 4, None]
    assert (await function.status())["activations"] == status["activations"] + 1


async def test_a_change_that_cannot_be_built_leaves_the_old_processes(gateway: Gateway):
    await put(gateway, "keeps", "TOKEN", "1")
    source = "import os\nnumber = int(os.environ['TOKEN'])\ndef handler(event):\n    return number"
    function = await gateway.deploy(source, name="keeps")
    await put(gateway, "keeps", "TOKEN", "one")
    told = await function.logged("does not have its changed secrets")
    assert told["level"] == "error"
    assert await function.answer() == 1


MISSING = """
import os
def need():
    return os.environ["TOKEN"]
{}
def handler(event):
    return need()
"""


async def test_a_missing_variable_is_told_with_the_command_that_sets_it(gateway: Gateway):
    for source in (MISSING.format("need()"), MISSING.format("def build():\n    need()")):
        error = failure(await gateway.send(source))
        assert "KeyError: 'TOKEN'" in error["message"]
        assert "`pilotflame secrets set FUNCTION TOKEN`" in error["remedy"]
    function = await gateway.deploy(MISSING.format(""))
    error = await function.error()
    assert "`pilotflame secrets set FUNCTION TOKEN`" in error["remedy"]
    # A missing key of another dict is no missing variable, so the remedy does not name the command.
    function = await gateway.deploy("def handler(event):\n    return event['TOKEN']")
    assert "secrets set" not in str(await function.error({}))


async def test_a_later_function_of_the_same_name_does_not_get_them(gateway: Gateway):
    await put(gateway, "again", "TOKEN", "of the first")
    await gateway.deploy(TELLS, name="again")
    assert (await gateway.client.delete("/v1/functions/again")).status_code == 200
    assert not (gateway.state / "access" / "secrets" / "again.json").exists()
    function = await gateway.deploy(TELLS, name="again")
    assert await function.answer() == [None] * 5


async def test_its_own_processes_alone_hold_a_secret_and_only_in_memory(state: Path):
    """Search in the arguments, environments and memory of all processes, in answers, in all files, and in an image's context."""
    # Write the secret in two parts, so that the search does not find the text of this file.
    secret = "n0b0dy-" + "w1ll-f1nd"
    async with gateway_process(state) as gateway:
        await put(gateway, "mine", "TOKEN", secret)
        function = await gateway.deploy(TELLS, name="mine")
        stranger = await gateway.deploy(TELLS, name="other")
        assert await function.answer() == [*[secret] * 4, None]
        assert await stranger.answer() == [None] * 5
        await function.settled(ready=1, standby=True)
        assert gateway.process is not None
        tree = psutil.Process(gateway.process.pid)
        processes = [tree, *tree.children(recursive=True)]
        for process in processes:
            assert secret not in " ".join(process.cmdline())
            assert secret.encode() not in Path(f"/proc/{process.pid}/environ").read_bytes()
        own = [pid for role in ("worker", "zygote", "standby") for pid in await function.pids(role)]
        holders = {process.pid for process in processes if _holds(process.pid, secret.encode())}
        # The search must find the secret in the function's own processes. Otherwise, the search itself does not work.
        assert len(own) == 3
        assert set(own) <= holders
        assert holders <= {*own, gateway.process.pid}
        said = [await gateway.client.get(path) for path in ("/v1/functions", "/openapi.json", "/metrics")]
        said += [await gateway.client.get(f"/v1/functions/mine{path}") for path in ("", "/secrets", "/logs")]
        assert all(secret not in response.text for response in said)
        [code] = (state / "functions" / "mine").rglob("handler.py")
        write_context(code.parent, state.parent / "context")
    assert secret not in (state.parent / "gateway.log").read_text()
    found = [path for path in state.parent.rglob("*") if path.is_file()]
    assert any("context" in path.parts for path in found)
    assert [path.name for path in found if secret.encode() in path.read_bytes()] == ["mine.json"]


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
            # Skip a mapping that was removed or is not readable.
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
    async with gateway_here(state) as gateway, gateway.at_home() as owner:
        order = {"name": "a", "functions": ["f"], "rate_per_s": 1.5}
        # The first key must have the scope admin. Otherwise, one request of any program on this machine would lock the owner out.
        error = failure(await gateway.client.post("/v1/keys", json=order))
        assert (error["status"], "keys create NAME --scope admin" in error["remedy"]) == (400, True)
        first = (await gateway.client.post("/v1/keys", json={"name": "first", "scopes": ["admin"]})).json()
        assert (await owner.delete(f"/v1/keys/{first['id']}")).status_code == 200
        made = await owner.post("/v1/keys", json=order)
        assert made.status_code == 201
        key = made.json()
        token = key.pop("key")
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
