"""The settings of an event source: a `[[source]]` table of pilotflame.toml."""

from __future__ import annotations

import re
from importlib.util import find_spec
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

MAX_VISIBILITY_S = 43_200
"""SQS keeps no message away from others for longer."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}(\.fifo)?")
_AMAZONS = re.compile(r"sqs\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?")


class EventSource(BaseModel):
    """Where messages come from that the function is run with, and where its answers go."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    type: Literal["sqs"] = Field(description="The kind of bus.")
    queue: str = Field(description="The queue's URL.")
    concurrency: int | None = Field(
        None,
        ge=1,
        le=10_000,
        description="Messages at work at a time; by default as many as all workers can run.",
    )
    visibility_s: int = Field(
        60,
        ge=1,
        le=MAX_VISIBILITY_S,
        description="Seconds for which a message is kept from others; renewed while its job is at work.",
    )
    backoff_s: int = Field(
        5,
        ge=0,
        le=900,
        description="Seconds until a message whose job failed comes again; twice as many each time, up to 900.",
    )
    result: str | None = Field(
        None, description="Where answers go: sqs://queue-name, a queue's URL, or s3://bucket/prefix."
    )
    endpoint_url: str | None = Field(
        None, description="Where SQS and S3 are asked, if not at Amazon's own address."
    )
    region: str | None = Field(
        None, min_length=1, description="The region; by default the queue's URL says it."
    )
    profile: str | None = Field(
        None, min_length=1, description="Whose credentials: a profile of the gateway's AWS files."
    )

    @property
    def queue_name(self) -> str:
        return self.queue.rpartition("/")[2]

    @property
    def region_name(self) -> str | None:
        """The region that is said, or that the queue's URL names."""
        found = _AMAZONS.fullmatch(urlsplit(self.queue).hostname or "")
        return self.region or (found[1] if found else None)

    @property
    def sqs_endpoint(self) -> str | None:
        """Where the queue is asked; None: where boto3 asks by itself."""
        parts = urlsplit(self.queue)
        if self.endpoint_url is not None or (parts.hostname or "").endswith(
            (".amazonaws.com", ".amazonaws.com.cn")
        ):
            return self.endpoint_url
        return f"{parts.scheme}://{parts.netloc}"

    @field_validator("queue")
    @classmethod
    def _is_queue(cls, url: str) -> str:
        if problem := _queue_problem(url):
            raise ValueError(f"source.queue is not a queue's URL: {problem}")
        return url

    @field_validator("endpoint_url")
    @classmethod
    def _is_endpoint(cls, url: str | None) -> str | None:
        if url is not None and (problem := _url_problem(url)):
            raise ValueError(f"source.endpoint_url is not a URL: {problem}")
        return url

    @field_validator("result")
    @classmethod
    def _is_result(cls, text: str | None) -> str | None:
        if text is None:
            return None
        scheme, _, rest = text.partition("://")
        if scheme == "s3" and _BUCKET.fullmatch(rest.partition("/")[0]):
            return text
        if scheme == "sqs" and _QUEUE_NAME.fullmatch(rest):
            return text
        if scheme in ("http", "https") and _queue_problem(text) is None:
            return text
        raise ValueError(
            "source.result is none that is known; allowed: sqs://queue-name, a queue's URL, s3://bucket/prefix"
        )


def _queue_problem(url: str) -> str | None:
    problem = _url_problem(url)
    if problem is None and not _QUEUE_NAME.fullmatch(urlsplit(url).path.rpartition("/")[2]):
        return "it must end in the queue's name"
    return problem


def _url_problem(url: str) -> str | None:
    """What is wrong with it; never quotes it, since it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "it must begin with http:// or https:// and name a host"
    if parts.username is not None or parts.query or parts.fragment:
        return "it may hold no user, no query and no fragment"
    return None


def missing_package() -> str:
    """Return what an event source needs and this machine lacks, with the remedy; "" if nothing is missing."""
    return "" if find_spec("boto3") else "boto3 is not installed: pip install boto3"
