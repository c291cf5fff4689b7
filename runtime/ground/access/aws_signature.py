"""Verifies AWS signatures, version 4, of requests that were signed with the secret part of an API key.

The clients of AWS send no secret. They derive a key from the secret, the date, the region and the service, and send an
HMAC of the request with the derived key. The first step of the derivation is an HMAC with the key "AWS4" + secret. This
key is longer than a block of SHA-256, so HMAC itself replaces the key by its digest (RFC 2104, section 2). So the
gateway needs only this digest to verify signatures, and does not have to know the secret.
"""

from __future__ import annotations

import calendar
import contextlib
import hashlib
import hmac
import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from urllib.parse import quote, unquote

from ....errors import Unauthorized

LOG = logging.getLogger(__name__)
SCHEME = "AWS4-"
DATE_HEADER = "X-Amz-Date"
MAX_SKEW_S = 300.0
"""How many seconds the time of a signature may differ from the gateway's clock. AWS allows the same difference."""
_REMEDY = (
    "AWS_ACCESS_KEY_ID is the API key's id, and AWS_SECRET_ACCESS_KEY is the part of the key after its second"
    " underscore. Or send the whole key as AWS_SESSION_TOKEN. The gateway's log says why a signature was refused."
)
_AUTHORIZATION = re.compile(
    r"AWS4-HMAC-SHA256 +Credential=([0-9a-f]{12})/([0-9]{8})/([a-z0-9-]{1,64})/([a-z0-9-]{1,64})/aws4_request"
    r", *SignedHeaders=([a-z0-9;_.-]{4,4096}), *Signature=([0-9a-f]{64})",
    re.ASCII,
)


class MultiHeaders(Protocol):
    """The headers of a request. A name may occur several times."""

    def getall(self, key: str, default: list[str]) -> list[str]: ...


class Signature(NamedTuple):
    """The Authorization header of a signed request, and the time of the signature."""

    key_id: str
    day: str
    region: str
    service: str
    headers: tuple[str, ...]
    value: str
    at: str


@dataclass(frozen=True, slots=True)
class SignedRequest:
    """The parts of a request that a signature covers. `target` is the path and query as they were sent."""

    method: str
    target: str
    headers: MultiHeaders
    body: bytes


def signing_digest(secret: str) -> str:
    """Return the digest that is stored with an API key, to verify signatures made with the key's secret part."""
    return hashlib.sha256(b"AWS4" + secret.encode()).hexdigest()


def parse_signature(headers: Mapping[str, str], now_s: float) -> Signature:
    """Return the signature of a request. Raise Unauthorized if it is malformed, or too old or too new.

    The signature must cover the host and all x-amz-… headers, so that they cannot be changed on the way.
    """
    found, at = _AUTHORIZATION.fullmatch(headers.get("Authorization", "")), headers.get(DATE_HEADER, "")
    if found is None:
        raise Unauthorized("The AWS signature is malformed.", remedy=_REMEDY)
    key_id, day, region, service, names, value = found.groups()
    signed = tuple(names.split(";"))
    # Refuse repeated names: `_canonical` would join all lines of the header again for each repetition.
    if len({*signed}) < len(signed):
        raise Unauthorized("The AWS signature names a header twice.", remedy="Name each header once.")
    missing = {"host", *(name.lower() for name in headers if name.lower().startswith("x-amz-"))} - {*signed}
    if missing:
        message = f"The AWS signature does not cover the header {min(missing)[:64]!r}."
        raise Unauthorized(message, remedy="Sign it.")
    at_s = -1.0
    with contextlib.suppress(ValueError):
        at_s = float(calendar.timegm(time.strptime(at, "%Y%m%dT%H%M%SZ")))
    if abs(now_s - at_s) > MAX_SKEW_S or at[:8] != day:
        message = f"The AWS signature is of {at[:20]!r}, too far from the gateway's time."
        raise Unauthorized(message, remedy="Set the clock of this machine, and sign the request again.")
    return Signature(key_id, day, region, service, signed, value, at)


def verify(digest: str | None, signature: Signature, request: SignedRequest) -> None:
    """Raise Unauthorized unless the request was signed with the secret from which `digest` was computed.

    The duration of the comparison does not depend on how many characters of the signature are right. `digest` is None
    for a key that was made without `aws`, or by an older version of pilotflame.
    """
    if digest is None:
        raise refused(signature, "it was made without aws, so it cannot sign")
    key = bytes.fromhex(digest)
    for part in (signature.day, signature.region, signature.service, "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    scope = f"{signature.day}/{signature.region}/{signature.service}/aws4_request"
    canonical = hashlib.sha256(_canonical(signature.headers, request)).hexdigest()
    text = f"AWS4-HMAC-SHA256\n{signature.at}\n{scope}\n{canonical}"
    if not hmac.compare_digest(hmac.digest(key, text.encode(), "sha256").hex(), signature.value):
        raise refused(signature, "it does not fit the request and the key's secret")


def refused(signature: Signature, reason: str) -> Unauthorized:
    """Return the error for a refused signature. The reason is only in the log, because it would tell strangers which
    keys exist.
    """
    LOG.info("an AWS signature by the API key %s is refused: %s", signature.key_id, reason)
    return Unauthorized("The AWS signature does not fit the request and a valid API key.", remedy=_REMEDY)


def _canonical(names: tuple[str, ...], request: SignedRequest) -> bytes:
    """Return the request in AWS's canonical form. The signature is computed from it."""
    path, _, query = request.target.partition("?")
    pairs = (pair.partition("=") for pair in query.split("&") if pair)
    encoded = sorted((_encode(name), _encode(value)) for name, _, value in pairs)
    values = ((name, request.headers.getall(name, [])) for name in names)
    lines = (f"{name}:{','.join(' '.join(one.split()) for one in found)}\n" for name, found in values)
    parts = (
        request.method, quote(path, safe="/~", errors="surrogateescape"), "&".join(f"{name}={value}" for name, value in encoded),
        "".join(lines), ";".join(names), hashlib.sha256(request.body).hexdigest(),
    )  # fmt: skip
    # Header bytes that are not UTF-8 were decoded as lone surrogates. This turns them back into bytes.
    return "\n".join(parts).encode(errors="surrogateescape")


def _encode(text: str) -> str:
    """Return a part of the query in AWS's percent-encoding, whatever encoding the client has used."""
    return quote(unquote(text, errors="surrogateescape"), safe="-_.~", errors="surrogateescape")
