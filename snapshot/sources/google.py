"""Defines the source that reads and writes Google Cloud Storage. google-auth gets the tokens."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ...errors import PilotflameError, SourceDenied
from ..extras import needs
from .access import ANY, Access
from .cloud import RETRIES, CloudSource, is_set
from .exchange import Head
from .location import Location
from .response import RangeRequest
from .variables import GOOGLE

ENDPOINT = "https://storage.googleapis.com"
SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class GoogleSource(CloudSource):
    """The objects below `gs://bucket/prefix`.

    The variables have the names that obstore and Google's own libraries use: GOOGLE_SERVICE_ACCOUNT_KEY,
    GOOGLE_BEARER_TOKEN, GOOGLE_APPLICATION_CREDENTIALS. Without these variables, requests use the login of gcloud or
    the service account of the machine. Without credentials, or if GOOGLE_SKIP_SIGNATURE is true, requests are
    anonymous. A function with secrets whose names begin with GOOGLE_ does not use the machine's
    credentials.
    """

    scheme = "gs"

    def __init__(self, url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> None:
        variables = GOOGLE.variables(secrets, access)
        self._endpoint = variables.get("GOOGLE_BASE_URL") or ENDPOINT
        super().__init__(url, self._endpoint, access)
        self._token = GoogleToken(variables, own=GOOGLE.alone(secrets, access))
        project = variables.get("GOOGLE_CLOUD_QUOTA_PROJECT", "")
        # The project that pays for the requests, if it is not the bucket's project.
        self._payment = {"x-goog-user-project": project} if project else {}

    @property
    def credentials(self) -> str:  # type: ignore[override]
        return self._token.origin

    def resolve(self, name: str) -> Location:
        token = self._token.current()
        bearer = {"Authorization": f"Bearer {token}"} if token else {}
        return Location(self.address(name), {**bearer, **self._payment})

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        if head.status == 401:
            self._token.renew()
        return super().explain(request, head, body)

    def open_store(self, options: dict[str, Any]) -> Any:
        from obstore.store import GCSStore  # noqa: PLC0415

        token = self._token
        config: dict[str, Any] = {"base_url": self._endpoint, "skip_signature": not token.current()}

        def provide() -> dict[str, Any]:
            # Return a placeholder if there is no token. Otherwise obstore would ask the machine for a token before it writes.
            return {"token": token.current() or "anonymous", "expires_at": token.expires_at()}

        return GCSStore(
            self.bucket,
            config=config,  # type: ignore[arg-type]
            client_options={**options, "default_headers": self._payment},  # type: ignore[arg-type]
            retry_config=RETRIES,  # type: ignore[arg-type]
            credential_provider=provide,  # type: ignore[arg-type]
        )


class GoogleToken:
    """The bearer token of one source, which is renewed before it expires. Thread-safe."""

    def __init__(self, variables: Mapping[str, str], *, own: bool) -> None:
        """With `own`, use only the credentials in `variables`, and no credentials of this machine."""
        self._variables, self._own = variables, own
        self._lock = threading.Lock()
        self._found: Any = None
        self._looked = False
        self.origin = "anonymously, since no credentials were found"

    def current(self) -> str:
        """Return a valid token, or "" for anonymous requests. Raise SourceDenied if the token cannot be refreshed."""
        with self._lock:
            if is_set(self._variables, "GOOGLE_SKIP_SIGNATURE"):
                self.origin = "anonymously, as configured"
                return ""
            if token := self._variables.get("GOOGLE_BEARER_TOKEN"):
                self.origin = "with the token in GOOGLE_BEARER_TOKEN"
                return token
            if not self._looked:
                self._found, self._looked = self._look(), True
            if self._found is None:
                return ""
            if not self._found.valid:
                self._refresh()
            return str(self._found.token)

    def expires_at(self) -> datetime | None:
        expiry = getattr(self._found, "expiry", None)
        return expiry.replace(tzinfo=UTC) if isinstance(expiry, datetime) else None

    def renew(self) -> None:
        """Let the next `current` refresh the token, since the server has refused it."""
        with self._lock:
            if self._found is not None:
                self._found.token = None

    def _look(self) -> Any:
        """Return the credentials of google-auth, or None if there are none."""
        with needs("gs://", "google.auth"):
            import google.auth  # noqa: PLC0415  only where it is used, since it takes time to import
            from google.auth import exceptions  # noqa: PLC0415
            from google.oauth2 import service_account  # noqa: PLC0415

        if text := self._variables.get("GOOGLE_SERVICE_ACCOUNT_KEY"):
            self.origin = "with the key in GOOGLE_SERVICE_ACCOUNT_KEY"
            known = service_account.Credentials
            try:
                return known.from_service_account_info(json.loads(text), scopes=[SCOPE])  # type: ignore[no-untyped-call]
            except (ValueError, TypeError, AttributeError, exceptions.GoogleAuthError) as error:
                # Do not show the error's text, which may quote the key.
                fault = f"gs://: the credentials cannot be read: {type(error).__name__}."
                remedy = "GOOGLE_SERVICE_ACCOUNT_KEY is the text of a service account's JSON file."
                raise SourceDenied(fault, remedy=remedy) from None
        if self._own:
            return None
        try:
            found, _ = google.auth.default(scopes=[SCOPE])
        except exceptions.DefaultCredentialsError:
            return None
        self.origin = f"with the credentials of {getattr(found, 'service_account_email', 'this machine')}"
        return found

    def _refresh(self) -> None:
        import urllib3  # noqa: PLC0415
        from google.auth import exceptions  # noqa: PLC0415
        from google.auth.transport.urllib3 import Request  # noqa: PLC0415

        try:
            self._found.refresh(Request(urllib3.PoolManager(timeout=10.0)))  # type: ignore[no-untyped-call]
        except exceptions.GoogleAuthError as error:
            fault = f"gs://: no token can be had {self.origin}: {type(error).__name__}."
            raise SourceDenied(fault, remedy="Log in again, or check the service account's key.") from error
