"""Describes for the function's log how a worker has ended."""

from __future__ import annotations

from typing import NamedTuple

from ..launching.launcher import UNKNOWN_CAUSE
from ..serving.invocation import Invocation
from ..serving.replica import Replica
from ..telemetry.logs import RevisionLog

# How many of the lines that a worker printed last are repeated when it dies.
LAST_WORDS = 5
# How many invocations are named when the worker dies that ran them.
MOST_IDS = 10


class WorkerEnd(NamedTuple):
    """What the log says of the end of a worker."""

    text: str
    level: str = "info"
    request_id: str = ""
    """The only invocation that it ran."""
    unexpected: bool = False
    """True if nobody wanted it to end, and its start was not reported as failed."""


def describe_end(
    replica: Replica, cause: str, started: list[Invocation], logs: RevisionLog, *, retiring: bool
) -> WorkerEnd:
    """Return why a worker has ended, what it printed last, and which invocations it ran."""
    # At a shutdown the zygote, which would tell the exit code, ends before its workers.
    if replica.left and cause in ("exit code 0", UNKNOWN_CAUSE):
        return WorkerEnd(f"worker {replica.name} has drained and ended")
    words = logs.last_words(replica.name, LAST_WORDS)
    said = f"; its last words: {words}" if words else "; it printed nothing"
    # A failed start was logged as such, and the gateway kills what it does not want any more.
    expected = replica.reported_failure or (replica.left and retiring)
    ids = [invocation.id for invocation in started]
    ran = f"; it ran {', '.join(ids[:MOST_IDS])}" if len(ids) > 1 else ""
    return WorkerEnd(
        f"worker {replica.name} ended with {cause}{ran}{said}",
        "info" if expected else "error",
        ids[0] if len(ids) == 1 else "",
        unexpected=not (expected or replica.left),
    )
