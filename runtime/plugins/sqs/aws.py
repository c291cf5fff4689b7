"""Calls AWS in threads, with boto3. It raises BusFailed for errors of boto3.

Functions use the credentials in their own secrets. A trusted function without secrets AWS_… uses the gateway's credentials.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, TypeVar

from ....errors import BusFailed, PackageMissing, SourceDenied
from ....snapshot.extras import needs
from ....snapshot.sources.variables import AWS
from ...jobs.events.blocking_calls import call_in_thread
from ...jobs.events.message_queue import Identity
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
    "AccessDenied": "Grant the credentials what the source needs: ReceiveMessage, DeleteMessage and"
    " ChangeMessageVisibility of the queue, and GetQueueAttributes to see its length; SendMessage or PutObject where outputs go.",
    "InvalidParameterValue": "Return less than the queue's MaximumMessageSize, or set result to s3://bucket/prefix.",
    "ExpiredToken": "Log in again, or refresh the session token.",
}
_USE_PUBLIC = (
    "Use a public address, or ask the gateway's owner to list its network in PILOTFLAME_QUEUE_NETWORKS."
)
_REFUSED_KEYS = frozenset(
    {"ExpiredToken", "InvalidAccessKeyId", "InvalidClientTokenId", "SignatureDoesNotMatch"}
)
# Parts of the names of AWS's and boto3's errors.
_NO_KEYS = _REFUSED_KEYS | {
    "AuthenticationToken", "Credential", "InvalidSecurity", "ProfileNotFound", "SSO", "UnrecognizedClient",
}  # fmt: skip
_REMEDIES |= dict.fromkeys(
    _NO_KEYS - _REMEDIES.keys(),
    "Check the AWS credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the gateway's environment, or a profile there;"
    " for a function that may not use these, its secrets of these names.",
)


class AwsClient:
    """A client of the service "sqs" or "s3". Its error messages start with `purpose`.

    The boto3 client inside is created by the first call.
    """

    def __init__(self, service: str, purpose: str, source: SqsSource, identity: Identity) -> None:
        self._service = service
        self._purpose = purpose
        self._source = source
        self._identity = identity
        self._opening = threading.Lock()
        self._client: Any = None

    async def call(self, request: Callable[[Any], T], on_abandoned: Callable[[T], object] | None = None) -> T:
        """Run `request(client)` in a thread and return its result. Raise BusFailed if the request fails.

        If the caller is cancelled, the request goes on, and a thread calls `on_abandoned` with its result.
        """
        return await call_in_thread(lambda: self.call_blocking(request), on_abandoned)

    def call_blocking(self, request: Callable[[Any], T]) -> T:
        """Run `request(client)` in this thread and return its result. Blocks. Raise BusFailed if the request fails."""
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
        except SourceDenied as error:
            raise self._failed(error.message.rstrip("."), _USE_PUBLIC, "address") from None
        except boto.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", "")).rpartition(".")[2]
            self._forget_secrets(code)
            raise self._failed(f"{service} refuses the request ({code})", _remedy(code), code) from error
        except (LookupError, TypeError, AttributeError) as error:
            problem = f"the response of {service} is malformed ({error!r})"
            remedy = "Check that the endpoint is AWS or compatible with it."
            raise self._failed(problem, remedy, "malformed") from error
        except (boto.BotoCoreError, ValueError) as error:
            problem, name = f"the request to {service} failed", type(error).__name__
            usual = "Check the endpoint, the network, and the AWS settings in the gateway's environment."
            remedy = _remedy(name, usual)
            raise self._failed(f"{problem} ({name})", remedy, name) from error

    async def close(self) -> None:
        if self._client is not None:
            await call_in_thread(self._client.close)

    def _opened(self) -> Any:
        with self._opening:
            if self._client is None:
                self._client = self._new_client()
            return self._client

    def _new_client(self) -> Any:
        # Imported only when they are needed, because the import of boto3 takes 250 ms.
        from botocore.config import Config  # noqa: PLC0415

        own = self._own_secrets()
        config = Config(
            connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S, max_pool_connections=CONNECTIONS,
            retries={"mode": "standard", "total_max_attempts": 4},
            request_checksum_calculation="when_required", response_checksum_validation="when_required",
            ignore_configured_endpoint_urls=None if own is None else True,
        )  # fmt: skip
        endpoint = self._source.sqs_endpoint if self._service == "sqs" else self._source.endpoint_url
        client = _session(self._source, own).client(self._service, endpoint_url=endpoint, config=config)
        if (addresses := self._identity.access.addresses) is not None:
            from ....snapshot.sources.checked_boto import check_addresses  # noqa: PLC0415

            check_addresses(client, addresses)
        return client

    def _own_secrets(self) -> dict[str, str] | None:
        """Return the function's secrets to use, or None to use the gateway's identity. Raise BusFailed if the function
        must have secrets and has none.
        """
        own = AWS.own(self._identity.secrets())
        alone = self._identity.access.own_only or any(name.startswith("AWS_") for name in own)
        # A source with a profile uses this profile of the gateway, because a policy has allowed it by its name.
        if not alone or self._source.profile is not None:
            return None
        if not own.get("AWS_ACCESS_KEY_ID"):
            fault = "the function has no secret AWS_ACCESS_KEY_ID, and may not use the gateway's credentials"
            remedy = "Set the secrets AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the function."
            raise self._failed(fault, remedy, "no_credentials")
        return own

    def _forget_secrets(self, code: str) -> None:
        """Read the function's secrets again before the next request, if AWS has refused them."""
        if code in _REFUSED_KEYS:
            with self._opening:
                self._client = None

    def _failed(self, problem: str, remedy: str, code: str) -> BusFailed:
        return BusFailed(f"{self._purpose}: {problem}.", remedy=remedy, details={"code": code})


def is_refusal(error: BusFailed) -> bool:
    """Return True if the error means that the credentials are missing or invalid, or that a policy forbids the address."""
    code = str(error.details.get("code"))
    return code in ("address", "no_credentials") or any(part in code for part in _NO_KEYS)


def _remedy(code: str, usual: str = "") -> str:
    return next((text for part, text in _REMEDIES.items() if part in code), usual)


def _session(source: SqsSource, own: Mapping[str, str] | None) -> Any:
    """Return a session with the function's secrets `own`, or with the gateway's identity if `own` is None."""
    import boto3  # noqa: PLC0415  as in `_new_client`

    from ....snapshot.sources.s3_client import own_region, own_session  # noqa: PLC0415

    if own is None:
        return boto3.Session(profile_name=source.profile, region_name=source.region_name)
    return boto3.Session(botocore_session=own_session(own), region_name=source.region_name or own_region(own))
