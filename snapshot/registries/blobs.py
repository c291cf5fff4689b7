"""Defines the source of a repository's blobs, and implements the token flow of the distribution specification.

A registry answers a request without a token with 401 and the address of its token server (a challenge). The login is
sent to that server, and the token to the registry. Neither is sent to the storage to which a registry redirects.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlencode

from ...errors import PilotflameError, SnapshotChanged, SourceDenied, SourceError, SourceMissing
from ..sources.access import Access
from ..sources.exchange import Head
from ..sources.http import WebSource
from ..sources.location import Location, ServerAddress, redirected, shown
from ..sources.response import RangeRequest, refusal, unavailable
from .artifact import MAX_MANIFEST_BYTES
from .login import Login
from .reference import Reference

WRITE_S = 300.0
"""How long a registry may be silent during an upload, because it computes the digest of a file before it answers."""
MAX_TOKEN_BYTES = 64 << 10
# If the registry refuses a token that is older than this, request a new token.
RENEWED_AFTER_S = 5.0
_LOG_IN = "Log in with `docker login` or `podman login`, or set the secret DOCKER_AUTH_CONFIG."
_BEARER = re.compile(r'\bBearer\s+((?:[\w-]+="[^"]*"(?:\s*,\s*)?)+)', re.ASCII | re.IGNORECASE)
_PARAMETER = re.compile(r'([\w-]+)="([^"]*)"', re.ASCII)
_BASIC = re.compile(r"\bBasic\b", re.IGNORECASE)
_TOKEN = re.compile(r"[!-~]{1,16384}")


class _TokenServer(NamedTuple):
    realm: str
    service: str
    scope: str


class RegistryBlobs(WebSource):
    """The blobs of one repository. Their names are their digests."""

    # Registries redirect to signed URLs, which expire. Request a new URL before the old one expires, and after a refusal.
    kept_for_s = 900.0

    def __init__(self, reference: Reference, login: Login, access: Access, *, plain: bool) -> None:
        """With `plain`, requests to the registry use http."""
        super().__init__(f"oci://{reference.registry}/{reference.repository}", access=access)
        self._scheme = "http" if plain else "https"
        self._base = f"{self._scheme}://{reference.host}/v2/{reference.repository}"
        try:
            ServerAddress.of(self._base)
        except ValueError as error:
            raise SourceError(f"{reference} names no registry: {error}.") from None
        self._scope = f"repository:{reference.repository}:pull"
        self._writes = False
        self._login = login
        # Reentrant, since a token server may itself answer with a challenge.
        self._asking = threading.RLock()
        self._token_server: _TokenServer | None = None
        self._token, self._token_s = login.token, 0.0
        self._basic = False

    def begin_writing(self) -> None:
        """From now on, request tokens that also allow writing, and wait longer for answers."""
        with self._asking:
            self._writes, self.silent_s = True, WRITE_S
            self._scope = self._scope.removesuffix(",push") + ",push"
            self._token, self._token_s = self._login.token, 0.0

    def url_of(self, path: str, target: str = "") -> str:
        """Return the URL of `path` in the repository. With `target`, the Location header of a response for that URL, return the
        URL that the header names. Raise SourceError.
        """
        url = f"{self._base}/{path}"
        return redirected(Location(url), target).url if target else url

    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: Iterable[bytes] = ()
    ) -> tuple[Head, bytes]:
        """Send a request. If the registry asks for credentials, send it once more with them. Return the response's head and body.

        If `url` is on another server, send no credentials. May raise SourceError, SourceDenied or SourceUnavailable, but never
        because of the response's status.
        """
        own = ServerAddress.of(url) == ServerAddress.of(self._base)
        for last in (False, True):
            sent = self._authorization() if own else {}
            head, text = self.request(method, Location(url, {**headers, **sent}), body)
            if head.status != 401 or not own or last:
                break
            self._challenged(head.headers.get("www-authenticate", ""))
            if self._authorization() == sent:
                break
        return head, text

    def refused(self, head: Head, body: bytes, what: str) -> PilotflameError:
        """Return the error for a response that refuses to store `what`."""
        code = _code(body)
        details = {"status": head.status, "code": code}
        how = f"HTTP {head.status}, {code}" if code else f"HTTP {head.status}"
        if head.status in {401, 403}:
            fault = f"{self.url} may not be written to {self._login.origin} ({how})."
            return SourceDenied(fault, remedy=_LOG_IN, details=details)
        if head.status in {408, 425, 429} or head.status >= 500:
            return unavailable(RangeRequest(what, self.url, 0, 0), how, head)
        if code == "DIGEST_INVALID":
            fault = f"{what} changed while it was sent to {self.url} ({how})."
            return SnapshotChanged(
                fault, remedy="Create the manifest again, and push again.", details=details
            )
        remedy = "Check that the repository exists, that it is not read-only, and how large files may be."
        return SourceError(f"{self.url} does not take {what} ({how}).", remedy=remedy, details=details)

    def resolve(self, name: str) -> Location:
        return Location(f"{self._base}/blobs/{name}", self._authorization())

    def manifest(self, version: str, accepted: str) -> bytes:
        """Return the manifest of a tag or digest. `accepted` are the media types that the registry may send.

        Raise SourceMissing, SourceDenied, another SourceError, or SourceUnavailable.
        """
        for last in (False, True):
            sent = self._authorization()
            location = Location(f"{self._base}/manifests/{version}", {**sent, "Accept": accepted})
            try:
                return self.document(location, MAX_MANIFEST_BYTES)[1]
            except SourceDenied:
                if last or self._authorization() == sent:
                    raise
        raise AssertionError("unreachable")

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        asked = request.url.startswith(f"{self._base}/")
        if head.status == 401 and asked:
            self._challenged(head.headers.get("www-authenticate", ""))
        plain = refusal(head, request)
        details = {**plain.details, "status": head.status, "code": _code(body)}
        if isinstance(plain, SourceMissing) and asked:
            what = request.url.removeprefix(f"{self._base}/").replace("manifests/", "tag or manifest ")
            fault = f"{self.url} has no {what.replace('blobs/', 'layer ')}."
            return SourceMissing(fault, remedy="Check the reference, and the tags there.", details=details)
        if isinstance(plain, SourceDenied) and asked:
            fault = f"{self.url} may not be read {self._login.origin} (HTTP {head.status})."
            return SourceDenied(fault, remedy=_LOG_IN, details=details)
        return plain

    def _challenged(self, challenge: str) -> None:
        """Remember from a challenge how the registry wants requests to be authorized."""
        found = _BEARER.search(challenge)
        with self._asking:
            if found is not None:
                said = {name.lower(): value for name, value in _PARAMETER.findall(found[1])}
                scope = self._scope if self._writes else said.get("scope") or self._scope
                self._token_server = _TokenServer(said.get("realm", ""), said.get("service", ""), scope)
                # Keep a new token: another thread may have got it after this thread's request was refused with an older token.
                if time.monotonic() - self._token_s > RENEWED_AFTER_S:
                    self._token = ""
            elif _BASIC.search(challenge):
                self._basic = True

    def _authorization(self) -> dict[str, str]:
        """Return the header that authorizes requests. Request a token if the registry wants one."""
        with self._asking:
            if self._token_server is not None and not self._token:
                self._token, self._token_s = self._new_token(self._token_server), time.monotonic()
            if self._token:
                return {"Authorization": f"Bearer {self._token}"}
            return self._login.basic() if self._basic else {}

    def _new_token(self, server: _TokenServer) -> str:
        try:
            address = ServerAddress.of(server.realm)
        except ValueError:
            raise SourceError(f"{self.url}: the registry names no token server.") from None
        if address.scheme == "http" and self._scheme == "https":
            fault = f"{self.url}: its token server {address} would get the login without TLS."
            raise SourceDenied(fault, remedy="Let the registry name its token server with https.")
        query = urlencode(
            [(name, value) for name, value in server._asdict().items() if name != "realm" and value]
        )
        mark = "&" if "?" in server.realm else "?"
        try:
            answer = self.json_document(
                Location(f"{server.realm}{mark}{query}", self._login.basic()), MAX_TOKEN_BYTES
            )
        except (SourceDenied, SourceMissing) as error:
            fault = f"{self.url}: the token server {shown(server.realm)} gives no token {self._login.origin}."
            raise SourceDenied(fault, remedy=_LOG_IN, details=error.details) from None
        token = _token_in(answer)
        if token is None:
            raise SourceError(f"{self.url}: {shown(server.realm)} does not answer with a token.")
        return token


def _token_in(answer: Any) -> str | None:
    token = (answer.get("token") or answer.get("access_token")) if isinstance(answer, dict) else None
    return token if isinstance(token, str) and _TOKEN.fullmatch(token) else None


def _code(body: bytes) -> str:
    """Return the code in a registry's error, such as MANIFEST_UNKNOWN, or ""."""
    found = re.search(rb'"code"\s*:\s*"([A-Z_]{1,64})"', body)
    return found[1].decode() if found else ""
