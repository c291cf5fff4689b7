"""Calls AWS in threads, with boto3 and the gateway's credentials. It raises BusFailed for errors of boto3."""

from __future__ import annotations

import threading
from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar

from ....errors import BusFailed, PackageMissing
from ....snapshot.extras import needs
from ...events.blocking_calls import call_in_thread
from .settings import SqsSource

T = TypeVar("T")
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
"""The time for which boto3 waits for a response. It must be longer than a poll, which is `POLL_S` in queue.py."""
CONNECTIONS = 32
"""The most connections that boto3 keeps open for reuse."""

_CHECK_QUEUE = "Check the queue's URL, and the region."
_REMEDIES = {
    "NonExistentQueue": _CHECK_QUEUE,
    "QueueDoesNotExist": _CHECK_QUEUE,
    "NoSuchBucket": "Check the bucket's name, and the region.",
    "AccessDenied": "Grant the gateway's credentials what it needs: ReceiveMessage, DeleteMessage and"
    " ChangeMessageVisibility of the queue, and GetQueueAttributes to see its length; SendMessage or PutObject where outputs go.",
    "InvalidClientTokenId": "Check the gateway's AWS credentials.",
    "ExpiredToken": "Log in again, or refresh the gateway's session token.",
}


class AwsClient:
    """A client of the service "sqs" or "s3". Its error messages start with `purpose`.

    The boto3 client inside is created by the first call.
    """

    def __init__(self, service: str, purpose: str, source: SqsSource) -> None:
        self._service = service
        self._purpose = purpose
        self._source = source
        self._opening = threading.Lock()
        self._client: Any = None

    async def call(self, request: Callable[[Any], T], on_abandoned: Callable[[T], object] | None = None) -> T:
        """Run `request(client)` in a thread and return its result. `call_in_thread` explains `on_abandoned`.

        Raises BusFailed.
        """
        return await call_in_thread(lambda: self.call_blocking(request), on_abandoned)

    def call_blocking(self, request: Callable[[Any], T]) -> T:
        """Run `request(client)` in this thread and return its result. Blocks. Raises BusFailed."""
        service = self._service.upper()
        # A gateway may restore a function without boto3. Once boto3 is installed, the next call finds it.
        try:
            with needs(service, "boto3"):
                import_module("boto3")
                from botocore import exceptions as boto  # noqa: PLC0415
        except PackageMissing as error:
            raise self._failed(error.message.rstrip("."), error.remedy, error.code) from None
        # Report errors of boto3 itself without their text, because the text may quote signed requests.
        try:
            return request(self._opened())
        except boto.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "")).rpartition(".")[2]
            remedy = next((text for part, text in _REMEDIES.items() if part in code), "")
            raise self._failed(f"{service} refuses the request ({code})", remedy, code) from error
        except (LookupError, TypeError, AttributeError) as error:
            problem = f"the response of {service} is malformed ({error!r})"
            remedy = "Check that the endpoint is AWS or compatible with it."
            raise self._failed(problem, remedy, "malformed") from error
        except (boto.BotoCoreError, ValueError) as error:
            problem, name = f"the request to {service} failed", type(error).__name__
            remedy = "Check the endpoint, the network, and the AWS settings in the gateway's environment."
            raise self._failed(f"{problem} ({name})", remedy, name) from error

    async def close(self) -> None:
        if self._client is not None:
            await call_in_thread(self._client.close)

    def _opened(self) -> Any:
        with self._opening:
            if self._client is None:
                # Imported only when it is needed, because the import of boto3 takes 250 ms.
                import boto3  # noqa: PLC0415
                from botocore.config import Config  # noqa: PLC0415

                config = Config(
                    connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S,
                    max_pool_connections=CONNECTIONS,
                    retries={"mode": "standard", "total_max_attempts": 4},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )  # fmt: skip
                source = self._source
                session = boto3.Session(profile_name=source.profile, region_name=source.region_name)
                endpoint = source.sqs_endpoint if self._service == "sqs" else source.endpoint_url
                self._client = session.client(self._service, endpoint_url=endpoint, config=config)
            return self._client

    def _failed(self, problem: str, remedy: str, code: str) -> BusFailed:
        return BusFailed(f"{self._purpose}: {problem}.", remedy=remedy, details={"code": code})
