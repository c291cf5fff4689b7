"""The checker of histories finds each kind of fault."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from shared_history import Order, SharedHistory

FIRST, SECOND = Order("sqs", "a", 0), Order("sqs", "a", 1)


def history() -> SharedHistory:
    job = Order("job", "", 7)
    return SharedHistory(
        {job, FIRST, SECOND}, {7: "id"}, [FIRST, job, FIRST, SECOND, FIRST], {"id": 7}, [("id", "w"), ("id", "w")], 3
    )  # fmt: skip


def test_runs_and_webhooks_may_come_again() -> None:
    assert history().faults() == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda made: made.runs.remove(SECOND), "has never run"),
        (lambda made: made.results.clear(), "the result of job 7 is lost"),
        (lambda made: made.results.update(id=8), "job 7 has the result 8"),
        (lambda made: made.webhooks.clear(), "the webhook of job 7 never came"),
        (lambda made: made.webhooks.append(("id", "v")), "the job id has 2 webhooks"),
        (lambda made: made.jobs.update({8: "id"}), "two keys have one job"),
        (lambda made: made.runs.insert(0, SECOND), r"the messages of a of sqs ran as \[1, 0\]"),
        (lambda made: setattr(made, "completed", 4), "3 orders were accepted, and 4 have completed"),
    ],
)
def test_a_fault_is_found(change: Callable[[SharedHistory], object], fault: str) -> None:
    made = history()
    change(made)
    found = made.faults()
    assert found
    with pytest.raises(AssertionError, match=fault):
        raise AssertionError(" ".join(found))
