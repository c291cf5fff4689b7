"""A function that is deployed, paused, rolled back or deleted on one gateway is so on all gateways with the same database."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import pytest_asyncio
from live import Gateway, failure, gateway_here, short_folder, until
from pilotflame.errors import GatewayError, RequirementsError
from pilotflame.runtime.ground.storing.postgres import PostgresConnection, migrate
from pilotflame.runtime.node.functions import follower as follower_module
from pilotflame.runtime.node.functions import shared_revisions
from pilotflame.runtime.node.functions.revision_record import RevisionRecord
from pilotflame.runtime.node.functions.store import Store
from pilotflame.runtime.node.packaging.code import pack
from pilotflame.snapshot.format import compared
from postgres import PostgresServer, new_schema
from safetensors.numpy import save_file
from shared_gateways import Group, Shared

pytestmark = pytest.mark.asyncio(loop_scope="module")

PIDS = "import os\ndef handler(event):\n    return os.getpid()"


def version(text: object) -> str:
    return f"def handler(event):\n    return {text!r}"


class Pair(NamedTuple):
    """Two gateways that share their functions."""

    group: Group
    one: Shared
    other: Shared


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(postgres: PostgresServer) -> AsyncIterator[Pair]:
    url = new_schema(postgres.url, f"t{secrets.token_hex(8)}")
    connection = PostgresConnection(url)
    migrate(connection)
    connection.close()
    group = Group(url)
    with short_folder() as first, short_folder() as second:
        async with (
            group.member("one", first / "state") as one,
            group.member("other", second / "state") as other,
        ):
            beating = asyncio.create_task(group.beat())
            yield Pair(group, one, other)
            beating.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beating


async def act(gateway: Gateway, name: str, how: str, **order: object) -> dict[str, object]:
    response = await gateway.client.post(f"/v1/functions/{name}/{how}", json=order)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_what_a_deploy_has_returned_is_served_by_all(pair: Pair):
    for text in ("first", "second"):
        function = await pair.one.gateway.deploy(version(text), name="everywhere", files={"lib/more.py": ""})
        assert function.described["warnings"] == []
        assert await pair.other.gateway.function("everywhere").answer() == text
        assert pair.one.live("everywhere") == pair.other.live("everywhere") != ""
    # The other gateway may deploy the next revision.
    await pair.other.gateway.deploy(version("third"), name="everywhere")
    assert await pair.one.gateway.function("everywhere").answer() == "third"
    assert pair.one.live("everywhere").startswith("r3-")


async def test_a_gateway_does_not_lag_behind_its_own_deploy(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    """The gateway reads its own change, as after each heartbeat, between the commit and the start of the new revision."""
    follower, loop = pair.one.follower, asyncio.get_running_loop()
    store, lagged = follower.shared.store, list[bool]()
    promote = store.promote

    def read_first(record: RevisionRecord) -> None:
        asyncio.run_coroutine_threadsafe(follower.follow(), loop).result(30)
        lagged.append(follower.lags(record.function))
        promote(record)

    monkeypatch.setattr(store, "promote", read_first)
    monkeypatch.delitem(pair.group.beating, "one")
    monkeypatch.delitem(pair.group.generations, "one")
    await pair.one.gateway.deploy(version("own"), name="ahead")
    assert (lagged, follower.lags("ahead"), follower.lags(None)) == ([True], False, False)
    assert not await asyncio.to_thread(follower.shared.index.changes, follower.generation)


async def test_a_rollback_and_a_restart_are_made_on_all(pair: Pair):
    for text in ("old", "new"):
        await pair.one.gateway.deploy(version(text), name="back")
    await act(pair.other.gateway, "back", "rollback")
    for member in (pair.one, pair.other):
        assert await member.gateway.function("back").answer() == "old"
    await pair.one.gateway.deploy(PIDS, name="again")
    function = pair.other.gateway.function("again")
    before = await function.answer()
    await act(pair.one.gateway, "again", "restart")
    assert await function.answer() != before


async def test_a_pause_holds_on_all(pair: Pair):
    await pair.one.gateway.deploy(version("runs"), name="rests")
    await act(pair.one.gateway, "rests", "pause")
    function = pair.other.gateway.function("rests")
    assert (await function.error())["type"] == "function_paused"
    # A deploy does not end the pause.
    await pair.other.gateway.deploy(version("runs on"), name="rests", check=False)
    assert (await pair.one.gateway.function("rests").error())["type"] == "function_paused"
    await act(pair.other.gateway, "rests", "resume")
    assert await pair.one.gateway.function("rests").answer() == "runs on"


async def test_a_deleted_function_is_gone_on_all_and_its_jobs_are_dropped_once(pair: Pair):
    disowned = list[tuple[str, str]]()
    for member in (pair.one, pair.other):
        assert member.gateway.server is not None
        functions = member.gateway.server.functions
        functions.events.disowned.append(lambda name, at=member.gateway.url: disowned.append((at, name)))
    await pair.one.gateway.deploy(version(1), name="leaves")
    assert (await pair.one.gateway.client.delete("/v1/functions/leaves")).status_code == 200
    assert (await pair.other.gateway.function("leaves").error())["status"] == 404
    assert not (pair.other.gateway.state / "functions" / "leaves").exists()
    assert disowned == [(pair.one.gateway.url, "leaves")]
    # A new function of this name has a new revision.
    await pair.other.gateway.deploy(version(2), name="leaves")
    assert await pair.one.gateway.function("leaves").answer() == 2
    assert pair.one.live("leaves").startswith("r2-")


async def test_the_other_gateway_keeps_what_is_set_for_a_new_function(pair: Pair):
    """Gateways share secrets. A gateway that follows a deletion must not remove the secrets of a new function."""
    await pair.one.gateway.deploy(version(1), name="renewed")
    path = "/v1/functions/renewed/secrets"
    await pair.other.gateway.client.put(f"{path}/TOKEN", json={"value": "new"})
    await pair.one.gateway.client.delete("/v1/functions/renewed")
    assert pair.other.live("renewed") == ""
    assert pair.other.gateway.server is not None
    assert pair.other.gateway.server.functions.secrets.of("renewed") == {"TOKEN": "new"}


async def test_calls_that_finish_after_a_deletion_elsewhere_keep_the_secrets(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    await pair.one.gateway.deploy(version(1), name="finishes")
    path = "/v1/functions/finishes/secrets"
    await pair.other.gateway.client.put(f"{path}/TOKEN", json={"value": "old"})
    assert pair.other.gateway.server is not None
    functions, follower = pair.other.gateway.server.functions, pair.other.follower
    function = functions.get("finishes").function
    monkeypatch.delitem(pair.group.beating, "other")
    monkeypatch.delitem(pair.group.generations, "other")
    assert (await pair.one.gateway.client.delete("/v1/functions/finishes")).status_code == 200

    async def refresh() -> None:
        # The gateway that was asked to delete the function has removed its secrets from the database.
        await asyncio.to_thread(functions.secrets.forget, "finishes")

    monkeypatch.setattr(follower, "refresh", refresh)

    async def gone() -> bool:
        await follower.follow()
        return functions.find("finishes") is None

    await until(gone, "the deletion on the other gateway")
    assert function.secrets == {"TOKEN": "old"}


async def test_deploys_of_one_name_on_two_gateways_end_with_the_same_revision(pair: Pair):
    async def deploy(member: Shared, text: str) -> None:
        await member.gateway.deploy(version(text), name="contested")

    for number in range(3):
        await asyncio.gather(deploy(pair.one, f"one {number}"), deploy(pair.other, f"other {number}"))
        for member in (pair.one, pair.other):
            await member.even()
        assert pair.one.live("contested") == pair.other.live("contested")
        answers = {await member.gateway.function("contested").answer() for member in (pair.one, pair.other)}
        assert len(answers) == 1
    assert len(await asyncio.to_thread(pair.one.revisions.index.revisions, "contested")) == 5


async def test_pauses_and_deploys_on_two_gateways_end_the_same_on_both(pair: Pair):
    await pair.one.gateway.deploy(version(0), name="mixed")
    await asyncio.gather(
        pair.other.gateway.deploy(version(1), name="mixed", check=False),
        act(pair.one.gateway, "mixed", "pause"),
        act(pair.other.gateway, "mixed", "resume"),
    )
    for member in (pair.one, pair.other):
        await member.even()
    entry = await asyncio.to_thread(pair.one.revisions.index.entry, "mixed")
    assert entry is not None
    for member in (pair.one, pair.other):
        assert member.live("mixed") == entry.traffic[0].revision
        status = await member.gateway.function("mixed").status()
        assert (status["stopped"] == "paused") == entry.paused


async def test_who_was_away_catches_up_before_it_serves(pair: Pair):
    with short_folder() as folder:
        async with pair.group.member("third", folder / "state"):
            for name, text in {"stays": "old", "goes": "old", "sleeps": "old"}.items():
                await pair.one.gateway.deploy(version(text), name=name)
        await pair.one.gateway.deploy(version("new"), name="stays")
        await act(pair.one.gateway, "sleeps", "pause")
        await pair.other.gateway.client.delete("/v1/functions/goes")
        async with pair.group.member("third", folder / "state") as third:
            assert await third.gateway.function("stays").answer() == "new"
            assert (await third.gateway.function("sleeps").error())["type"] == "function_paused"
            assert (await third.gateway.function("goes").error())["status"] == 404
            assert not (folder / "state" / "functions" / "goes").exists()


async def test_an_empty_gateway_gets_everything_and_can_roll_back(pair: Pair):
    for text in ("old", "new"):
        await pair.one.gateway.deploy(version(text), name="known")
    with short_folder() as folder:
        async with pair.group.member("fourth", folder / "state") as fourth:
            assert fourth.follower.generation == pair.one.follower.generation
            assert await fourth.gateway.function("known").answer() == "new"
            await act(fourth.gateway, "known", "rollback")
            assert await pair.one.gateway.function("known").answer() == "old"


async def test_functions_from_before_the_database_are_published(pair: Pair):
    with short_folder() as folder:
        async with gateway_here(folder / "state") as alone:
            for text in ("old", "new"):
                await alone.deploy(version(text), name="brought")
            await alone.deploy(version("rests"), name="brought-paused")
            await act(alone, "brought-paused", "pause")
        async with pair.group.member("fifth", folder / "state") as fifth:
            assert await fifth.gateway.function("brought").answer() == "new"
            await pair.one.even()
            assert await pair.one.gateway.function("brought").answer() == "new"
            assert (await pair.one.gateway.function("brought-paused").error())["type"] == "function_paused"
            await pair.one.gateway.deploy(version("newer"), name="brought")
            assert fifth.live("brought").startswith("r3-")


async def test_a_change_that_fails_is_told_and_tried_again(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    await pair.one.gateway.deploy(version("old"), name="picky")
    right, fails = shared_revisions.choose_python, True

    def choose(code, settings, *more):
        if fails and settings.name == "picky":
            raise RequirementsError("There is no such package.")
        return right(code, settings, *more)

    monkeypatch.setattr(shared_revisions, "choose_python", choose)
    monkeypatch.setattr(shared_revisions, "SETTLE_S", 0.3)
    monkeypatch.setattr(follower_module, "FIRST_RETRY_S", 0.05)
    deployed = await pair.one.gateway.deploy(version("new"), name="picky")
    assert "Gateways that may not serve the latest change yet: other." in deployed.described["warnings"]
    function = pair.other.gateway.function("picky")
    assert await function.answer() == "old"
    (told,) = (await function.status())["warnings"]
    assert "There is no such package" in told
    # The changes of other functions are still followed.
    await pair.one.gateway.deploy(version("fine"), name="easy")
    await until(lambda: asyncio.to_thread(lambda: pair.other.live("easy")), "the other function")
    entry = await asyncio.to_thread(pair.one.revisions.index.entry, "picky")
    assert entry is not None
    assert pair.other.follower.generation == entry.generation - 1
    fails = False
    await pair.other.even()
    assert await function.answer() == "new"
    assert (await function.status())["warnings"] == []
    await until(lambda: _no_warnings(pair.one, "picky"), "no warnings")


async def _no_warnings(member: Shared, name: str) -> bool:
    return not (await member.gateway.function(name).status())["warnings"]


async def test_a_change_that_fails_may_be_replaced_by_another(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shared_revisions, "SETTLE_S", 0.3)
    with monkeypatch.context() as patched:

        def choose(*_):
            raise RequirementsError("There is no such package.")

        patched.setattr(shared_revisions, "choose_python", choose)
        await pair.one.gateway.deploy(version("bad"), name="superseded")
        await until(
            lambda: asyncio.to_thread(lambda: "superseded" in pair.other.revisions.failures), "the failure"
        )
    await pair.one.gateway.client.delete("/v1/functions/superseded")
    await pair.other.even()
    assert pair.other.revisions.failures == {}


async def test_a_gateway_that_stands_still_is_named_and_not_waited_for_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(shared_revisions, "SETTLE_S", 0.3)
    pair.group.generations["frozen"] = 0
    try:
        deployed = await pair.one.gateway.deploy(version(1), name="awaited")
        assert deployed.described["warnings"] == [
            "Gateways that may not serve the latest change yet: frozen."
        ]
        monkeypatch.setattr(shared_revisions, "SETTLE_S", 1000.0)
        again = await pair.one.gateway.deploy(version(2), name="awaited")
        assert "frozen" in again.described["warnings"][0]
    finally:
        del pair.group.generations["frozen"]
    assert await _no_warnings(pair.one, "awaited")


async def test_a_name_that_another_owner_has_elsewhere_is_not_taken(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    """The gateway has not followed the other owner's deploy yet."""
    held = pair.group.beating.pop("other")
    at = pair.group.generations.pop("other")
    await pair.one.gateway.deploy(version("theirs"), name="taken")
    assert pair.other.live("taken") == ""
    with monkeypatch.context() as patched:
        patched.setattr(type(pair.other.revisions.policies), "same_owner", lambda *_: False)
        refused = await pair.other.gateway.send(version("mine"), name="taken")
    assert failure(refused)["status"] == 403
    assert "on another gateway" in failure(refused)["message"]
    pair.group.beating["other"], pair.group.generations["other"] = held, at
    await pair.other.even()
    assert await pair.other.gateway.function("taken").answer() == "theirs"


