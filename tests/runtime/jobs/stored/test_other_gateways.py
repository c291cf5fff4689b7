"""A gateway cancels the attempt of a job that another gateway has ended or runs, and leaves other attempts alone."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from pilotflame.runtime.jobs.stored.job import JobState
from pilotflame.runtime.jobs.stored.other_gateways import OtherGateways
from pilotflame.runtime.jobs.stored.stored_bytes import StoredBytes


class Dispatcher:
    """One attempt of the job "j"."""

    def __init__(self, fence: int) -> None:
        self.attempt_of = {"j": _Attempt(fence)}
        self.cancelled: list[str] = []

    def attempts(self) -> list[Any]:
        return list(self.attempt_of.values())

    def cancel(self, _function: str, job_id: str) -> None:
        self.cancelled.append(job_id)


class _Attempt:
    def __init__(self, fence: int) -> None:
        self.job, self.fence = SimpleNamespace(id="j", function="f"), fence


class JobsElsewhere:
    """A store with one job in this state and with this number of attempts. Each read calls `meanwhile`."""

    def __init__(self, state: JobState, attempts: int) -> None:
        self._job = SimpleNamespace(id="j", state=state, attempts=attempts)
        self.meanwhile: Any = lambda: None

    async def glances(self, _job_ids: Collection[str]) -> list[Any]:
        self.meanwhile()
        return [self._job]


def following(store: JobsElsewhere, dispatcher: Dispatcher) -> OtherGateways:
    stands: Any = store
    runs: Any = dispatcher
    return OtherGateways(stands, runs, {}, StoredBytes(0), lambda: None)


@pytest.mark.parametrize(
    ("state", "attempts", "fence", "cancelled"),
    [
        (JobState.IN_PROGRESS, 1, 1, []),
        (JobState.IN_PROGRESS, 2, 1, ["j"]),
        (JobState.IN_QUEUE, 1, 0, []),
        (JobState.CANCELLED, 1, 1, ["j"]),
        (JobState.CANCELLED, 0, 0, ["j"]),
    ],
)
async def test_an_attempt_ends_whose_job_has_ended_or_runs_elsewhere(
    state: JobState, attempts: int, fence: int, cancelled: list[str]
) -> None:
    dispatcher = Dispatcher(fence)
    await following(JobsElsewhere(state, attempts), dispatcher)._end_attempts()
    assert dispatcher.cancelled == cancelled


@pytest.mark.parametrize("state", [JobState.IN_PROGRESS, JobState.CANCELLED])
async def test_an_attempt_that_began_during_the_read_goes_on(state: JobState) -> None:
    dispatcher, store = Dispatcher(1), JobsElsewhere(state, 2)

    def again() -> None:
        dispatcher.attempt_of["j"] = _Attempt(2)

    store.meanwhile = again
    await following(store, dispatcher)._end_attempts()
    assert dispatcher.cancelled == []
