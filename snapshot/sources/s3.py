"""S3 as a source: boto3 finds credentials and endpoint, lists, writes and signs; bytes come over our own connections.

Reading is by presigned GETs: only the host is signed, so that ranges and If-Match may be added without boto3
in the way, which reaches a third of the speed (its bodies pass through several layers of `bytes`).
"""

from __future__ import annotations

import io
import os
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from ...errors import PilotflameError, SourceError, SourceUnavailable
from .answer import Asked, refusal, unavailable
from .exchange import Head
from .http import CONNECT_TIMEOUT_S, TIMEOUT_S, Site
from .location import Location
from .s3_access import Access, denied, kind, no_credentials, open_access
from .s3_codes import Subject, code_in, meaning, region_in
from .source import ObjectInfo, Progress, name_fault

SIGNED_FOR_S = 3600
KEPT_FOR_S = 900.0  # a signed URL is made anew well before it ends; that costs 0.2 ms


class S3Source(Site):
    """`s3://bucket/prefix`; objects are below it.

    What is not given comes from where boto3 takes it (environment, profile, instance role). `anonymous`: True for
    unsigned requests; None: if PILOTFLAME_S3_ANONYMOUS is 1, or there are no credentials.
    """

    def __init__(
        self,
        url: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        profile: str | None = None,
        anonymous: bool | None = None,
        timeout_s: float = TIMEOUT_S,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(timeout_s=timeout_s, connect_timeout_s=connect_timeout_s, ssl_context=ssl_context)
        scheme, _, rest = url.partition("://")
        self._bucket, _, prefix = rest.partition("/")
        self._prefix = prefix.strip("/")
        if scheme != "s3" or not self._bucket or "@" in self._bucket:
            raise SourceError(f"{scheme}://… is not a URL of S3.", remedy="Write s3://bucket/prefix.")
        if anonymous is None and os.environ.get("PILOTFLAME_S3_ANONYMOUS") == "1":
            anonymous = True
        self._endpoint = endpoint
        self._region = region
        self._profile = profile
        self._anonymous = anonymous
        self._opening = threading.Lock()
        self._opened: Access | None = None
        self._signed: dict[str, tuple[Location, float]] = {}
        self._pinned: dict[str, str] = {}
        self._unpinned: set[str] = set()

    @property
    def url(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def locate(self, name: str, *, fresh: bool) -> Location:
        now_s = time.monotonic()
        with self._lock:
            kept, until_s = self._signed.get(name, (None, 0.0))
            version = self._pinned.get(name)
        if kept is not None and now_s < until_s and not fresh:
            return kept
        asked = {"Bucket": self._bucket, "Key": self._key(name)} | ({"VersionId": version} if version else {})
        with self._words(name) as client:
            url = client.generate_presigned_url("get_object", Params=asked, ExpiresIn=SIGNED_FOR_S)
        location = Location(url)
        with self._lock:
            if self._pinned.get(name) == version:
                self._signed[name] = (location, now_s + KEPT_FOR_S)
        return location

    def learn(self, name: str, info: ObjectInfo, head: Head) -> None:
        super().learn(name, info, head)
        # The version is kept, so that who has begun to read goes on with the same bytes after an overwrite.
        version = head.headers.get("x-amz-version-id", "null")
        with self._lock:
            if version != "null" and name not in self._pinned and name not in self._unpinned:
                self._pinned[name] = version
                self._signed.pop(name, None)

    def forget(self, name: str) -> None:
        super().forget(name)
        with self._lock:
            self._pinned.pop(name, None)
            self._signed.pop(name, None)

    def explain(self, asked: Asked, head: Head, body: bytes) -> PilotflameError:
        code = code_in(body)
        region = head.headers.get("x-amz-bucket-region", "") or region_in(body)
        if code == "AccessDenied":
            self._unpin(asked.name)
        if region:
            self._move(region)
        plain = refusal(head, asked)
        subject = Subject(self._bucket, self._key(asked.name), self._access().who)
        details = unavailable(asked, "", head).details  # with Retry-After, whatever the status is
        known = meaning(code or str(head.status), subject, details, region)
        if known is not None:
            return known
        return type(plain)(
            f"{subject}: {plain.message.rstrip('.')}{f' ({code})' if code else ''}, asked {subject.who}.",
            remedy=plain.remedy,
            details={**plain.details, "bucket": self._bucket, "code": code},
        )

    def names(self) -> list[str]:
        """Every object under the URL, sorted, relative to it; without what stands for empty folders."""
        below = f"{self._prefix}/" if self._prefix else ""
        with self._words("") as client:
            pages = client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=below)
            keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        names = (key.removeprefix(below) for key in keys)
        return sorted(name for name in names if name_fault(name) is None)

    def put(self, name: str, content: Path | bytes, progress: Progress | None = None) -> None:
        """Write object `name`, in parts if it is large. OSErrors of reading `content` pass."""
        size_bytes = len(content) if isinstance(content, bytes) else content.stat().st_size
        sent = _Sent(size_bytes, progress)
        with (
            io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as stream,
            self._words(name) as client,
        ):
            client.upload_fileobj(stream, self._bucket, self._key(name), Callback=sent.add)
        self.forget(name)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix and name else self._prefix or name

    def _unpin(self, name: str) -> None:
        # Who may read objects may not always read their versions; then the ETag alone has to do.
        with self._lock:
            if self._pinned.pop(name, None) is not None:
                self._unpinned.add(name)
                self._signed.pop(name, None)

    def _move(self, region: str) -> None:
        """The bucket is in `region`: sign for that from now on, unless the endpoint is not Amazon's to choose."""
        with self._opening:
            if self._opened is not None and self._opened.amazons and self._region != region:
                self._region, self._opened = region, None

    @contextmanager
    def _words(self, name: str) -> Iterator[Any]:
        """The client; what boto3 raises meanwhile becomes one of our errors."""
        from botocore import exceptions as boto  # noqa: PLC0415  as in s3_access

        access = self._access()
        subject = Subject(self._bucket, self._key(name), access.who)
        try:
            yield access.client
        except boto.ClientError as error:
            code = str(error.response.get("Error", {}).get("Code", ""))
            known = meaning(code, subject)
            raise known or SourceError(
                f"{subject}: the store refuses it ({code}), asked {access.who}."
            ) from error
        except no_credentials() as error:
            raise denied(subject, error) from error
        except boto.BotoCoreError as error:
            raise SourceUnavailable(
                f"{subject}: {kind(error)}: {access.client.meta.endpoint_url} cannot be asked.",
                remedy="Check the endpoint and the network; try again.",
                details={"object": subject.key},
            ) from error

    @cached_property
    def _context(self) -> ssl.SSLContext:
        return self._given_context or ssl.create_default_context(cafile=self._access().ca_bundle)

    def _access(self) -> Access:
        with self._opening:
            if self._opened is None:
                self._opened = open_access(
                    self._bucket,
                    self._endpoint,
                    self._region,
                    self._profile,
                    self._anonymous,
                    self._timeout_s,
                )
            return self._opened


class _Sent:
    """Adds up what the threads of an upload have sent."""

    def __init__(self, total_bytes: int, progress: Progress | None) -> None:
        self._total_bytes = total_bytes
        self._progress = progress
        self._lock = threading.Lock()
        self._done_bytes = 0

    def add(self, count: int) -> None:
        with self._lock:
            self._done_bytes += count
            if self._progress is not None:
                self._progress(self._done_bytes, self._total_bytes)
