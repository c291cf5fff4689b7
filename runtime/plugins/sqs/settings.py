"""Defines the settings of an SQS queue as an event source."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field

from ...ground.settings.event_source import EventSource
from ...ground.settings.validation import checked

MAX_VISIBILITY_S = 43_200
"""The longest visibility timeout that SQS accepts, in seconds."""
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_QUEUE_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}(\.fifo)?")
_AMAZON_HOST = re.compile(r"sqs\.([a-z0-9-]+)\.amazonaws\.com(\.cn)?")


def _url_problem(url: str) -> str | None:
    """Return the problem of `url`, or None. The text does not quote the URL, because it may hold a password."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return str(error)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return "it must begin with http:// or https:// and name a host"
    if parts.username is not None or parts.query or parts.fragment:
        return "it must not have a user, a query or a fragment"
    return None


def _queue_problem(url: str) -> str | None:
    problem = _url_problem(url)
    if problem is None and not _QUEUE_NAME.fullmatch(urlsplit(url).path.rpartition("/")[2]):
        problem = "it must end with the queue's name"
    return problem and f"source.queue is not a queue's URL: {problem}"


def _endpoint_problem(url: str | None) -> str | None:
    problem = None if url is None else _url_problem(url)
    return problem and f"source.endpoint_url is not a URL: {problem}"


def _result_problem(text: str | None) -> str | None:
    scheme, _, rest = (text or "").partition("://")
    is_bucket = scheme == "s3" and _BUCKET.fullmatch(rest.partition("/")[0])
    is_queue = scheme == "sqs" and _QUEUE_NAME.fullmatch(rest)
    if text is None or is_bucket or is_queue or _queue_problem(text) is None:
        return None
    return "source.result is not a destination; allowed: sqs://queue-name, a queue's URL, s3://bucket/prefix"


class SqsSource(EventSource, frozen=True, extra="forbid", strict=True):
    """A queue of SQS. Its messages are run as jobs, and `result` names the destination of the results."""

    opener: ClassVar = "pilotflame.runtime.plugins.sqs.queue:open_queue"
    package: ClassVar = "boto3"
    extra: ClassVar = "s3"
    longest_s: ClassVar = MAX_VISIBILITY_S
    # The timeout is renewed while a job runs. If a gateway dies, another gateway gets its messages after the rest of the timeout.
    visibility_s: ClassVar[int] = 60
    """The visibility timeout of a received message."""

    type: Literal["sqs"] = Field(description="The kind of message bus.")
    queue: Annotated[str, checked(_queue_problem)] = Field(description="The queue's URL.")
    result: Annotated[str | None, checked(_result_problem)] = Field(
        None, description="Where results go: sqs://queue-name, a queue's URL, or s3://bucket/prefix."
    )
    endpoint_url: Annotated[str | None, checked(_endpoint_problem)] = Field(
        None, description="The endpoint of SQS and S3; by default the queue's host, or Amazon's."
    )
    region: str | None = Field(None, min_length=1, description="The region; by default the queue's.")
    profile: str | None = Field(None, min_length=1, description="A profile in the gateway's AWS files.")

    @property
    def queue_name(self) -> str:
        return self.queue.rpartition("/")[2]

    @property
    def address(self) -> str:
        return self.queue

    @property
    def addresses(self) -> dict[str, str]:
        called = {
            "queue": self.queue, "result": self.result, "endpoint_url": self.endpoint_url, "profile": self.profile,
        }  # fmt: skip
        return {key: address for key, address in called.items() if address is not None}

    @property
    def lease_s(self) -> float:
        return self.visibility_s

    @property
    def region_name(self) -> str | None:
        """The setting `region`, or else the region in the queue's URL, or else None."""
        found = _AMAZON_HOST.fullmatch(urlsplit(self.queue).hostname or "")
        return self.region or (found[1] if found else None)

    @property
    def sqs_endpoint(self) -> str | None:
        """The setting `endpoint_url`, or else the queue's host. None for Amazon's hosts, whose endpoint boto3 knows."""
        parts = urlsplit(self.queue)
        is_amazon = (parts.hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))
        return self.endpoint_url if self.endpoint_url or is_amazon else f"{parts.scheme}://{parts.netloc}"
