"""What the error codes of S3 mean: the class of our errors, in words that name bucket, key and code, and a remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ...errors import (
    PilotflameError,
    SnapshotChanged,
    SourceDenied,
    SourceError,
    SourceMissing,
    SourceUnavailable,
)

_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._]{1,64})\s*</Code>")
_BUCKET_REGION = re.compile(rb"<Region>\s*([a-z0-9-]{2,32})\s*</Region>")

_GRANT = "Grant s3:GetObject on it (and s3:ListBucket, so that a missing key is told from a forbidden one)."
_RENEW = "Log in again, or refresh the session token."
_CLOCK = "Set this machine's clock."
_NO_BUCKET = "Check the bucket's name, and the endpoint that it is asked at."
_ANEW = "Publish new weights under a new name, and make their manifest anew."
_REGION = "Name the bucket's region: AWS_REGION, or the profile's `region`."
_LATER = "Try again; ask for less at once if it stays."

# Code: (class, what it means, remedy). Numbers are what HEAD gives, which has no body to hold a code.
_MEANINGS: dict[str, tuple[type[PilotflameError], str, str]] = {
    "NoSuchBucket": (SourceMissing, "there is no such bucket", _NO_BUCKET),
    "NoSuchKey": (
        SourceMissing,
        "there is no such key",
        "Check the prefix; the manifest names keys below it.",
    ),
    "404": (SourceMissing, "there is no such key, or no such bucket", _NO_BUCKET),
    "NoSuchVersion": (SourceMissing, "that version of the key was deleted", _ANEW),
    "AccessDenied": (SourceDenied, "access is denied", _GRANT),
    "AllAccessDisabled": (SourceDenied, "access is denied to everybody", _GRANT),
    "403": (SourceDenied, "access is denied", _GRANT),
    "ExpiredToken": (SourceDenied, "the session token has expired", _RENEW),
    "TokenRefreshRequired": (SourceDenied, "the session token has expired", _RENEW),
    "InvalidToken": (SourceDenied, "the session token is not valid", _RENEW),
    "InvalidAccessKeyId": (SourceDenied, "the access key is not known there", "Check the access key's id."),
    "SignatureDoesNotMatch": (
        SourceDenied,
        "the signature does not match",
        "Check the secret key; and that nothing on the way rewrites the host or the path.",
    ),
    "RequestTimeTooSkewed": (SourceDenied, "this machine's clock is too far off", _CLOCK),
    "InvalidObjectState": (SourceDenied, "the object is archived", "Restore it from the archive first."),
    "PreconditionFailed": (SnapshotChanged, "the object changed while it was read", _ANEW),
    "412": (SnapshotChanged, "the object changed while it was read", _ANEW),
    "InvalidRange": (SnapshotChanged, "the object is shorter by now", _ANEW),
    "PermanentRedirect": (SourceError, "the bucket is in another region", _REGION),
    "AuthorizationHeaderMalformed": (SourceError, "the bucket is in another region", _REGION),
    "AuthorizationQueryParametersError": (SourceError, "the bucket is in another region", _REGION),
    "301": (SourceError, "the bucket is in another region", _REGION),
    "SlowDown": (SourceUnavailable, "the bucket is asked too much at once", _LATER),
    "ServiceUnavailable": (SourceUnavailable, "the store is busy", _LATER),
    "InternalError": (SourceUnavailable, "the store failed", _LATER),
    "RequestTimeout": (SourceUnavailable, "the store waited too long for the request", _LATER),
}


@dataclass(frozen=True, slots=True)
class Subject:
    """What was asked, and by whom: `who` says where the credentials came from, never what they are."""

    bucket: str
    key: str
    who: str

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.key}"


def code_in(body: bytes) -> str:
    """The Code of an error's XML body; empty if there is none. No XML parser: the body may be anybody's."""
    found = _CODE.search(body)
    return found[1].decode("ascii") if found else ""


def region_in(body: bytes) -> str:
    """The bucket's Region in an error's XML body; empty if there is none."""
    found = _BUCKET_REGION.search(body)
    return found[1].decode("ascii") if found else ""


def meaning(
    code: str, subject: Subject, details: dict[str, object] | None = None, region: str = ""
) -> PilotflameError | None:
    """The error of a code; None for a code that is not known here."""
    if code not in _MEANINGS:
        return None
    cls, what, remedy = _MEANINGS[code]
    if cls is SourceDenied:
        what = f"{what}, asked {subject.who}"
    if remedy is _REGION and region:
        what = f"{what} ({region})"
    known = {"object": subject.key, "bucket": subject.bucket, "code": code, **(details or {})}
    return cls(f"{subject}: {what} ({code}).", remedy=remedy, details=known)
