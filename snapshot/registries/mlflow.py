"""Defines the source that reads versions of models in MLflow's model registry.

The registry says where the files of a version are: in a store, which another source reads, or on the tracking server.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import quote, unquote, urlencode, urlsplit

from ...errors import PilotflameError, SourceDenied, SourceError, SourceMissing
from ..sources.access import ANY, Access
from ..sources.exchange import Head
from ..sources.http import WebSource
from ..sources.locate import follow
from ..sources.location import Location, ServerAddress
from ..sources.response import RangeRequest, refusal
from ..sources.source import Connection, Kept, Listing, ObjectInfo, Served, Source, listed, name_fault
from ..sources.variables import MLFLOW

_REFERENCE = re.compile(r"mlflow://([^/@?#]{1,256})(?:@([\w.-]{1,256})|/([0-9]{1,18}))(?:/(.+))?", re.ASCII)
_API = "api/2.0/mlflow"
_ARTIFACTS = "api/2.0/mlflow-artifacts/artifacts"


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """The parts of `mlflow://model/version/folder` or `mlflow://model@alias/folder`. Either version or alias is ""."""

    model: str
    version: str
    alias: str
    folder: str

    @staticmethod
    def of(url: str) -> ModelVersion:
        """Return the parts of a URL, in which the model's name may be percent-encoded. Raise SourceError."""
        found = _REFERENCE.fullmatch(url.rstrip("/"))
        folder = (found[4] or "") if found is not None else ""
        if found is None or (folder and name_fault(folder)) or "/" in unquote(found[1]):
            remedy = "Write mlflow://MODEL/VERSION or mlflow://MODEL@ALIAS, with /folder after it if needed."
            raise SourceError(f"{url[:200]!r} is not a version of a model.", remedy=remedy)
        return ModelVersion(unquote(found[1]), found[3] or "", found[2] or "", folder)

    def __str__(self) -> str:
        version = f"/{self.version}" if self.version else f"@{self.alias}"
        return f"mlflow://{quote(self.model, safe='')}{version}{f'/{self.folder}' if self.folder else ''}"


