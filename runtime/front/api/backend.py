"""Defines the backend: the functions, jobs and limits that the gateway's APIs share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from aiohttp import web
from typing_extensions import TypedDict

from ....errors import InputInvalid, UnknownFunction
from ...calls.serving.invocation import encode_extra
from ...calls.serving.response_cache import ResponseCache
from ...calls.serving.revision import Revision
from ...ground.telemetry.disk import Disk
from ...jobs.stored.job import Job, JobState, NewJob
from ...jobs.stored.jobs import Jobs
from ...node.functions.live import Live
from ...node.functions.registry import Functions
from ..http.endless_answers import EndlessAnswers
from ..http.requests import (
    GATEWAY_REMEDY,
    MAX_KEY_CHARS,
    STORED_REMEDY,
    TOO_LARGE_REMEDY,
    caller_of,
    idempotency_of,
    read_body,
    traceparent_of,
)
from ..http.routes import Parameter, header
from ..listening.origins import Origins

if TYPE_CHECKING:
    # These modules import psycopg. A gateway without the setting `database` must run without psycopg.
    from ...ground.storing.membership import Membership
    from ...ground.storing.postgres import PostgresPool

ASYNC_BODY_BYTES = 10 << 20
"""Limit for the body of a request that becomes a job and does not wait for its end, because the gateway stores such a body."""
_SAME = "The same key with the same body is the same job."
_KEY = header("Idempotency-Key", _SAME, type="string", maxLength=MAX_KEY_CHARS)
SUBMIT_PARAMETERS: tuple[Parameter, ...] = (_KEY, header("traceparent"))
REPLAYED_HEADER = {"Idempotent-Replayed": {"schema": {"type": "string", "const": "true"}}}
"""Describes the header of a response whose job was stored by an earlier request with the same key."""
LOCATION_HEADER = {"Location": {"schema": {"type": "string"}, "description": "The path of the job."}}
Submitted: TypeAlias = tuple[Job, dict[str, str]]
"""A stored job, and headers for the response. The headers are empty unless an earlier request has stored the job."""


class Accepted(TypedDict):
    """A job that is stored."""

    id: str
    status: JobState


def job_path(job: Job) -> str:
    """Return the path at which a job is shown."""
    return f"/v1/functions/{job.function}/jobs/{job.id}"


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of the gateway that `api/invoke.py` and every dialect work with."""

    functions: Functions
    jobs: Jobs
    max_body_bytes: int
    state: Path
    """The gateway's state folder."""
    origins: Origins
    disk: Disk
    """The disk of the state folder."""
    endless: EndlessAnswers
    """The answers that the gateway ends when the caller's API key expires or is revoked."""
    cache: ResponseCache
    members: Membership | None = None
    """The gateways that share a database; None without one."""
    database: PostgresPool | None = None
    """Connections to the shared database; None without one."""

    def names(self, request: web.Request) -> list[str]:
        """Return the names of the functions that the caller may see."""
        allows = caller_of(request).allows
        return [live.record.function for live in self.functions.all() if allows(live.record.function)]

    def only(self, request: web.Request) -> Live:
        """Return the only function that the caller may see. Raise UnknownFunction if there is none, and InputInvalid if
        there are several.
        """
        names = self.names(request)
        if not names:
            raise UnknownFunction("There is no function.", remedy="Deploy one.")
        if len(names) > 1:
            message = "The request names no function, and there are several."
            raise InputInvalid(message, remedy="Use a path that names one: /openapi.json lists them.")
        return self.functions.get(names[0])

    def body_limit(self, revision: Revision) -> int:
        """Return the largest number of bytes that a body for this revision may have."""
        return min(self.max_body_bytes, revision.policy.settings.max_body_bytes)

    def too_large_remedy(self, limit: int, revision: Revision | None = None) -> str:
        """Return the remedy for a body above `limit`, which is the limit of the gateway, of the revision or of jobs."""
        if limit == self.max_body_bytes:
            return GATEWAY_REMEDY
        own = revision is not None and limit == revision.policy.settings.max_body_bytes
        return TOO_LARGE_REMEDY if own else STORED_REMEDY

    async def read_body(self, request: web.Request, name: str, most: int | None = None) -> tuple[Live, bytes]:
        """Return the function and the body.

        If a new revision becomes live while the body arrives, the returned function has the new revision. `most` lowers
        the function's own limit for bodies. Raise UnknownFunction, and the errors of `requests.read_body`.
        """
        revision = self.functions.get(name).revision
        limit = self.body_limit(revision)
        limit = limit if most is None else min(limit, most)
        remedy = self.too_large_remedy(limit, revision)
        body = await read_body(request, limit, remedy=remedy)
        return self.functions.get(name), body

    async def submit(
        self, request: web.Request, live: Live, body: bytes, *, wait_s: float | None = None, **fields: Any
    ) -> Submitted:
        """Store a job, and wait up to `wait_s` for its end. Return the job, and headers for the response.

        With `wait_s`, a job that ends soon is stored only at its end, so do not give the job's id to anyone before
        `submit` returns. The job's fields come from the function's settings and the request, and `fields` override
        them.
        """
        fields = {"traceparent": traceparent_of(request.headers)} | fields
        if "idempotency" not in fields:
            fields["idempotency"] = idempotency_of(request.headers)
        if fields.get("extra"):
            encode_extra(fields["extra"])
        new = NewJob.for_function(live.record.settings, body, owner=caller_of(request).owner, **fields)
        job, replayed = await (self.jobs.submit(new) if wait_s is None else self.jobs.run(new, wait_s))
        return job, {"Idempotent-Replayed": "true"} if replayed else {}