async def test_a_resume_without_effect_restarts_nothing(pair: Pair):
    await pair.one.gateway.deploy(PIDS, name="steady")
    function = pair.other.gateway.function("steady")
    await pair.one.even()
    before, generation = await function.answer(), pair.one.follower.generation
    await act(pair.one.gateway, "steady", "resume")
    await pair.one.even()
    assert pair.one.follower.generation == generation
    assert await function.answer() == before


async def test_what_is_committed_and_cannot_be_stored_here_is_followed_here(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
):
    await pair.one.gateway.deploy(version("old"), name="full")
    with monkeypatch.context() as patched:
        right, fails = Store.promote, [OSError("The disk is full.")]

        def promote(self, record):
            if fails:
                raise fails.pop()
            right(self, record)

        patched.setattr(Store, "promote", promote)
        assert failure(await pair.one.gateway.send(version("new"), name="full"))["status"] != 201
        for member in (pair.one, pair.other):
            await member.even()
            assert await member.gateway.function("full").answer() == "new"


async def test_what_cannot_be_published_is_not_live_anywhere(pair: Pair, monkeypatch: pytest.MonkeyPatch):
    await pair.one.gateway.deploy(version("old"), name="unlucky")
    with monkeypatch.context() as patched:

        def fail(*_):
            raise GatewayError("The database is gone.")

        patched.setattr(type(pair.one.revisions.index), "change", fail)
        assert (
            failure(await pair.one.gateway.send(version("new"), name="unlucky"))["message"]
            == "The database is gone."
        )
        for how in ("restart", "pause"):
            assert (await pair.one.gateway.client.post(f"/v1/functions/unlucky/{how}")).status_code == 503
        assert (await pair.one.gateway.client.delete("/v1/functions/unlucky")).status_code == 503
    for member in (pair.one, pair.other):
        await member.even()
        assert await member.gateway.function("unlucky").answer() == "old"
    assert len(list((pair.one.gateway.state / "functions" / "unlucky").glob("r*"))) == 1