class MlflowSource:
    """The files of a version of a model that are below the URL's folder.

    MLFLOW_TRACKING_URI is the URL of the server. If the registry is on another server, MLFLOW_REGISTRY_URI is its URL. An
    alias is resolved to its version once.
    """

    def __init__(self, url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> None:
        self._model = ModelVersion.of(url)
        self.url = str(self._model)
        self._secrets = dict(secrets or {})
        self._access = access
        self._server = TrackingServer(self.url, MLFLOW.variables(self._secrets, access), access)
        self._asking = threading.RLock()
        self._version = self._model.version
        self._opened: Source | None = None

    def pinned(self) -> str:
        """Return the URL with the version in place of an alias."""
        with self._asking:
            self._version = self._version or self._server.version_of(self._model.model, self._model.alias)
            return str(replace(self._model, version=self._version, alias=""))

    def names(self) -> list[str]:
        """Return the names of the files of the version, below the URL's folder. Raise SourceError if the store cannot be listed."""
        store = self._store()
        if not isinstance(store, Listing):
            raise SourceError(f"{store.url} cannot be listed.")
        return store.names()

    def stat(self, name: str) -> ObjectInfo:
        return self._store().stat(name)

    def read_into(self, name: str, offset: int, view: memoryview) -> int:
        return self._store().read_into(name, offset, view)

    def connect(self) -> Connection:
        return self._store().connect()

    def served_at(self, name: str) -> str:
        """Return the URL at which file `name` is requested, or else the URL of the store, without credentials."""
        store = self._store()
        return store.served_at(name) if isinstance(store, Served) else store.url

    def forget(self) -> None:
        """Forget the infos of the files. If the URL has an alias, the next read resolves the alias again."""
        with self._asking:
            store = self._opened
            if store is not None and isinstance(store, Kept):
                store.forget()
            if self._model.alias:
                self._version, self._opened = "", None

    def prepare(self) -> None:
        """Do the work of the first request to the MLflow server in advance, such as loading the trusted authorities."""
        self._server.prepare()

    def _store(self) -> Source:
        """Return the source of the files. The first call asks the registry where they are."""
        with self._asking:
            if self._opened is None:
                self.pinned()
                self._opened = self._open(self._server.location_of(self._model.model, self._version))
            return self._opened

    def _open(self, location: str) -> Source:
        below = f"/{self._model.folder}" if self._model.folder else ""
        if location.startswith("mlflow-artifacts:"):
            return self._server.below(f"{self._server.own_path(location)}{below}")
        return follow(self.url, f"{location.rstrip('/')}{below}", self._secrets, self._access)


class TrackingServer(WebSource):
    """An MLflow server: its registry, and the artifacts below one folder. The server itself serves these artifacts."""

    def __init__(self, url: str, variables: Mapping[str, str], access: Access, folder: str = "") -> None:
        super().__init__(url, access=access)
        self._variables, self._folder = variables, folder
        endpoint = variables.get("MLFLOW_REGISTRY_URI") or variables.get("MLFLOW_TRACKING_URI") or ""
        self._endpoint = endpoint.rstrip("/")
        try:
            self._address = ServerAddress.of(self._endpoint)
        except ValueError as error:
            fault = f"{url} needs MLFLOW_TRACKING_URI, the URL of an MLflow server: {error}."
            remedy = "Set it to https://host, in the environment or as a secret of the function."
            raise SourceError(fault, remedy=remedy) from None
        self._headers = _credentials(variables)

    def below(self, folder: str) -> TrackingServer:
        """Return the source of the artifacts below a folder."""
        return TrackingServer(self.url, self._variables, self.access, folder)

    def own_path(self, location: str) -> str:
        """Return the path in a location `mlflow-artifacts:`. Raise SourceError if the location is on another server."""
        parts = urlsplit(location)
        if parts.netloc and parts.netloc not in {self._address.authority, self._address.host}:
            fault = f"{self.url}: its files are with another server, {parts.netloc[:200]}."
            raise SourceError(fault, remedy="Name that server in MLFLOW_TRACKING_URI.")
        path = parts.path.strip("/")
        if wrong := name_fault(path):
            fault = f"{self.url}: the server names a path that is not valid: {wrong}."
            raise SourceError(fault, remedy="Check it there.")
        return path

    def version_of(self, model: str, alias: str) -> str:
        """Return the version to which an alias points. Raise SourceMissing."""
        answer = self._ask(f"{_API}/registered-models/alias", name=model, alias=alias)
        entry = answer.get("model_version")
        version = str(entry.get("version", "")) if isinstance(entry, dict) else ""
        if not re.fullmatch("[0-9]{1,18}", version, re.ASCII):
            raise self._odd()
        return version

    def location_of(self, model: str, version: str) -> str:
        """Return the URL or path of the files of a version. Raise SourceMissing."""
        answer = self._ask(f"{_API}/model-versions/get-download-uri", name=model, version=version)
        location = answer.get("artifact_uri")
        if not isinstance(location, str) or not location:
            raise self._odd()
        return location

    def resolve(self, name: str) -> Location:
        path = f"{self._folder}/{name}" if self._folder else name
        return Location(f"{self._endpoint}/{_ARTIFACTS}/{quote(path, safe='/')}", self._headers)

    def names(self) -> list[str]:
        """Return the names of all artifacts below the folder, sorted and relative to it."""
        return sorted(listed(self.url, self._walk("")))

    def _walk(self, folder: str, depth: int = 8) -> Iterator[str]:
        """Yield the names of the artifacts in a folder and its subfolders, relative to the source."""
        path = f"{self._folder}/{folder}".strip("/")
        entries = self._ask(_ARTIFACTS, path=path).get("files", [])
        for entry in entries if isinstance(entries, list) else []:
            last = (
                str(entry.get("path", "")).rstrip("/").rpartition("/")[2] if isinstance(entry, dict) else ""
            )
            name = f"{folder}/{last}" if folder else last
            if name_fault(name) or last.startswith("."):
                continue
            if not entry.get("is_dir"):
                yield name
            elif depth:
                yield from self._walk(name, depth - 1)

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        plain, said = refusal(head, request), _error_in(body)
        details = {**plain.details, "status": head.status, "code": said[0]}
        if head.status in {401, 403}:
            fault = f"{self.url}: the MLflow server refuses the request (HTTP {head.status})."
            remedy = "Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN."
            return SourceDenied(fault, remedy=remedy, details=details)
        # Take status 400 with a message for "missing" too, because the server has no code for an alias that does not exist.
        if head.status == 404 or (head.status == 400 and said[1]):
            fault = f"{self.url}: {said[1].rstrip('.') or f'{request.url} is not there'}."
            return SourceMissing(fault, remedy="Check the model, its versions and aliases.", details=details)
        return plain

    def _ask(self, path: str, /, **query: str) -> dict[str, Any]:
        location = Location(f"{self._endpoint}/{path}?{urlencode(query)}", self._headers)
        answer = self.json_document(location)
        if not isinstance(answer, dict):
            raise self._odd()
        return answer

    def _odd(self) -> SourceError:
        fault = f"{self._address} does not answer as an MLflow server does, for {self.url}."
        return SourceError(fault, remedy="Check MLFLOW_TRACKING_URI.")


def _credentials(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the header that MLflow's own clients send for these variables."""
    if user := variables.get("MLFLOW_TRACKING_USERNAME"):
        pair = f"{user}:{variables.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"Authorization": f"Basic {base64.b64encode(pair.encode()).decode()}"}
    token = variables.get("MLFLOW_TRACKING_TOKEN", "").strip()
    return {"Authorization": f"Bearer {token}"} if token else {}


def _error_in(body: bytes) -> tuple[str, str]:
    """Return the code and the message of an error of the server, or empty texts."""
    try:
        answer = json.loads(body)
        return str(answer["error_code"])[:64], " ".join(str(answer["message"]).split())[:300]
    except (ValueError, RecursionError, LookupError, TypeError):
        return "", ""
