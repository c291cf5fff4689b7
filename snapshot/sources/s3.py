"""S3 as a source. boto3 finds credentials and endpoint, lists, writes and signs; reading uses our own connections.

Reads are presigned GETs. Only the host is signed, so a request may add Range and If-Match. Reading through boto3 reaches
a third of the speed, because its bodies pass through several layers of `bytes`.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import PilotflameError, SourceError
from .exchange import Head
from .http import WebSource
from .location import Location
from .response import RangeRequest, refusal, unavailable
from .source import name_fault, opened

if TYPE_CHECKING:
    from .s3_client import S3Client

SIGNED_FOR_S = 3600
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._]{1,64})\s*</Code>")
_BUCKET_REGION = re.compile(rb"<Region>\s*([a-z0-9-]{2,32})\s*</Region>")


class S3Source(WebSource):
    """Objects below `s3://bucket/prefix`.

    Credentials, endpoint and region come from where boto3 finds them (environment, profile, instance role). Requests are
    unsigned if PILOTFLAME_S3_ANONYMOUS is 1 or there are no credentials.
    """

    # Signing takes 0.2 ms, so URLs are signed again long before they expire.
    kept_for_s = 900.0

    def __init__(self, url: str) -> None:
        super().__init__()
        scheme, _, rest = url.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        self._prefix = prefix.strip("/")
        if scheme != "s3" or not self._bucket or "@" in self._bucket:
            raise SourceError(f"{scheme}://… is not a URL of S3.", remedy="Write s3://bucket/prefix.")
        # Where the bucket turned out to be, if that is not the configured region.
        self._region: str | None = None
        self._opening = threading.Lock()
        self._opened: S3Client | None = None

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def resolve(self, name: str) -> Location:
        target = {"Bucket": self._bucket, "Key": self._key(name)}
        with self._boto(name) as boto:
            return Location(boto.generate_presigned_url("get_object", Params=target, ExpiresIn=SIGNED_FOR_S))

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        code = _found(_CODE, body)
        region = head.headers.get("x-amz-bucket-region", "") or _found(_BUCKET_REGION, body)
        if region:
            self._move(region)
        plain, client, key = refusal(head, request), self._client(), self._key(request.name)
        # With Retry-After, whatever the status is.
        details = unavailable(request, "", head).details
        known = client.error(code or str(head.status), key, details, region)
        if known is not None:
            return known
        fault = f"s3://{self._bucket}/{key}: {plain.message.rstrip('.')}{f' ({code})' if code else ''}"
        details = {**plain.details, "bucket": self._bucket, "code": code}
        return type(plain)(f"{fault}, requested {client.credentials}.", remedy=plain.remedy, details=details)

    def names(self) -> list[str]:
        """See Listing. Leaves out the keys that stand for empty folders."""
        below = f"{self._prefix}/" if self._prefix else ""
        with self._boto("") as boto:
            pages = boto.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=below)
            keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        names = (key.removeprefix(below) for key in keys)
        return sorted(name for name in names if name_fault(name) is None)

    def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
        """See Writable. Large objects are sent in parts. Raises OSError if reading `content` fails."""
        with opened(content) as stream, self._boto(name) as boto:
            boto.upload_fileobj(stream, self._bucket, self._key(name), Callback=sent)
        self._infos.pop(name, None)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix and name else self._prefix or name

    def _move(self, region: str) -> None:
        """Sign for `region` from now on, unless the endpoint is another than Amazon's."""
        with self._opening:
            if self._opened is not None and self._opened.amazon and self._region != region:
                self._region, self._opened = region, None

    def _boto(self, name: str) -> AbstractContextManager[Any]:
        return self._client().call(self._key(name))

    def _ca_bundle(self) -> str | None:
        return self._client().ca_bundle

    def _client(self) -> S3Client:
        # A source that is never read, because its snapshot is cached, does not import boto3.
        from .s3_client import S3Client  # noqa: PLC0415

        with self._opening:
            if self._opened is None:
                self._opened = S3Client.open(self._bucket, self._region)
            return self._opened


def _found(pattern: re.Pattern[bytes], body: bytes) -> str:
    """Return the first group in an error's XML body, or "". Uses no XML parser, because the body is untrusted."""
    found = pattern.search(body)
    return found[1].decode("ascii") if found else ""