async def test_uploaded_weights_travel_with_the_code_and_others_are_refused(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # A file that was written a moment ago has no version. This also counts for the weights that an upload writes.
    monkeypatch.setattr(compared, "_TICK_NS", 0)
    code, weights = tmp_path / "code", tmp_path / "code" / "weights"
    weights.mkdir(parents=True)
    save_file({"a": np.arange(600_000, dtype=np.float32)}, weights / "model.safetensors")
    (weights / "config.json").write_text("{}")
    (code / "handler.py").write_text(
        "import os\ndef handler(event):\n    return sorted(os.listdir('weights'))"
    )
    (code / "pilotflame.toml").write_text('name = "weighty"\nsnapshot = "weights"\n')
    headers = {"Content-Type": "application/gzip"}
    sent = await pair.one.gateway.client.post("/v1/functions", content=pack(code), headers=headers)
    assert sent.status_code == 201, sent.text
    assert await pair.other.gateway.function("weighty").answer() == ["config.json", "model.safetensors"]
    versions = [
        json.loads(
            (one.gateway.state / "functions/weighty" / one.live("weighty") / "versions.json").read_bytes()
        )
        for one in (pair.one, pair.other)
    ]
    assert [*versions[0]] == [*versions[1]] == ["model.safetensors"]
    assert versions[0] != versions[1]
    refused = await pair.one.gateway.client.post("/v1/functions", json={"path": str(code)})
    assert "only on this machine" in failure(refused)["message"]
    assert "s3://" in failure(refused)["remedy"]
