"""Whose credentials, and which endpoint: a client of boto3, from all the places where it looks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import SourceDenied, SourceError
from .s3_codes import Subject

CONNECT_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Access:
    """A client of boto3 and, in words, whose credentials it uses. `amazons`: its endpoint is Amazon's own."""

    client: Any
    who: str
    ca_bundle: str | None
    amazons: bool


def open_access(
    bucket: str,
    endpoint: str | None,
    region: str | None,
    profile: str | None,
    anonymous: bool | None,
    timeout_s: float,
) -> Access:
    """A client for `bucket`. None: from the environment or the profile; SourceDenied, SourceError if that is amiss."""
    # Here and not above: boto3 takes a quarter of a second to import.
    try:
        import boto3  # noqa: PLC0415
        import botocore.exceptions  # noqa: PLC0415
        import botocore.session  # noqa: PLC0415
    except ImportError as error:
        raise SourceError(
            "boto3, which finds S3's credentials, is not installed.", remedy="pip install boto3"
        ) from error
    try:
        core = botocore.session.Session(profile=profile)
        credentials = None if anonymous else core.get_credentials()
        session = boto3.Session(botocore_session=core, region_name=region)
        config = _config(credentials is not None or anonymous is False, timeout_s)
        client = session.client("s3", endpoint_url=endpoint, config=config)
        amazons = _is_amazons(client.meta.endpoint_url)
        if amazons and "." not in bucket:
            # Else URLs are signed for the global endpoint, which redirects buckets of other regions to a host that
            # the signature is not for. Names with dots do not fit Amazon's certificates.
            client = session.client("s3", endpoint_url=endpoint, config=config.merge(_virtual()))
    except no_credentials() as error:
        raise denied(Subject(bucket, "", ""), error) from error
    except (botocore.exceptions.BotoCoreError, ValueError) as error:
        raise SourceError(
            f"s3://{bucket}: boto3 is not set up: {kind(error)}.",
            remedy="Check the AWS settings and the endpoint.",
        ) from error
    return Access(client, _who(core, credentials, anonymous), _bundle(core), amazons)


def _virtual() -> Any:
    from botocore.config import Config  # noqa: PLC0415

    return Config(s3={"addressing_style": "virtual"})


def _config(signed: bool, timeout_s: float) -> Any:
    from botocore import UNSIGNED  # noqa: PLC0415
    from botocore.config import Config  # noqa: PLC0415

    # Path style, where the endpoint is not Amazon's, is boto3's own default. Its checksums in trailers, a default
    # too, are refused by other stores; the manifest's digests hold what they would.
    return Config(
        signature_version="s3v4" if signed else UNSIGNED,
        connect_timeout=CONNECT_TIMEOUT_S,
        read_timeout=timeout_s,
        retries={"mode": "standard", "total_max_attempts": 5},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )


def no_credentials() -> tuple[type[Exception], ...]:
    """What boto3 raises where it finds none, or cannot renew them."""
    from botocore import exceptions as boto  # noqa: PLC0415

    return (
        boto.NoCredentialsError,
        boto.PartialCredentialsError,
        boto.CredentialRetrievalError,
        boto.ProfileNotFound,
        boto.SSOError,
        boto.TokenRetrievalError,
        boto.RefreshWithMFAUnsupportedError,
    )


def denied(subject: Subject, error: Exception) -> SourceDenied:
    """The error where there are no credentials to ask with."""
    return SourceDenied(
        f"{subject}: no credentials can be had: {kind(error)}.",
        remedy="Check AWS_PROFILE and the profile's login, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY.",
        details={"object": subject.key, "bucket": subject.bucket},
    )


def kind(error: Exception) -> str:
    """An error of boto3 in a message: not its text, which may quote a URL with a signature."""
    return type(error).__name__


def _who(core: Any, credentials: Any, anonymous: bool | None) -> str:
    if credentials is None:
        return "anonymously, as told" if anonymous else "anonymously, since no credentials were found"
    if credentials.method == "env":
        return "with the credentials of the environment"
    if credentials.method in {
        "shared-credentials-file",
        "config-file",
        "sso",
        "assume-role",
        "custom-process",
    }:
        return f"with the credentials of profile {core.profile or 'default'!r}"
    return f"with the credentials of {credentials.method}"


def _bundle(core: Any) -> str | None:
    found = core.get_config_variable("ca_bundle")
    return str(found) if found else None


def _is_amazons(endpoint: str) -> bool:
    host = endpoint.partition("://")[2].partition("/")[0].partition(":")[0]
    return host.endswith((".amazonaws.com", ".amazonaws.com.cn", ".api.aws"))
