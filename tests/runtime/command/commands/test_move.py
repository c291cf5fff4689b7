"""`pilotflame move`: everything that a gateway has stored gets into PostgreSQL exactly once, whatever ends the command.
PostgreSQL and gateways are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from job_store_tests import FAILED, KEEP_S, Clock, new_job, run_once
from live import Gate, Gateway, gateway_here, gateway_process, gone, short_folder
from pilotflame.errors import GatewayError
from pilotflame.runtime.ground.access.keyring import KEYS
from pilotflame.runtime.ground.settings.state_dir import MOVING_FILE
from pilotflame.runtime.ground.storing.file_documents import FileDocuments
from pilotflame.runtime.ground.storing.open_documents import open_documents
from pilotflame.runtime.jobs.moving.state_move import MEMBER_FILE
from pilotflame.runtime.jobs.postgres.database import PostgresDatabase
from pilotflame.runtime.jobs.postgres.store import PostgresJobStore
from pilotflame.runtime.jobs.sql.store import SqlJobStore
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import DATABASE_FILE, SqliteJobStore
from pilotflame.runtime.jobs.stored.alert import Alert
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState, Webhook
from pilotflame.runtime.jobs.stored.large_bodies import MOST_INLINE_BYTES
from pilotflame.runtime.jobs.webhooks.delivery import DeliveryAttempt, RetrySchedule
from pilotflame.runtime.jobs.webhooks.signing import SECRET_FILE, load_key
from pilotflame.runtime.startup.joining import INCARNATION_FILE
from pydantic import SecretStr
from receiver import Receiver, receiving
from standardwebhooks import Webhook as Verifier

Run = Callable[..., Any]
LARGE = b'"%s"' % (b"x" * (2 * MOST_INLINE_BYTES))
LOCAL = {"webhook_networks": ["127.0.0.0/8"]}
HOOK = Webhook("http://127.0.0.1:1/hook", ("start", "completed"))
WORKS = """
import gate, os
async def handler(event):
    if event == "held":
        await gate.wait_async("held")
    assert event != "fails"
    return os.environ["TOKEN"]
"""
KILLED = """
import os, signal, sys
from pilotflame.runtime.cli import main
from pilotflame.runtime.ground.storing import private_files
from pilotflame.runtime.jobs.postgres import rows_copy
from pilotflame.runtime.jobs.sqlite.store import JobsFile

place, name = {
    "copied": (rows_copy, "_parts"),
    "marked": (private_files, "write"),
    "committed": (JobsFile, "retire"),
    "renamed": (private_files, "remove"),
}[sys.argv[1]]
before = getattr(place, name)

def killed(*arguments, **more):
    if name == "write":
        before(*arguments, **more)
    os.kill(os.getpid(), signal.SIGKILL)

