"""Reads the inputs of asynchronous invocations from S3 and writes their answers, with the function's own secrets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from ....errors import BadInput, InputTooLarge, NotSupported
from ....snapshot.extras import needs
from ....snapshot.sources.variables import AWS, own_variables
from ...functions.live import Live
from ...functions.registry import Functions

T = TypeVar("T")
INPUT, OUTPUT = "SAGEMAKER_ASYNC_INPUT", "SAGEMAKER_ASYNC_OUTPUT"
"""The variables in a function's `env` with the prefixes, as s3://bucket/prefix, below which inputs and answers are."""
SCHEME = "s3://"
_REMEDY = "Set env.SAGEMAKER_ASYNC_OUTPUT of the function to a prefix, as s3://bucket/answers, or submit a job at /v2."


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object of S3."""

    body: bytes
    content_type: str


class Objects:
    """The objects that a function may use. The gateway's credentials are never used, because callers name the objects."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions

    def output_prefix(self, live: Live) -> str:
        """Return the prefix for answers, without a slash at its end. Raise NotSupported if the function has none."""
        prefix = live.record.settings.env.get(OUTPUT, "").rstrip("/")
        if not prefix.startswith(SCHEME):
            message = f"{live.record.function} has no place for the answers of InvokeEndpointAsync."
            raise NotSupported(message, remedy=_REMEDY)
        return prefix

    async def read(self, live: Live, url: str, most: int) -> FoundObject:
        """Return an object below the function's prefix for inputs. Raise BadInput, InputTooLarge, SourceError."""
        prefix = live.record.settings.env.get(INPUT, "").rstrip("/")
        if not prefix.startswith(SCHEME) or not url.startswith(f"{prefix}/"):
            remedy = f"Name an object below {prefix}." if prefix else f"Set env.{INPUT} of the function."
            raise BadInput("InputLocation is not below the function's prefix for inputs.", remedy=remedy)

        def read(client: Any, place: dict[str, str]) -> FoundObject:
            found = client.get_object(**place)
            with found["Body"] as stream:
                if found["ContentLength"] > most:
                    raise InputTooLarge(
                        f"The input is larger than {most} bytes.", remedy="Send a smaller one."
                    )
                return FoundObject(stream.read(), found.get("ContentType", ""))

        return await self._call(live, url, read)

    async def write(self, live: Live, url: str, body: bytes, content_type: str) -> None:
        """Write an object. Raise SourceError."""
        await self._call(
            live,
            url,
            lambda client, place: client.put_object(**place, Body=body, ContentType=content_type),
        )

    async def _call(self, live: Live, url: str, request: Callable[[Any, dict[str, str]], T]) -> T:
        bucket, _, key = url.removeprefix(SCHEME).partition("/")
        record = live.record
        own = own_variables(self._functions.secrets.of(record.function), AWS)
        if not own.get("AWS_ACCESS_KEY_ID"):
            message = f"{record.function} has no secret AWS_ACCESS_KEY_ID for S3."
            raise BadInput(
                message, remedy="Set the secrets AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the function."
            )
        addresses = self._functions.policies.queue_access(record.deployed_by).addresses

        def call() -> T:
            with needs("S3", "boto3"):
                from ....snapshot.sources.s3_client import S3Client  # noqa: PLC0415  its import takes long
            client = S3Client.open(bucket, None, own, addresses)
            with client.call(key) as boto:
                return request(boto, {"Bucket": bucket, "Key": key})

        return await asyncio.to_thread(call)
