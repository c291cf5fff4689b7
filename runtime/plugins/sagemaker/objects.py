"""Reads the inputs of asynchronous invocations from S3 and writes their answers, with the function's own secrets."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from ....errors import BadInput, InputTooLarge, NotSupported, SourceUnavailable
from ....snapshot.extras import needs
from ....snapshot.sources.variables import AWS
from ...jobs.events.blocking_calls import call_in_thread
from ...node.functions.live import Live
from ...node.functions.registry import Functions

T = TypeVar("T")
INPUT, OUTPUT = "SAGEMAKER_ASYNC_INPUT", "SAGEMAKER_ASYNC_OUTPUT"
"""The variables in a function's `env` that name the prefixes of inputs and of answers, as s3://bucket/prefix."""
SCHEME = "s3://"
MAX_READS, MAX_WRITES = 8, 4
"""The most inputs of one function that are read at the same time, and the most answers that are written."""
CALL_S = 30.0
"""How long a caller waits for the store to answer, with all attempts. Before a read, the caller also waits up to this long for
earlier reads.
"""
ATTEMPTS = 2
PIECE_BYTES = 64 << 10
_REMEDY = "Set env.SAGEMAKER_ASYNC_OUTPUT of the function to a prefix, as s3://bucket/answers, or submit a job at /v2."


@dataclass(frozen=True, slots=True)
class FoundObject:
    """An object of S3."""

    body: bytes
    content_type: str


class _Threads:
    """The threads in which the reads, or the writes, of one function run."""

    def __init__(self, most: int) -> None:
        self._places = asyncio.Semaphore(most)

    async def run(self, call: Callable[[], T], wait_s: float | None = None) -> T:
        """Run a blocking call. Raise TimeoutError if no thread is free for `wait_s`, or if the call takes longer than CALL_S.

        A call that takes longer goes on, and its thread counts until it has returned.
        """
        loop = asyncio.get_running_loop()

        def counted() -> T:
            try:
                return call()
            finally:
                # The loop is closed if the gateway has ended.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._places.release)

        async with asyncio.timeout(wait_s):
            await self._places.acquire()
        async with asyncio.timeout(CALL_S):
            return await call_in_thread(counted)


class Objects:
    """The objects that a function may use. The gateway's credentials are never used, because callers name the objects."""

    def __init__(self, functions: Functions) -> None:
        self._functions = functions
        self._reads, self._writes = WeakValueDictionary[str, _Threads](), WeakValueDictionary[str, _Threads]()

    def output_prefix(self, live: Live) -> str:
        """Return the prefix for answers, without a slash at its end. Raise NotSupported if there is none, PolicyViolation
        if a policy does not allow it.
        """
        prefix = self._prefix(live, OUTPUT)
        if not prefix:
            message = f"{live.record.function} has no place for the answers of InvokeEndpointAsync."
            raise NotSupported(message, remedy=_REMEDY)
        return prefix

    async def read(self, live: Live, url: str, most: int) -> FoundObject:
        """Return an object below the function's prefix for inputs.

        Raise BadInput if `url` is not below the prefix, or if the function has no secrets for S3. Raise InputTooLarge if
        the object has more than `most` bytes, PolicyViolation if a policy does not allow the prefix, SourceError if the
        read fails.
        """
        prefix = self._prefix(live, INPUT)
        if not prefix or not url.startswith(f"{prefix}/"):
            remedy = f"Name an object below {prefix}." if prefix else f"Set env.{INPUT} of the function."
            raise BadInput("InputLocation is not below the function's prefix for inputs.", remedy=remedy)

        def read(client: Any, place: dict[str, str]) -> FoundObject:
            found = client.get_object(**place)
            with contextlib.closing(found["Body"]) as stream:
                return FoundObject(_whole(stream, most, url), found.get("ContentType", ""))

        threads = self._reads.setdefault(live.record.function, _Threads(MAX_READS))
        return await self._call(live, url, read, threads, CALL_S)

    async def write(self, live: Live, url: str, body: bytes, content_type: str) -> None:
        """Write an object. If MAX_WRITES other writes of the function are running, wait until one ends.

        Raise BadInput if the function has no secrets for S3, PolicyViolation if a policy does not allow the prefix,
        SourceError if the write fails.
        """
        # Check the policy again, because it may have become narrower since the job was submitted.
        self._prefix(live, OUTPUT)

        def write(client: Any, place: dict[str, str]) -> None:
            client.put_object(**place, Body=body, ContentType=content_type)

        threads = self._writes.setdefault(live.record.function, _Threads(MAX_WRITES))
        await self._call(live, url, write, threads)

    def _prefix(self, live: Live, variable: str) -> str:
        """Return the prefix in a variable, without a slash at its end; "" if there is none. Raise PolicyViolation if a
        policy does not allow it.
        """
        record = live.record
        prefix = record.settings.env.get(variable, "")
        if not prefix.startswith(SCHEME):
            return ""
        self._functions.policies.check_place(f"env.{variable}", prefix, record.deployed_by)
        return prefix.rstrip("/")

    async def _call(
        self, live: Live, url: str, request: Callable[[Any, dict[str, str]], T], threads: _Threads, wait_s: float | None = None,
    ) -> T:  # fmt: skip
        bucket, _, key = url.removeprefix(SCHEME).partition("/")
        record = live.record
        own = AWS.own(self._functions.secrets.of(record.function))
        if not own.get("AWS_ACCESS_KEY_ID"):
            message = f"{record.function} has no secret AWS_ACCESS_KEY_ID for S3."
            raise BadInput(
                message, remedy="Set the secrets AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the function."
            )
        addresses = self._functions.policies.queue_access(record.deployed_by).addresses

        def call() -> T:
            with needs("S3", "boto3"):
                from ....snapshot.sources.s3_client import S3Client  # noqa: PLC0415  its import takes long
            client = S3Client.open(bucket, None, own, addresses, attempts=ATTEMPTS)
            with client.call(key) as boto:
                return request(boto, {"Bucket": bucket, "Key": key})

        try:
            return await threads.run(call, wait_s)
        except TimeoutError:
            raise _too_slow(url) from None


def _whole(stream: Any, most: int, url: str) -> bytes:
    """Return the bytes of an object. Raise InputTooLarge, or SourceUnavailable if they take longer than the caller waits."""
    body, until_s = bytearray(), time.monotonic() + CALL_S
    for piece in stream.iter_chunks(PIECE_BYTES):
        body += piece
        if len(body) > most:
            raise InputTooLarge(f"The input is larger than {most} bytes.", remedy="Send a smaller one.")
        if time.monotonic() > until_s:
            raise _too_slow(url)
    return bytes(body)


def _too_slow(url: str) -> SourceUnavailable:
    fault = f"{url}: the store has not answered within {CALL_S:g} s."
    return SourceUnavailable(fault, remedy="Check the endpoint, and try again.")
