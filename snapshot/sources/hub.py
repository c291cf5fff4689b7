"""Defines the source that reads repositories of the Hugging Face hub, or of another server with its interface.

The hub redirects requests for large files to signed URLs of a content delivery network, which expire. Only the hub gets
the token. A branch is resolved to its commit once, so that all files are of the same commit.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from ...errors import PilotflameError, SourceDenied, SourceError, SourceMissing
from .access import ANY, Access
from .exchange import Head
from .http import WebSource
from .location import Location, ServerAddress
from .response import RangeRequest, refusal
from .source import below, name_fault
from .variables import HUB

ENDPOINT = "https://huggingface.co"
COMMIT_CHARS = 40
_REPOSITORY = re.compile(r"(?!.*(?:--|\.\.))[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
_COMMIT = re.compile(rf"[0-9a-f]{{{COMMIT_CHARS}}}", re.ASCII)
# Revisions such as refs/pr/1. In other revisions, a slash must be written as %2F.
_REFERENCE = re.compile(r"(refs/[\w.-]+/[^/]+)(?:/(.*))?")


@dataclass(frozen=True, slots=True)
class HubPlace:
    """The parts of `hf://org/repo@revision/folder`."""

    repository: str
    revision: str
    folder: str

    @staticmethod
    def of(url: str) -> HubPlace:
        """Return the parts of a URL. Raise SourceError if it is not valid."""
        owner, _, rest = url.removeprefix("hf://").strip("/").partition("/")
        # An @ after a slash belongs to the folder, because the name of a repository has no slash.
        name, mark, after = rest.partition("@")
        revision, folder = "main", ""
        if "/" in name or not mark:
            name, _, folder = rest.partition("/")
        elif found := _REFERENCE.fullmatch(after):
            revision, folder = found[1], found[2] or ""
        else:
            revision, _, folder = after.partition("/")
        place = HubPlace(f"{owner}/{name}", unquote(revision), folder)
        wrong = name_fault(place.revision) or (place.folder and name_fault(place.folder))
        if not url.startswith("hf://") or not _REPOSITORY.fullmatch(place.repository) or wrong:
            remedy = "Write hf://organisation/repository, with @revision and /folder after it if needed."
            raise SourceError(f"{url[:200]!r} is not a URL of the hub.", remedy=remedy)
        return place

    def __str__(self) -> str:
        revision = self.revision if self.revision.startswith("refs/") else quote(self.revision, safe="")
        return f"hf://{self.repository}@{revision}{f'/{self.folder}' if self.folder else ''}"


class HubSource(WebSource):
    """The files below `hf://org/repo@revision/folder`. The revision is `main` unless the URL has one.

    HF_ENDPOINT is the URL of the server, and HF_TOKEN is the token. Both are read from `secrets`. If `secrets` have no
    variables of the hub, both are read from the environment, and the token also from the file of `hf auth login`.
    """

    # The signed URLs are valid for an hour. Request new URLs earlier, and after a refusal.
    kept_for_s = 900.0
    versioned_by_content = True

    def __init__(self, url: str, secrets: Mapping[str, str] | None = None, access: Access = ANY) -> None:
        self._place = HubPlace.of(url)
        super().__init__(str(self._place), access=access)
        variables = HUB.variables(secrets, access)
        self._endpoint = (variables.get("HF_ENDPOINT") or ENDPOINT).rstrip("/")
        try:
            ServerAddress.of(self._endpoint)
        except ValueError as error:
            raise SourceError(f"HF_ENDPOINT is not a URL: {error}.", remedy="Write https://host.") from None
        self._variables = variables
        self._own = HUB.alone(secrets, access)
        self._token = _token(variables, own=self._own)
        self._asking = threading.Lock()
        self._commit = self._place.revision if _COMMIT.fullmatch(self._place.revision) else ""
        self._files: list[str] | None = None

    def pinned(self) -> str:
        """Return the URL with the commit in place of a branch or a tag."""
        return str(HubPlace(self._place.repository, self._resolved(), self._place.folder))

    def resolve(self, name: str) -> Location:
        path = f"{self._place.folder}/{name}" if self._place.folder else name
        place = f"{self._place.repository}/resolve/{self._resolved()}/{quote(path, safe='/')}"
        return Location(f"{self._endpoint}/{place}", self._headers)

    def names(self) -> list[str]:
        """Return the names of the files below the URL's folder, without hidden files."""
        with self._asking:
            if self._files is None:
                self._ask()
            return below(self._place.folder, self._files or ())

    def explain(self, request: RangeRequest, head: Head, body: bytes) -> PilotflameError:
        """Return the error for a refused request, according to the hub's headers. The body is not used."""
        del body
        if head.status == 401:
            # The user may have logged in again: read the token again for the next request.
            self._token = _token(self._variables, own=self._own)
        repository, code = self._place.repository, head.headers.get("x-error-code", "")
        page = f"{self._endpoint}/{repository}"
        details = {"object": request.name, "status": head.status, "code": code}
        credentials = "the token" if self._token else "no token (HF_TOKEN is not set)"
        where = f"{self.url}{f'/{request.name}' if request.name else ''}"
        if code == "GatedRepo":
            fault = f"{where}: the repository is gated, and {credentials} does not open it."
            remedy = f"Ask for access at {page}, and set HF_TOKEN to a token of an account that has it."
            return SourceDenied(fault, remedy=remedy, details=details)
        if code == "RepoNotFound":
            fault = f"{where}: there is no repository {repository}, or {credentials} does not open it."
            return SourceMissing(
                fault, remedy=f"Check {page}, and HF_TOKEN if it is private.", details=details
            )
        if code == "RevisionNotFound":
            fault = f"{where}: the repository has no revision {self._place.revision!r}."
            return SourceMissing(fault, remedy=f"Choose one of those at {page}/tree/main.", details=details)
        if head.status == 401:
            fault = f"{where}: the hub refuses {credentials} (HTTP 401)."
            return SourceDenied(fault, remedy="Set HF_TOKEN to a valid token.", details=details)
        return refusal(head, request)

    @property
    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _resolved(self) -> str:
        """Return the commit. If the URL names a branch or a tag, the first call asks the hub."""
        with self._asking:
            if not self._commit:
                self._ask()
            return self._commit

    def _ask(self) -> None:
        revision = quote(self._commit or self._place.revision, safe="")
        url = f"{self._endpoint}/api/models/{self._place.repository}/revision/{revision}"
        answer = self.json_document(Location(url, self._headers))
        try:
            commit, files = answer["sha"], [entry["rfilename"] for entry in answer["siblings"]]
        except (LookupError, TypeError):
            commit, files = "", []
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            fault = f"{self._endpoint} does not answer as the Hugging Face hub does, for {self.url}."
            raise SourceError(fault, remedy="Check HF_ENDPOINT.")
        self._commit, self._files = commit, [name for name in files if isinstance(name, str)]


def _token(variables: Mapping[str, str], *, own: bool) -> str:
    """Return the token, or "". With `own`, do not read the token file of this process's user."""
    token = variables.get("HF_TOKEN") or variables.get("HUGGING_FACE_HUB_TOKEN") or ""
    if not token and not own:
        home = Path(variables.get("HF_HOME") or "~/.cache/huggingface").expanduser()
        try:
            token = Path(variables.get("HF_TOKEN_PATH") or home / "token").expanduser().read_text("utf-8")
        except (OSError, ValueError, RuntimeError):
            token = ""
    return "".join(token.split())
