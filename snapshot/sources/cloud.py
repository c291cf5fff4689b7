"""Defines the base class of the sources for Google's and Microsoft's clouds. obstore lists, writes and signs for them.

Objects are read as from any web server (see `http`), at signed URLs or with a token.
"""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ...errors import PilotflameError, SourceDenied, SourceError, SourceMissing, SourceUnavailable
from ..extras import needs
from .access import Access
from .exchange import Head
from .http import WebSource
from .location import ServerAddress
from .response import RangeRequest, refusal
from .source import listed, name_fault

SIGNED_FOR = timedelta(hours=1)
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9._]{1,64})\s*</Code>")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
# The options with which obstore lists and writes.
CLIENT_OPTIONS = {"connect_timeout": "10s", "timeout": "300s"}
RETRIES = {"max_retries": 3, "retry_timeout": timedelta(seconds=30)}


class CloudSource(WebSource):
    """The objects below `scheme://bucket/prefix`. One family of variables configures it (see `variables`)."""

    # Tokens and signatures are valid for about an hour. They are renewed earlier, and after a refusal.
    kept_for_s = 900.0
    scheme: str
    credentials: str
    """Describes the credentials in messages, without secrets."""

    def __init__(self, url: str, endpoint: str, access: Access) -> None:
        scheme, _, rest = url.partition("://")
        self.bucket, _, prefix = rest.partition("/")
        self._prefix = prefix.strip("/")
        if (
            scheme != self.scheme
            or not self.bucket
            or name_fault(self.bucket)
            or set(self.bucket) & set("@?#")
        ):
            raise SourceError(f"{scheme}://… is not valid.", remedy=f"Write {self.scheme}://bucket/prefix.")
        super().__init__(f"{self.scheme}://{self.bucket}/{self._prefix}".rstrip("/"), access=access)
        try:
            self._plain = ServerAddress.of(endpoint).scheme == "http"
        except ValueError as error:
            raise SourceError(f"The endpoint of {self.url} is not valid: {error}.") from None
        self._base = f"{endpoint.rstrip('/')}/{quote(self.bucket, safe='')}"
        self._opening = threading.Lock()
        self._opened: Any = None

    @abstractmethod
    def open_store(self, options: dict[str, Any]) -> Any:
        """Return obstore's store of the bucket, with these client options."""

    def names(self) -> list[str]:
        """Return the names of the objects below the prefix. Leave out keys that are not valid names, such as those of empty folders."""
        below = f"{self._prefix}/" if self._prefix else ""
        with self.calling("") as (obstore, store):
            pages = obstore.list(store, self._prefix or None, chunk_size=1000)
            keys = listed(self.url, (entry["path"] for page in pages for entry in page))
        names = (key.removeprefix(below) for key in keys if key.startswith(below))
        return sorted(name for name in names if name_fault(name) is None)

    def put(self, name: str, content: Path | bytes, sent: Callable[[int], None] | None = None) -> None:
        """Store `content` as object `name`, in parts if it is large. Raise OSError if the file `content` cannot be read."""
        size = len(content) if isinstance(content, bytes) else content.stat().st_size
        with self.calling(name) as (obstore, store):
            obstore.put(store, self.key(name), content)
        if sent is not None:
            sent(size)
        self.infos.pop(name, None)

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        found = _CODE.search(body)
        code = head.headers.get("x-ms-error-code", "") or (found[1].decode("ascii") if found else "")
        plain = refusal(head, request)
        # `find_manifest` recognises a missing bucket by the code NoSuchBucket.
        details = {
            **plain.details,
            "bucket": self.bucket,
            "code": "NoSuchBucket" if code in _NO_BUCKET else code,
        }
        where = f"{self.scheme}://{self.bucket}/{self.key(request.name)}"
        why = f"{plain.message.rstrip('.')}{f' ({code[:64]})' if code else ''}"
        return type(plain)(
            f"{where}: {why}, requested {self.credentials}.", remedy=plain.remedy, details=details
        )

    def key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix and name else self._prefix or name

    def address(self, name: str) -> str:
        """Return the URL of an object, without credentials."""
        return f"{self._base}/{quote(self.key(name), safe='/')}"

    @contextmanager
    def calling(self, name: str) -> Iterator[tuple[Any, Any]]:
        """Yield obstore and the store. Turn an error of obstore in the block into an error of pilotflame about `name`.

        Messages show only the class of obstore's error, because its text may have a signed URL.
        """
        with needs(f"{self.scheme}://", "obstore"):
            import obstore  # noqa: PLC0415  only where it is used, since it takes time to import
            from obstore import exceptions  # noqa: PLC0415

        where, details = (
            f"{self.scheme}://{self.bucket}/{self.key(name)}".rstrip("/"),
            {"object": name, "bucket": self.bucket},
        )
        try:
            with self._opening:
                if self._opened is None:
                    self._opened = self.open_store({**CLIENT_OPTIONS, "allow_http": self._plain})
            yield obstore, self._opened
        except FileNotFoundError as error:
            raise SourceMissing(f"{where} is not there.", remedy="Check the URL.", details=details) from error
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError, PermissionError) as error:
            fault = f"{where}: access is denied, requested {self.credentials}."
            remedy = "Check the credentials, and that they may list and read the bucket."
            raise SourceDenied(fault, remedy=remedy, details=details) from error
        except exceptions.BaseError as error:
            fault = f"{where}: the store failed ({type(error).__name__}), requested {self.credentials}."
            remedy = "Check the endpoint and the credentials."
            raise SourceUnavailable(fault, remedy=remedy, details=details) from error


def is_set(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").lower() in {"1", "true", "yes"}
