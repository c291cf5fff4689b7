"""The turns of owners: which jobs start next, by owner, priority and size."""

from __future__ import annotations

from job_store_tests import FAILED, Clock, new_job
from pilotflame.runtime.jobs.sqlite.store import SqliteJobStore


async def submitted(store: SqliteJobStore, owner: str, count: int, **more: object) -> list[str]:
    return [(await store.submit(new_job(owner=owner, **more)))[0].id for _ in range(count)]


async def test_the_owners_of_jobs_take_turns(store: SqliteJobStore, clock: Clock) -> None:
    many, few, none = (
        await submitted(store, "b", 30),
        await submitted(store, "a", 2),
        await submitted(store, "", 1),
    )
    found = [job.id for job in await store.claim("tone", 8, clock.now_s)]
    assert found == [few[0], many[0], none[0], few[1], *many[1:5]]
    # The owner that had the last turn comes last. Jobs that are known are left out.
    again = [job.id for job in await store.claim("tone", 3, clock.now_s, [many[0], few[0]], "a")]
    assert again == [many[1], none[0], few[1]]


async def test_a_turn_is_of_one_priority_and_delayed_jobs_have_their_owners_place(
    store: SqliteJobStore, clock: Clock
) -> None:
    late = await submitted(store, "a", 2, priority=1)
    first, second = await submitted(store, "b", 2)
    other = await submitted(store, "c", 1)
    # Queue the oldest job of b for another attempt, after a delay.
    fence = await store.take(first)
    assert fence is not None
    await store.requeue(first, fence, FAILED, 1.0, counted=True)
    clock.now_s += 2.0
    found = [job.id for job in await store.claim("tone", 10, clock.now_s)]
    assert found == [first, *other, second, *late]


async def test_the_inputs_of_due_jobs_are_read_up_to_a_number_of_bytes(
    store: SqliteJobStore, clock: Clock
) -> None:
    await submitted(store, "a", 5, body=b"x" * 10)
    for most, count in ((0, 1), (10, 1), (11, 2), (1000, 5)):
        assert len(await store.claim("tone", 10, clock.now_s, (), "", most)) == count


async def test_an_owner_whose_jobs_are_all_known_takes_no_turn(store: SqliteJobStore, clock: Clock) -> None:
    (known,), (other, *_) = await submitted(store, "a", 1), await submitted(store, "b", 3)
    for after in ("", "a", "b"):
        assert [job.id for job in await store.claim("tone", 1, clock.now_s, [known], after)] == [other]
