"""Large inputs and outputs of jobs: files that follow the rows which refer to them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from job_store_tests import KEEP_S, Clock, new_job
from live import gateway_here, until
from pilotflame.errors import IdempotencyConflict, JobBodyMissing, JobStoreFailed
from pilotflame.runtime.ground.storing.blobs import FileBlobs
from pilotflame.runtime.jobs.sql import store as stored
from pilotflame.runtime.jobs.sqlite.database import Database
from pilotflame.runtime.jobs.sqlite.schema import SCRIPTS
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore
from pilotflame.runtime.jobs.stored.job import JobOutcome, JobState
from pilotflame.runtime.jobs.stored.large_bodies import MOST_INLINE_BYTES, LargeBodies, same_body, size_of
from pilotflame.runtime.jobs.webhooks import sender
from pilotflame.runtime.jobs.webhooks.delivery import MAX_MESSAGE_BYTES
from receiver import receiving
from standardwebhooks import Webhook

SIZE = MOST_INLINE_BYTES + 1
BODY = b"x" * SIZE
RESULT = JobOutcome(JobState.COMPLETED, b'"' + BODY + b'"')
ECHO = "def handler(event):\n    return event['text']\n"


@pytest.fixture
def bodies(tmp_path: Path):
    bodies = LargeBodies(FileBlobs(tmp_path / "bodies"))
    yield bodies
    bodies.close()


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


async def test_a_body_is_read_until_it_is_deleted(bodies: LargeBodies, tmp_path: Path) -> None:
    name = await bodies.write(BODY)
    assert size_of(name) == SIZE
    assert await bodies.read(name) == BODY
    bodies.delete([name])
    bodies.delete([name])

    async def gone() -> bool:
        return await bodies.read(name) is None

    await until(gone, "the file is deleted")
    assert not files(tmp_path / "bodies")


async def test_names_tell_equal_bodies(bodies: LargeBodies) -> None:
    one, same, other = [await bodies.write(body) for body in (BODY, BODY, b"y" * SIZE)]
    assert one != same
    assert same_body(one, same)
    assert not same_body(one, other)
    assert not same_body(one, "")
    assert same_body("", "")


async def test_a_full_disk_is_named_and_leaves_no_file(
    bodies: LargeBodies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdatasync", full)
    with pytest.raises(JobStoreFailed, match="No space left on device"):
        await bodies.write(BODY)
    assert not files(tmp_path / "bodies")


async def test_the_body_of_a_caller_who_leaves_is_deleted(bodies: LargeBodies, tmp_path: Path) -> None:
    written = asyncio.create_task(bodies.write(BODY))
    await asyncio.sleep(0)
    written.cancel()
    with pytest.raises(asyncio.CancelledError):
        await written
    await asyncio.to_thread(bodies.close)
    assert not (tmp_path / "bodies").exists() or not files(tmp_path / "bodies")


async def test_a_start_deletes_the_files_that_no_row_names(store: SqliteJobStore, tmp_path: Path) -> None:
    job, _ = await store.submit(new_job(body=BODY))
    (kept,) = files(tmp_path / "jobs.bodies")
    (tmp_path / "jobs.bodies" / "5-0-0").write_bytes(b"stray")
    await store.close()
    again = SqliteJobStore(Database(tmp_path / "jobs.db", SCRIPTS), keep_s=KEEP_S)
    await again.open()
    assert files(tmp_path / "jobs.bodies") == [kept]
    assert (await again.get("tone", job.id)).input == BODY
    await again.close()


async def test_a_change_that_stores_nothing_leaves_no_file(store: SqliteJobStore, tmp_path: Path) -> None:
    first, _ = await store.submit(new_job(body=BODY, idempotency="k"))
    again, earlier = await store.submit(new_job(body=BODY, idempotency="k"))
    assert (again.id, again.input, earlier) == (first.id, BODY, True)
    for other in (b"y" * SIZE, b""):
        with pytest.raises(IdempotencyConflict):
            await store.submit(new_job(body=other, idempotency="k"))
    assert not await store.finish(first.id, 7, RESULT)
    await store.close()
    assert len(files(tmp_path / "jobs.bodies")) == 1


async def test_a_missing_file_ends_a_queued_job_and_is_named(store: SqliteJobStore, tmp_path: Path) -> None:
    job, _ = await store.submit(new_job(body=BODY))
    (name,) = files(tmp_path / "jobs.bodies")
    (tmp_path / "jobs.bodies" / name).unlink()
    with pytest.raises(JobBodyMissing, match=name):
        await store.get("tone", job.id)
    assert await store.claim("tone", 10, 1_000_000.0) == []
    (failed,) = await store.newest("tone")
    assert (failed.state, failed.error and failed.error["type"]) == (JobState.FAILED, JobBodyMissing.code)


async def test_an_attempt_that_is_repeated_drops_its_result(
    open_store: Callable[..., tuple[SqliteJobStore, Database]], tmp_path: Path, clock: Clock
) -> None:
    store, _ = open_store()
    job, _ = await store.submit(new_job(max_attempts=1))
    assert await store.take(job.id) == 1
    assert await store.finish(job.id, 1, JobOutcome(JobState.FAILED, BODY))
    assert (await store.get("tone", job.id)).output == BODY
    await store.retry("tone", job.id)
    assert (await store.stored_bytes())["*"] == 2
    await store.close()
    assert not files(tmp_path / "jobs.bodies")


async def test_a_webhook_carries_a_large_result_also_after_the_results_end(
    state: Path,
) -> None:
    async with (
        receiving() as receiver,
        gateway_here(state, keep_result_s=0.2, webhook_networks=["127.0.0.1"]) as gateway,
    ):
        released = asyncio.Event()
        function = await gateway.deploy(ECHO)
        text = "x" * SIZE

        async def slow(_request: web.Request) -> web.StreamResponse:
            await released.wait()
            return web.Response(status=204)

        receiver.responses = [slow]
        body = {"input": {"text": text}, "webhook": receiver.url}
        job_id = (await gateway.client.post(f"/v2/{function.name}/run", json=body)).json()["id"]
        (came,) = await receiver.received(1)
        assert (json.loads(came.body)["id"], json.loads(came.body)["output"]) == (job_id, text)
        path = f"/v2/{function.name}/status/{job_id}"

        async def expired() -> bool:
            return (await gateway.client.get(path)).status_code == 410

        # The delivery may have to be sent again, so the expiry of its job is postponed.
        store = gateway.server.jobs.store
        while await store.next_expiry(time.time()) < time.time() + 30.0:
            await asyncio.sleep(0.01)
        assert not await expired()
        released.set()

        async def delivered() -> bool:
            return not await store.pending_deliveries()

        await until(delivered, "the webhook is delivered")


async def test_a_webhook_of_a_larger_result_has_a_link_to_the_job(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "MAX_BODY_BYTES", SIZE)
    async with (
        receiving() as receiver,
        gateway_here(state, webhook_networks=["127.0.0.1"]) as gateway,
    ):
        function = await gateway.deploy(ECHO)
        body = {"input": {"text": "x" * SIZE}, "webhook": receiver.url}
        job_id = (await gateway.client.post(f"/v2/{function.name}/run", json=body)).json()["id"]
        (came,) = await receiver.received(1)
        found = json.loads(came.body)
        assert (found["id"], found["status"], "output" in found) == (job_id, "COMPLETED", False)
        assert found["output_url"] == f"/v1/functions/{function.name}/jobs/{job_id}"
        secret = (await gateway.client.get(f"/v1/functions/{function.name}/webhooks/secret")).json()["secret"]
        assert Webhook(secret).verify(came.body, came.headers)


async def test_large_webhooks_share_a_room(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_SENDING_BYTES", 2 * MAX_MESSAGE_BYTES)
    async with (
        receiving() as receiver,
        gateway_here(state, webhook_networks=["127.0.0.1"]) as gateway,
    ):
        released = asyncio.Event()

        async def slow(_request: web.Request) -> web.StreamResponse:
            await released.wait()
            return web.Response(status=204)

        receiver.responses = [slow, slow]
        function = await gateway.deploy(ECHO)
        body = {"input": {"text": "x" * SIZE}, "webhook": receiver.url}
        for _ in range(2):
            await gateway.client.post(f"/v2/{function.name}/runsync", json=body)
        outbox = gateway.server.jobs._sender
        await receiver.received(1)

        async def begun() -> bool:
            return len(outbox._requests) == 2

        await until(begun, "both deliveries have begun")
        assert (len(receiver.came), outbox._room.total) == (1, MAX_MESSAGE_BYTES)
        released.set()
        await receiver.received(2)
