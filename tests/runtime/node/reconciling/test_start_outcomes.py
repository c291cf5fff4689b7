"""The waits for starts."""

from __future__ import annotations

import asyncio

from pilotflame.errors import ActivationFailed
from pilotflame.runtime.calls.serving.replicas import ReplicaList
from pilotflame.runtime.node.reconciling.start_outcomes import StartOutcomes


async def test_a_wait_beside_a_worker_that_was_ready_ends_when_no_worker_starts_or_is_ready_any_more() -> (
    None
):
    starts, replicas = StartOutcomes(), ReplicaList()
    replicas.note_asked(1.0)
    async with asyncio.timeout(10), asyncio.TaskGroup() as tasks:
        waits = tasks.create_task(starts.reached(2, 60.0, settled=True))
        await asyncio.sleep(0)
        starts.note_workers(replicas)
        starts.refuse(ActivationFailed("It failed."))
        await asyncio.sleep(0)
        assert not waits.done()
        replicas.note_answered(1.0)
        starts.note_workers(replicas)
