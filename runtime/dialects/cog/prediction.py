"""The prediction: a job in Cog's words. What a caller sends, what he prefers, and what he is shown."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ....errors import BadInput, InputInvalid
from ...api.requests import dump_json
from ...jobs import message
from ...jobs.job import EVENTS, Job, JobState

MOST_WAIT_S = 300.0
ID = re.compile(r"(?!job-)[A-Za-z0-9._~-]{1,128}")
"""What a caller may call a prediction: nothing that looks as if we had called it so."""
STATUSES = {
    JobState.IN_QUEUE: "starting",
    JobState.IN_PROGRESS: "processing",
    JobState.COMPLETED: "succeeded",
    JobState.FAILED: "failed",
    JobState.TIMED_OUT: "failed",
    JobState.CANCELLED: "canceled",
}
_NONE = orjson.Fragment(b"null")
_WAIT = re.compile(r"wait\s*=\s*\"?(\d{1,6})\"?")


class PredictionRequest(BaseModel):
    """The JSON of a new prediction. Keys that are not known are left alone, as Cog's callers are used to."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True)

    input: Any = Field(default_factory=dict)
    id: str | None = Field(None, max_length=1024)
    version: str | None = Field(None, max_length=256)
    webhook: str | None = Field(None, max_length=2048)
    webhook_events_filter: list[Literal["start", "output", "logs", "completed"]] | None = Field(
        None, max_length=100
    )

    @property
    def events(self) -> tuple[str, ...]:
        """What the webhook is told of: everything, unless fewer are asked for."""
        return tuple(self.webhook_events_filter or EVENTS)

    def input_json(self) -> bytes:
        """The handler's event."""
        return dump_json(self.input)


def parse(body: bytes) -> PredictionRequest:
    """BadInput if it is not JSON; InputInvalid if it is not a prediction's."""
    try:
        return PredictionRequest.model_validate_json(body or b"{}")
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        if found[0]["type"] == "json_invalid":
            raise BadInput(f"The body is not JSON: {found[0]['msg']}.", remedy='Send {"input": …}.') from None
        problems = [
            {"field": ".".join(map(str, one["loc"])) or "the body", "problem": one["msg"]}
            for one in found[:20]
        ]
        first = problems[0]
        raise InputInvalid(
            f"The prediction cannot be made: {first['field']}: {first['problem']}.",
            remedy='Send for example {"input": {"text": "hello"}}.',
            details={"problems": problems},
        ) from None


@dataclass(frozen=True, slots=True)
class Preference:
    """The header Prefer: `wait_s` 0 is not at all, None until it has ended."""

    wait_s: float | None = None

    @classmethod
    def of(cls, headers: Iterable[str]) -> Preference:
        """What all its lines say together (RFC 7240); what is not known is left alone."""
        said = [part.split(";")[0].strip().lower() for line in headers for part in line.split(",")]
        waits = [float(found[1]) for part in said if (found := _WAIT.fullmatch(part)) is not None]
        if waits:
            return cls(min(waits[0], MOST_WAIT_S))
        return cls(0.0 if "respond-async" in said else None)


def stored_id(wanted: str, owner: str) -> str:
    """Under which id a job is stored whose caller chose one: nobody is to learn from a refusal what others chose."""
    return f"{wanted}~{owner}" if wanted and owner else wanted


def chosen_id(job: Job) -> str:
    """The id as its caller knows it."""
    return job.id.removesuffix(f"~{job.owner}") if job.owner else job.id


def shown(job: Job, pieces: Iterable[bytes] = ()) -> dict[str, Any]:
    """The prediction as these routes show it, for orjson. `pieces` are those of a streamed answer that goes on."""
    took_s = job.ended_s - job.started_s
    return {
        "id": chosen_id(job),
        "version": job.function,
        "status": STATUSES[job.state],
        "input": _input(job),
        "output": _output(job, pieces),
        "error": str(job.error.get("message", "")) if job.error is not None and job.state.final else None,
        "logs": job.logs,
        "metrics": {"predict_time": max(0.0, took_s)} if job.ended_s and job.started_s else {},
        "created_at": _date(job.created_s),
        "started_at": _date(job.started_s),
        "completed_at": _date(job.ended_s),
        "webhook": job.webhook.url if job.webhook is not None else None,
    }


def _input(job: Job) -> Any:
    """As it was sent. Other routes take jobs of other types: those are not shown."""
    return orjson.Fragment(job.input) if job.input and not job.content_type else _NONE


def _output(job: Job, pieces: Iterable[bytes]) -> Any:
    if not job.state.final and (found := b",".join(pieces)):
        return orjson.Fragment(b"[" + found + b"]")
    return message.status(job, job.ended_s or job.created_s).get("output", _NONE)


def _date(at_s: float) -> str | None:
    return datetime.fromtimestamp(at_s, UTC).isoformat() if at_s else None
