"""A way into AWS: one client of boto3, with the gateway's credentials, called in threads; its errors in our words."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from ...errors import BusFailed
from .blocking_call import BlockingCall

T = TypeVar("T")
INSTALL = "pip install boto3"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
"""Above the longest poll."""
CONNECTIONS = 32

_REMEDIES = {
    "NonExistentQueue": "Check the queue's URL, and the region.",
    "QueueDoesNotExist": "Check the queue's URL, and the region.",
    "NoSuchBucket": "Check the bucket's name, and the region.",
    "AccessDenied": "Grant the gateway's credentials what it needs: ReceiveMessage, DeleteMessage and"
    " ChangeMessageVisibility of the queue; SendMessage or PutObject where answers go.",
    "InvalidClientTokenId": "Check the gateway's AWS credentials.",
    "ExpiredToken": "Log in again, or refresh the gateway's session token.",
}


class Aws:
    """A client of `service` that is made when it is first used. `what` names in errors what it is used for."""

    def __init__(
        self, service: str, what: str, *, endpoint: str | None, region: str | None, profile: str | None
    ) -> None:
        self._service = service
        self._what = what
        self._endpoint = endpoint
        self._region = region
        self._profile = profile
        self._opening = threading.Lock()
        self._client: Any = None

    async def ask(self, call: Callable[[Any], T], unwanted: Callable[[T], object] | None = None) -> T:
        """What `call` does with the client, in a thread. `unwanted` is given what comes after nobody waits any more."""
        return await BlockingCall(lambda: self.ask_here(call), unwanted).outcome()

    def ask_here(self, call: Callable[[Any], T]) -> T:
        """The same in this thread, which may wait for it."""
        with self._words():
            return call(self._opened())

    async def close(self) -> None:
        if self._client is not None:
            await BlockingCall(self._client.close).outcome()

    def _opened(self) -> Any:
        with self._opening:
            if self._client is None:
                import boto3  # noqa: PLC0415  a quarter of a second, for those who have sources
                from botocore.config import Config  # noqa: PLC0415

                config = Config(
                    connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S,
                    max_pool_connections=CONNECTIONS,
                    retries={"mode": "standard", "total_max_attempts": 4},
                    request_checksum_calculation="when_required",
                    response_checksum_validation="when_required",
                )  # fmt: skip
                session = boto3.Session(profile_name=self._profile, region_name=self._region)
                self._client = session.client(self._service, endpoint_url=self._endpoint, config=config)
            return self._client

    @contextmanager
    def _words(self) -> Iterator[None]:
        """What boto3 raises inside becomes one of our errors; never with its text, which may quote what is signed."""
        try:
            from botocore import exceptions as boto  # noqa: PLC0415  see _opened
        except ImportError as error:
            raise BusFailed(f"{self._what}: boto3 is not installed.", remedy=INSTALL) from error
        try:
            yield
        except boto.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "")).rpartition(".")[2]
            raise BusFailed(
                f"{self._what}: {self._service.upper()} refuses it ({code}).",
                remedy=next((text for part, text in _REMEDIES.items() if part in code), ""),
                details={"code": code},
            ) from error
        except (LookupError, TypeError, AttributeError) as error:
            raise BusFailed(
                f"{self._what}: what {self._service.upper()} answers cannot be read ({type(error).__name__}).",
                remedy="Check that its address is that of AWS, or of what speaks as AWS does.",
                details={"code": "malformed"},
            ) from error
        except (boto.BotoCoreError, ValueError) as error:
            raise BusFailed(
                f"{self._what}: {self._service.upper()} cannot be asked ({type(error).__name__}).",
                remedy="Check the address, the network, and the AWS settings in the gateway's environment.",
                details={"code": type(error).__name__},
            ) from error
