"""Defines the source that reads and writes S3. boto3 lists and writes. For reading, it only signs the URLs.

To read, HttpConnection sends GET requests to presigned URLs. The signature does not cover the header Range, so a request
may have this header. Reading through boto3 would have only a third of the speed, because boto3 copies bodies several times.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import PilotflameError, SourceDenied, SourceError
from ..extras import needs
from .access import ANY, Access
from .exchange import Head
from .http import WebSource
from .location import Location
from .response import RangeRequest, refusal, unavailable
from .source import listed, name_fault, opened
from .variables import AWS, REQUESTER_PAYS_VARIABLE

if TYPE_CHECKING:
    from .s3_client import S3Client

SIGNED_FOR_S = 3600
# If the store refuses credentials that were read longer ago than this, read them again.
RENEWED_AFTER_S = 10.0
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._]{1,64})\s*</Code>")
# The name of a bucket, or the ARN of an access point, which has a slash (or a colon) before its name.
_BUCKET = re.compile(r"arn:[^/]*:accesspoint[/:][^/]+|[^/]+")
_BUCKET_REGION = re.compile(rb"<Region>\s*([a-z0-9-]{2,32})\s*</Region>")


class S3Source(WebSource):
    """The objects below `s3://bucket/prefix`.

    boto3 finds credentials, endpoint and region (in the environment, a profile or the instance role).
    Requests are not signed if PILOTFLAME_S3_ANONYMOUS is 1 or boto3 finds no credentials.
    """

    # Sign URLs again long before they expire (SIGNED_FOR_S). Signing takes only 0.2 ms.
    kept_for_s = 900.0
    versioned_by_content = True

    def __init__(self, url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> None:
        scheme, _, rest = url.partition("://")
        found = _BUCKET.match(rest)
        self._bucket = found[0] if found else ""
        self._prefix = rest[len(self._bucket) :].strip("/")
        if scheme != "s3" or not self._bucket or "@" in self._bucket:
            raise SourceError(f"{scheme}://… is not a URL of S3.", remedy="Write s3://bucket/prefix.")
        super().__init__(f"s3://{self._bucket}/{self._prefix}".rstrip("/"), access=access)
        # The bucket's region, if a response said that it is not the configured region.
        self._region: str | None = None
        self._opening = threading.Lock()
        self._opened: S3Client | None = None
        self._opened_s = 0.0
        self._own, self._alone = AWS.own(secrets), AWS.alone(secrets, access)
        paid = AWS.variables(secrets, access).get(REQUESTER_PAYS_VARIABLE) == "1"
        self._payment = {"RequestPayer": "requester"} if paid else {}

    def resolve(self, name: str) -> Location:
        target = {"Bucket": self._bucket, "Key": self._key(name), **self._payment}
        with self._boto(name) as boto:
            url = boto.generate_presigned_url("get_object", Params=target, ExpiresIn=SIGNED_FOR_S)
        # Send this header with the request, because with `RequestPayer` the signature covers it.
        return Location(url, {"x-amz-request-payer": "requester"} if self._payment else {})

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        code = _found(_CODE, body)
        region = head.headers.get("x-amz-bucket-region", "") or _found(_BUCKET_REGION, body)
        if region:
            self._move(region)
        plain, client, key = refusal(head, request), self._client(), self._key(request.name)
        # Get Retry-After for every status: `refusal` reads it only for some.
        details = unavailable(request, "", head).details
        known = client.error(code or str(head.status), key, details, region)
        # Do not decide by the status alone, because an expired token is refused with 400.
        if isinstance(known or plain, SourceDenied):
            self._renew()
        if known is not None:
            return known
        fault = f"s3://{self._bucket}/{key}: {plain.message.rstrip('.')}{f' ({code})' if code else ''}"
        details = {**plain.details, "bucket": self._bucket, "code": code}
        return type(plain)(f"{fault}, requested {client.credentials}.", remedy=plain.remedy, details=details)

    def names(self) -> list[str]:
        """Return the names of the objects below the prefix. Leave out keys that are not valid names, such as those of empty folders."""
        below = f"{self._prefix}/" if self._prefix else ""
        with self._boto("") as boto:
            found = boto.get_paginator("list_objects_v2")
            pages = found.paginate(Bucket=self._bucket, Prefix=below, **self._payment)
            keys = listed(self.url, (entry["Key"] for page in pages for entry in page.get("Contents", ())))
        names = (key.removeprefix(below) for key in keys)
        return sorted(name for name in names if name_fault(name) is None)

    def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
        """Store `content` as object `name`, in parts if it is large. Raise OSError if the file `content` cannot be read."""
        with opened(content) as stream, self._boto(name) as boto:
            key, more = self._key(name), self._payment or None
            boto.upload_fileobj(stream, self._bucket, key, ExtraArgs=more, Callback=sent)
        self.infos.pop(name, None)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix and name else self._prefix or name

    def _move(self, region: str) -> None:
        """Sign URLs for `region` from now on. Do nothing if the endpoint does not belong to Amazon."""
        with self._opening:
            if self._opened is not None and self._opened.amazon and self._region != region:
                self._region, self._opened = region, None

    def _renew(self) -> None:
        """Read the credentials again before the next URL is signed, since the store refused the current credentials."""
        with self._opening:
            if time.monotonic() > self._opened_s + RENEWED_AFTER_S:
                self._opened = None

    def _boto(self, name: str) -> AbstractContextManager[Any]:
        return self._client().call(self._key(name))

    def _ca_bundle(self) -> str | None:
        return self._client().ca_bundle

    def _client(self) -> S3Client:
        # Imported only here: boto3 is not needed if the snapshot is in the cache.
        with needs("S3", "boto3"):
            from .s3_client import S3Client  # noqa: PLC0415

        with self._opening:
            if self._opened is None:
                own = self._own if self._alone else None
                self._opened = S3Client.open(self._bucket, self._region, own, self.access.addresses)
                self._opened_s = time.monotonic()
            return self._opened


def _found(pattern: re.Pattern[bytes], body: bytes) -> str:
    """Return the first group of the first match, or "". Use no XML parser, because `body` is untrusted."""
    found = pattern.search(body)
    return found[1].decode("ascii") if found else ""
