"""Creates the boto3 client of one S3 bucket, and turns S3's error codes into errors of pilotflame.

Import this module only where S3 is used, because importing boto3 takes a quarter of a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from botocore import UNSIGNED, exceptions
from botocore.config import Config

from ...addresses import Addresses
from ...errors import (
    PilotflameError,
    SnapshotChanged,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
)
from .variables import ANONYMOUS_VARIABLE

_AMAZON = (".amazonaws.com", ".amazonaws.com.cn", ".api.aws")

_GRANT = "Grant s3:GetObject on it (and s3:ListBucket, so that a missing key is distinguished from a forbidden one)."
_RENEW = "Log in again, or refresh the session token."
_BUCKET = "Check the bucket's name and the endpoint."
_REPUBLISH = "Publish new weights under a new name, with a new manifest."
_REGION = "Set the bucket's region: AWS_REGION, or the profile's `region`."
_SIGNING = "Check the secret key, and that no proxy rewrites the host or the path."
_LATER = "Try again. If it persists, use less concurrency."
_OWN = "with the credentials of the function's secrets"

# Each entry has the codes of S3, the class of the error, its meaning and the remedy. A number is an HTTP status, which
# stands for the code if the response has no body, for example the response to HEAD.
_ERRORS: tuple[tuple[str, type[PilotflameError], str, str], ...] = (
    ("NoSuchBucket", SourceMissing, "there is no such bucket", _BUCKET),
    ("NoSuchKey", SourceMissing, "there is no such key", "Check the prefix; the manifest names keys below it."),
    ("404", SourceMissing, "there is no such key, or no such bucket", _BUCKET),
    ("AccessDenied 403", SourceDenied, "access is denied", _GRANT),
    ("AllAccessDisabled", SourceDenied, "access is denied to everybody", _GRANT),
    ("ExpiredToken TokenRefreshRequired", SourceDenied, "the session token has expired", _RENEW),
    ("InvalidToken", SourceDenied, "the session token is not valid", _RENEW),
    ("InvalidAccessKeyId", SourceDenied, "the access key is unknown", "Check the access key's id."),
    ("SignatureDoesNotMatch", SourceDenied, "the signature does not match", _SIGNING),
    ("RequestTimeTooSkewed", SourceDenied, "this machine's clock is too far off", "Set this machine's clock."),
    ("InvalidObjectState", SourceDenied, "the object is archived", "Restore it from the archive first."),
    ("PreconditionFailed 412", SnapshotChanged, "the object changed while it was read", _REPUBLISH),
    ("InvalidRange", SnapshotChanged, "the object is shorter now", _REPUBLISH),
    ("PermanentRedirect 301", SourceError, "the bucket is in another region", _REGION),
    ("AuthorizationHeaderMalformed", SourceError, "the bucket is in another region", _REGION),
    ("AuthorizationQueryParametersError", SourceError, "the bucket is in another region", _REGION),
    ("SlowDown", SourceUnavailable, "the bucket receives too many requests", _LATER),
    ("ServiceUnavailable", SourceUnavailable, "the store is busy", _LATER),
    ("InternalError", SourceUnavailable, "the store failed", _LATER),
    ("RequestTimeout", SourceUnavailable, "the store waited too long for the request", _LATER),
)  # fmt: skip

# The errors with which boto3 reports that credentials are missing, incomplete, or expired and cannot be renewed.
_CREDENTIAL_ERRORS = (
    exceptions.NoCredentialsError, exceptions.PartialCredentialsError, exceptions.CredentialRetrievalError,
    exceptions.ProfileNotFound, exceptions.SSOError, exceptions.TokenRetrievalError,
    exceptions.RefreshWithMFAUnsupportedError,
)  # fmt: skip

ATTEMPTS = 5
# Send checksums only when required. By default, boto3 sends them in trailers, which stores other than Amazon's refuse.
# Checksums are not needed, because the manifest has digests.
_CONFIG = Config(
    signature_version="s3v4", connect_timeout=10.0, read_timeout=30.0,
    request_checksum_calculation="when_required", response_checksum_validation="when_required",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class S3Client:
    """A boto3 client. `credentials` describes the origin of the credentials in messages, without secrets."""

    boto: Any
    bucket: str
    credentials: str
    ca_bundle: str | None
    # True if the endpoint belongs to Amazon, False for another store with the interface of S3.
    amazon: bool

    @staticmethod
    def open(
        bucket: str, region: str | None = None, own: Mapping[str, str] | None = None,
        addresses: Addresses | None = None, attempts: int = ATTEMPTS,
    ) -> S3Client:  # fmt: skip
        """Create a client with the settings of the environment and the profile. `region` overrides the region in them.

        `own` are the secrets of a function. If `own` is given, even empty, the environment and the profile are not read. If
        `addresses` are given, the client connects only to these addresses. The client makes a request at most `attempts`
        times. Raise SourceDenied if the credentials cannot be loaded, and SourceError if the settings are not valid.
        """
        try:
            core = botocore.session.Session() if own is None else own_session(own)
            anonymous = (os.environ if own is None else own).get(ANONYMOUS_VARIABLE) == "1"
            keyless = own is not None and not own.get("AWS_ACCESS_KEY_ID")
            found = None if anonymous or keyless else core.get_credentials()
            session = boto3.Session(botocore_session=core, region_name=region or own_region(own))
            retries = Config(retries={"mode": "standard", "total_max_attempts": attempts})
            config = _CONFIG.merge(retries)
            if found is None:
                config = config.merge(Config(signature_version=UNSIGNED))
            endpoint: str | None = None
            if own is not None:
                endpoint = own.get("AWS_ENDPOINT_URL_S3") or own.get("AWS_ENDPOINT_URL") or None
                config = config.merge(Config(ignore_configured_endpoint_urls=True))
            boto = session.client("s3", config=config, endpoint_url=endpoint)
            amazon = (urlsplit(boto.meta.endpoint_url).hostname or "").endswith(_AMAZON)
            if amazon and "." not in bucket:
                # Put the bucket's name into the host. boto3 would sign path-style URLs for the global endpoint. That
                # endpoint redirects to a regional host, where the signature is not valid. A name with dots stays in
                # the path, because a host with it would not match Amazon's certificates.
                virtual = config.merge(Config(s3={"addressing_style": "virtual"}))
                boto = session.client("s3", config=virtual, endpoint_url=endpoint)
        except _CREDENTIAL_ERRORS as error:
            raise _no_credentials(bucket, "", error) from error
        except (exceptions.BotoCoreError, ValueError) as error:
            fault = f"s3://{bucket}: boto3 is not set up: {type(error).__name__}."
            raise SourceError(fault, remedy="Check the AWS settings and the endpoint.") from error
        ca_bundle = core.get_config_variable("ca_bundle")
        if addresses is not None:
            from .checked_boto import check_addresses  # noqa: PLC0415  most clients need no check

            check_addresses(boto, addresses, ca_bundle)
        origin = _OWN if own and found is not None else _credentials_origin(core, found, anonymous)
        return S3Client(boto, bucket, origin, str(ca_bundle) if ca_bundle else None, amazon)

    @contextmanager
    def call(self, key: str) -> Iterator[Any]:
        """Yield the boto3 client. Turn an error of boto3 in the block into an error of pilotflame about `key`."""
        where = f"s3://{self.bucket}/{key}"
        try:
            yield self.boto
        except exceptions.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            refused = f"the store refuses the request ({code}), made {self.credentials}"
            raise self.error(code, key) or SourceError(f"{where}: {refused}.") from error
        except _CREDENTIAL_ERRORS as error:
            raise _no_credentials(self.bucket, key, error) from error
        except RecursionError:
            # If a store redirects every request to another region, botocore follows without a limit.
            raise SourceError(f"{where}: the store redirects without end.", remedy=_REGION) from None
        except exceptions.BotoCoreError as error:
            fault = f"{where}: {type(error).__name__}: {self.boto.meta.endpoint_url} does not respond."
            raise SourceUnavailable(fault, remedy="Check the endpoint.", details={"object": key}) from error

    def error(
        self, code: str, key: str, details: dict[str, object] | None = None, region: str = ""
    ) -> PilotflameError | None:
        """Return the error for S3's error code `code`, or None if the code is unknown.

        `details` are added to the details of the error. `region` is the bucket's region, if the response has it.
        """
        found = next((entry for entry in _ERRORS if code in entry[0].split()), None)
        if found is None:
            return None
        _, cls, meaning, remedy = found
        if cls is SourceDenied:
            meaning = f"{meaning}, requested {self.credentials}"
        if remedy is _REGION and region:
            meaning = f"{meaning} ({region})"
        known = {"object": key, "bucket": self.bucket, "code": code, **(details or {})}
        return cls(f"s3://{self.bucket}/{key}: {meaning} ({code}).", remedy=remedy, details=known)


# Messages show only the class of a boto3 error, because its text may have a signed URL.
def _no_credentials(bucket: str, key: str, error: Exception) -> SourceDenied:
    return SourceDenied(
        f"s3://{bucket}/{key}: no credentials are available: {type(error).__name__}.",
        remedy="Check AWS_PROFILE and the profile's login, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        details={"object": key, "bucket": bucket},
    )


def own_session(own: Mapping[str, str]) -> Any:
    """Return a session with only the settings and credentials in `own`, and none of this process."""
    # Maps the name of a setting to its key in the profile, its environment variable, its default, and its conversion.
    nothing = {
        "profile": (None, None, None, None),
        "config_file": (None, None, os.devnull, None),
        "credentials_file": (None, None, os.devnull, None),
    }
    core = botocore.session.Session(session_vars=nothing)
    if key := own.get("AWS_ACCESS_KEY_ID"):
        core.set_credentials(key, own.get("AWS_SECRET_ACCESS_KEY", ""), own.get("AWS_SESSION_TOKEN") or None)
    return core


def own_region(own: Mapping[str, str] | None) -> str | None:
    """Return the region in `own`, or us-east-1 if it has no region. None if `own` is None."""
    return None if own is None else own.get("AWS_REGION") or own.get("AWS_DEFAULT_REGION") or "us-east-1"


def _credentials_origin(core: Any, found: Any, anonymous: bool) -> str:
    if found is None:
        return "anonymously, as configured" if anonymous else "anonymously, since no credentials were found"
    if found.method == "env":
        return "with the credentials of the environment"
    if found.method in {"shared-credentials-file", "config-file", "sso", "assume-role", "custom-process"}:
        return f"with the credentials of profile {core.profile or 'default'!r}"
    return f"with the credentials of {found.method}"
