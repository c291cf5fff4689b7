"""Finds the login for a registry where docker and podman keep it: in an auth file, or with a credential helper."""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import SourceError
from ..sources.access import Access
from ..sources.variables import AUTH_VARIABLE, REGISTRY

HELPER_TIMEOUT_S = 30.0
MAX_FILE_BYTES = 1 << 20
_HELPER = re.compile(r"[\w.-]{1,64}", re.ASCII)
# After a login with an OAuth 2 token, a helper returns this user, and an auth file has `identitytoken`. Both are refused.
_TOKEN_USER = "<token>"  # noqa: S105  no password
_DOCKER_HUB_KEY = "https://index.docker.io/v1/"


@dataclass(frozen=True, slots=True)
class Login:
    """The credentials for one registry. `origin` describes the login in messages, without secrets."""

    origin: str
    user: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    """A bearer token for the registry itself. If it is set, no user and password are needed."""

    def basic(self) -> dict[str, str]:
        """Return the header for Basic authentication, or no header if there is no user."""
        if not self.user:
            return {}
        pair = base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}


def find_login(registry: str, repository: str, secrets: Mapping[str, str], access: Access) -> Login:
    """Return the login for a repository.

    If `secrets` have variables of registries, only these are used, and no file is read. Otherwise, if `access` allows it,
    DOCKER_AUTH_CONFIG of the environment is used or, if it is not set, the auth files of podman and docker, in this order.
    Raise SourceError if the login that is found cannot be used.
    """
    if own := REGISTRY.own(secrets):
        entries = _read(own.get(AUTH_VARIABLE, "{}"), f"the secret {AUTH_VARIABLE}")
        return _entry(entries, registry, repository, f"the secret {AUTH_VARIABLE}") or _anonymous(registry)
    if REGISTRY.alone(secrets, access):
        return _anonymous(registry)
    for text, origin in _of_this_process():
        entries = _read(text, origin)
        login = _helped(entries, registry, origin) or _entry(entries, registry, repository, origin)
        if login is not None:
            return login
    return _anonymous(registry)


def _anonymous(registry: str) -> Login:
    return Login(f"without a login ({AUTH_VARIABLE} and the auth files have none for {registry})")


def _of_this_process() -> Iterator[tuple[str, str]]:
    """Yield the text and the origin of each auth file. The first file with a login for the registry is used."""
    environ = os.environ
    if text := environ.get(AUTH_VARIABLE):
        yield text, AUTH_VARIABLE
        return
    paths = [environ.get("REGISTRY_AUTH_FILE", "")]
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        paths.append(f"{runtime}/containers/auth.json")
    paths.append(f"{environ.get('XDG_CONFIG_HOME') or '~/.config'}/containers/auth.json")
    paths.append(f"{environ.get('DOCKER_CONFIG') or '~/.docker'}/config.json")
    for path in filter(None, paths):
        try:
            with Path(path).expanduser().open(encoding="utf-8") as stream:
                yield stream.read(MAX_FILE_BYTES), path
        except (OSError, ValueError, RuntimeError):
            continue


def _read(text: str, origin: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        # Do not show the text or the parser's message, which may quote a password.
        remedy = "Copy the file again that `docker login` or `podman login` writes."
        raise SourceError(f"{origin} is not an auth file of docker or podman.", remedy=remedy)
    return found


def _table(entries: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = entries.get(name)
    return found if isinstance(found, dict) else {}


def _entry(entries: Mapping[str, Any], registry: str, repository: str, origin: str) -> Login | None:
    """Return the login of the most specific entry: for the repository, for the beginning of its path, or for the registry."""
    auths = {_place(key): entry for key, entry in _table(entries, "auths").items()}
    place = f"{registry}/{repository}"
    while place not in auths and "/" in place:
        place = place.rpartition("/")[0]
    entry = auths.get(place)
    if not isinstance(entry, dict) or not entry:
        return None
    if entry.get("identitytoken"):
        raise _refresh_token(registry, origin)
    if isinstance(token := entry.get("registrytoken"), str) and token:
        return Login(f"with the token in {origin}", token=token)
    try:
        user, _, password = (
            base64.b64decode(str(entry.get("auth", "")).strip(), validate=True).decode().partition(":")
        )
    except ValueError:
        fault = f"The entry for {place} in {origin} is not base64."
        raise SourceError(fault, remedy="Log in again.") from None
    user, password = user or str(entry.get("username", "")), password or str(entry.get("password", ""))
    # Remove the zero bytes with which docker fills up old entries.
    return Login(f"with the login in {origin}", user, password.rstrip("\0")) if user else None


def _place(key: str) -> str:
    """Return the registry and the path that a key of an auth file names, as `host/path`, or `host` if the key has no path.

    docker may write the key as a URL.
    """
    place = re.sub(r"^https?://", "", key).rstrip("/")
    place = re.sub(r"/v[12]$", "", place)
    return "docker.io" if place in {"index.docker.io", "registry-1.docker.io"} else place


def _helped(entries: Mapping[str, Any], registry: str, origin: str) -> Login | None:
    """Return the login from the credential helper that an auth file names. None if it names no helper, or if the helper has no login."""
    name = _table(entries, "credHelpers").get(registry) or entries.get("credsStore")
    if not isinstance(name, str) or not _HELPER.fullmatch(name):
        return None
    server = _DOCKER_HUB_KEY if registry == "docker.io" else registry
    try:
        done = subprocess.run(
            [f"docker-credential-{name}", "get"],
            input=server.encode(), capture_output=True, timeout=HELPER_TIMEOUT_S, check=True,
        )  # fmt: skip
        answer = json.loads(done.stdout)
        user, password = answer["Username"], answer["Secret"]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError, TypeError):
        # Ignore the failure: a helper also fails if it has no login for the registry, and the file itself may have one.
        return None
    if user == _TOKEN_USER:
        raise _refresh_token(registry, f"docker-credential-{name}")
    return Login(
        f"with the login of docker-credential-{name}, which {origin} names", str(user), str(password)
    )


def _refresh_token(registry: str, origin: str) -> SourceError:
    fault = f"{origin} has an identity token for {registry}, which is not supported."
    return SourceError(
        fault, remedy="Log in with a user and a password, or with an access token as password."
    )