setattr(place, name, killed)
main(["move", *sys.argv[2:]])
"""
"""Runs the command, which kills itself at a given point."""


@pytest.fixture
def moved(run: Run, postgres_url: str) -> Run:
    """Return a function that runs the command on a state folder, with a database without tables."""
    return lambda state, *words: run("move", "--state-dir", state, *words, PILOTFLAME_DATABASE=postgres_url)


@contextlib.asynccontextmanager
async def sqlite_store(state: Path, clock: Clock) -> AsyncIterator[SqliteJobStore]:
    store = SqliteJobStore(Database(state / DATABASE_FILE, SCRIPTS), keep_s=KEEP_S, clock=clock)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def shared_store(url: str, clock: Clock) -> AsyncIterator[PostgresJobStore]:
    store = PostgresJobStore(PostgresDatabase(url), keep_s=KEEP_S, clock=clock)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def fill(store: SqlJobStore, clock: Clock) -> None:
    """Store jobs of all states, with every kind of data that jobs have."""
    gone, _ = await store.submit(new_job(owner="o", wanted_id="expired"))
    await run_once(store, gone)
    clock.now_s += KEEP_S
    assert await store.expire() == 1
    ended, _ = await store.submit(new_job(webhook=HOOK, idempotency="k", traceparent="00-1", priority=1))
    await run_once(store, ended)
    large, _ = await store.submit(new_job("echo", LARGE, owner="o", extra={"bare": False}))
    fence = await store.take(large.id)
    assert fence is not None
    await store.finish(
        large.id, fence, JobOutcome(JobState.COMPLETED, LARGE, logs="a\0b\n", metrics=b'{"n":1}')
    )
    failed, _ = await store.submit(new_job(body=b"\x00\xff", content_type="application/octet-stream"))
    await store.take(failed.id)
    outcome = JobOutcome(JobState.FAILED, error={"type": "handler_failed", "message": "a\\b\n\0"})
    await store.finish(failed.id, 1, outcome)
    await store.cancel("tone", (await store.submit(new_job(owner="o")))[0].id)
    delayed, _ = await store.submit(new_job(webhook=HOOK))
    await store.take(delayed.id)
    await store.requeue(delayed.id, 1, FAILED, 5.0, counted=True)
    running, _ = await store.submit(new_job())
    await store.take(running.id, "w1")
    await store.add_pieces(running.id, 1, 1, [b"one", b"\\two\x00"])
    await store.set_progress(running.id, 1, b"0.5")
    for number in range(20):
        await store.submit(new_job(body=b"%d" % number, owner="o" * (number % 2), max_attempts=1))
    await store.alert(Alert("tone", "r1", "errors", HOOK.url, "o", begun=True, figures={}))
    (delivery, *_), _ = await store.due_deliveries(most=9, most_per_host=9, sending=())
    attempt = DeliveryAttempt(clock.now_s, 200, "", 3)
    await store.record_attempt(delivery, attempt, RetrySchedule())


async def contents(store: SqlJobStore) -> dict[str, object]:
    """Return everything that a store contains."""
    due = await store.due_deliveries(most=99, most_per_host=99, sending=())
    found = {"stored": await store.stored_bytes(), "alerts": await store.begun_alerts(), "due": due}
    for function, counts in (await store.all_counts()).items():
        jobs = [await store.get(function, job.id) for job in await store.newest(function, limit=1000)]
        pieces = {job.id: await store.pieces(job.id, 0) for job in jobs if job.pieces}
        deliveries = await store.deliveries(function)
        found[function] = (counts, await store.counts(function, "o"), jobs, pieces, deliveries)
    return found


def make_state(state: Path) -> None:
    (state / "functions").mkdir(parents=True)
    load_key(FileDocuments(state))
    FileDocuments(state).put(KEYS, b'{"keys": []}')


async def test_all_rows_are_moved_once(tmp_path: Path, postgres_url: str, moved: Run) -> None:
    clock, state = Clock(), tmp_path / "state"
    make_state(state)
    async with sqlite_store(state, clock) as store:
        await fill(store, clock)
        before = await contents(store)
    shutil.copytree(state, tmp_path / "copy")
    done = await asyncio.to_thread(moved, state, "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["moved"], told["rows"]["jobs"], told["large_bodies"]) == (0, True, 26, 2)
    assert told["documents"] == [KEYS, SECRET_FILE]
    again = await asyncio.to_thread(moved, state, "--json")
    assert (again.returncode, json.loads(again.stdout)["moved"]) == (0, False)
    assert not (state / DATABASE_FILE).exists()
    (kept,) = state.glob(f"{DATABASE_FILE}.moved-*")
    assert kept.stat().st_size
    refused = await asyncio.to_thread(moved, tmp_path / "copy")
    assert refused.returncode == 1
    assert "already" in refused.stderr
    async with shared_store(postgres_url, clock) as store:
        assert await contents(store) == before
        with pytest.raises(Exception, match="was deleted"):
            await store.get("tone", "expired")
        job, earlier = await store.submit(
            new_job(webhook=HOOK, idempotency="k", traceparent="00-1", priority=1)
        )
        assert (earlier, job.state) == (True, JobState.COMPLETED)
        # Jobs that run are queued again, as at the start of a gateway.
        assert await store.requeue_dead() == (1, 0)
        new, _ = await store.submit(new_job())
        assert [one.id for one in await store.newest("tone", limit=1)] == [new.id]


async def test_jobs_come_behind_those_that_are_there(tmp_path: Path, postgres_url: str, moved: Run) -> None:
    clock, state = Clock(), tmp_path / "state"
    make_state(state)
    async with sqlite_store(state, clock) as store:
        own = [(await store.submit(new_job(owner="o")))[0].id for _ in range(3)]
    async with shared_store(postgres_url, clock) as store:
        there = [(await store.submit(new_job(owner="o", body=b"123")))[0].id for _ in range(3)]
        assert (await asyncio.to_thread(moved, state)).returncode == 0
        assert [one.id for one in await store.newest("tone")] == [*there, *own][::-1]
        counts = await store.counts("tone", "o")
        assert (counts.in_queue, counts.queued_bytes) == (6, 15)
        assert (await store.stored_bytes("o"))["o"] == 15


@pytest.mark.parametrize("point", ["copied", "marked", "committed", "renamed"])
async def test_a_killed_move_loses_and_doubles_nothing(
    tmp_path: Path, postgres_url: str, moved: Run, point: str
) -> None:
    clock, state = Clock(), tmp_path / "state"
    make_state(state)
    async with sqlite_store(state, clock) as store:
        await fill(store, clock)
        before = await contents(store)
    command = [sys.executable, "-c", KILLED, point, "--state-dir", str(state)]
    environ = {**os.environ, "PILOTFLAME_DATABASE": postgres_url}
    killed = await asyncio.to_thread(subprocess.run, command, env=environ, check=False)
    assert killed.returncode == -signal.SIGKILL
    # No gateway starts on the folder until it is known where the jobs are.
    assert (state / MOVING_FILE).exists() == (point != "copied")
    for url in (None, postgres_url) if point != "copied" else ():
        with pytest.raises(GatewayError, match="interrupted"):
            async with gateway_here(state, database=url):
                pass
    assert (await asyncio.to_thread(moved, state)).returncode == 0
    assert not (state / MOVING_FILE).exists()
    assert not (state / DATABASE_FILE).exists()
    async with shared_store(postgres_url, clock) as store:
        assert await contents(store) == before


@pytest.mark.asyncio(loop_scope="module")
async def test_the_gateway_goes_on_with_the_jobs(postgres_url: str, moved: Run, gate: Gate) -> None:
    """A gateway is killed while it runs a job, and its folder is moved. It starts again, beside another
    gateway with the database.
    """
    with short_folder() as folder:
        state = folder / "own" / "state"
        state.parent.mkdir()
        async with receiving() as receiver, gateway_process(state, **LOCAL) as killed:
            jobs = await _jobs(killed, receiver, gate)
            secret = (await killed.client.get("/v1/functions/works/webhooks/secret")).json()["secret"]
            assert killed.process is not None
            refused = await asyncio.to_thread(moved, state)
            killed.process.kill()
            await gone(killed.process.pid)
            assert (refused.returncode, "uses the state folder" in refused.stderr) == (1, True)
            assert (await asyncio.to_thread(moved, state)).returncode == 0
            gate.open()
            async with (
                gateway_here(state, database=postgres_url, **LOCAL) as first,
                gateway_here(folder / "other" / "state", database=postgres_url, **LOCAL) as second,
            ):
                for at in (first, second):
                    at.client.headers["Authorization"] = killed.client.headers["Authorization"]
                found = [await _ended(second, job) for job in jobs]
                assert [one["status"] for one in found] == ["COMPLETED", "FAILED", *["COMPLETED"] * 4]
                assert [one["output"] for one in found if one["status"] == "COMPLETED"] == ["kept"] * 5
                body, again = {"input": "free", "webhook": f"{receiver.url}/done"}, {"Idempotency-Key": "k"}
                replayed = await second.client.post("/v2/works/run", json=body, headers=again)
                assert replayed.json()["id"] == jobs[0]
                came = await receiver.received(3)
                for one in came:
                    Verifier(secret).verify(one.body, one.headers)
                assert {json.loads(one.body)["data"]["id"] for one in came} == {jobs[0], jobs[2]}


async def _jobs(gateway: Gateway, receiver: Receiver, gate: Gate) -> list[str]:
    """Submit a job that ends, a job that fails, a job that keeps running, and three jobs that wait. Return
    their ids.
    """
    await gateway.client.put("/v1/functions/works/secrets/TOKEN", json={"value": "kept"})
    await gateway.deploy(WORKS, {"scale.max": 1, "attempts": 2}, gate=gate, name="works")
    async with gateway.at_home() as home:
        made = (await home.post("/v1/keys", json={"name": "team", "scopes": ["admin"]})).json()
    gateway.client.headers["Authorization"] = f"Bearer {made['key']}"
    receiver.responses = [500]
    url, found = f"{receiver.url}/done", list[str]()
    for event in ("free", "fails", "held", "free", "free", "free"):
        more = {} if event == "fails" or len(found) > 2 else {"webhook": url}
        headers = {} if found else {"Idempotency-Key": "k"}
        answer = await gateway.client.post("/v2/works/run", json={"input": event, **more}, headers=headers)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["id"])
        if len(found) < 3:
            await _ended(gateway, found[-1])
    await gate.next("held")
    await receiver.received(1)
    return found


async def _ended(gateway: Gateway, job: str) -> dict[str, Any]:
    answer = await gateway.client.get(f"/v2/works/status-sync/{job}?wait=60000")
    found: dict[str, Any] = answer.json()
    assert found["status"] not in ("IN_QUEUE", "IN_PROGRESS"), found
    return found


def test_other_keys_are_refused(tmp_path: Path, postgres_url: str, moved: Run) -> None:
    state = tmp_path / "state"
    make_state(state)
    (state / DATABASE_FILE).touch()
    documents = open_documents(state, SecretStr(postgres_url))
    documents.put(KEYS, b'{"keys": [], "version": 1}')
    done = moved(state)
    assert done.returncode == 1
    assert f"other keys or secrets than {state}: {KEYS}." in done.stderr
    assert (documents.get(SECRET_FILE), (state / DATABASE_FILE).exists()) == (None, True)
    (state / KEYS).unlink()
    assert moved(state).returncode == 0
    documents.close()


async def test_other_functions_of_the_same_name_are_refused(postgres_url: str, moved: Run) -> None:
    with short_folder() as folder:
        for name, url in (("own", None), ("other", postgres_url)):
            async with gateway_here(folder / name / "state", database=url) as gateway:
                await gateway.deploy("def handler(event):\n    return 1\n", name="both")
        (folder / "own" / "state" / SECRET_FILE).unlink()
        done = await asyncio.to_thread(moved, folder / "own" / "state")
        assert done.returncode == 1
        assert "different functions of these names: both" in done.stderr
        # MEMBER_FILE shows that the gateway already shares the database, so `move` does not compare its
        # functions.
        assert MEMBER_FILE == INCARNATION_FILE
        (folder / "own" / "state" / MEMBER_FILE).touch()
        assert (await asyncio.to_thread(moved, folder / "own" / "state")).returncode == 0


def test_what_cannot_be_moved_is_named(tmp_path: Path, run: Run, postgres_url: str) -> None:
    none = run("move", "--state-dir", tmp_path)
    assert (none.returncode, "PILOTFLAME_DATABASE=postgresql://" in none.stderr) == (1, True)
    empty = run("move", "--state-dir", tmp_path, PILOTFLAME_DATABASE=postgres_url)
    assert (empty.returncode, "not a gateway's state folder" in empty.stderr) == (1, True)
    (tmp_path / "functions").mkdir()
    nothing = run("move", "--state-dir", tmp_path, PILOTFLAME_DATABASE=postgres_url)
    assert (nothing.returncode, "does not exist" in nothing.stderr) == (1, True)
    (tmp_path / DATABASE_FILE).write_bytes(b"no database" * 100)
    damaged = run("move", "--state-dir", tmp_path, PILOTFLAME_DATABASE=postgres_url)
    assert (damaged.returncode, "cannot be used" in damaged.stderr) == (1, True)


async def test_a_gateway_says_that_its_jobs_are_not_in_the_database(
    postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with short_folder() as folder:
        (folder / "state").mkdir()
        (folder / "state" / DATABASE_FILE).touch()
        async with gateway_here(folder / "state", database=postgres_url):
            pass
    assert "run `pilotflame move`" in caplog.text
