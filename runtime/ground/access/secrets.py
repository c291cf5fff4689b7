"""Holds the secrets of functions in memory, and stores them in `access/secrets/<function>.json`.

The files have mode 0600 and are not encrypted: the encryption key would be on the same disk. The workers of
all functions run as the same system user, who can read these files. So mutually distrusting functions must run
in separate containers, with a gateway in each container.

The zygote of a function gets its secrets over its link to the gateway, before it imports the handler, and its workers
inherit them. After a change of a secret, new processes replace these processes (`Rollouts.renew`). Bases hold no
secrets.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from pydantic import BaseModel, Field

from ....errors import BadInput, UnknownSecret
from ..settings.function_settings import check_name, name_problem
from . import private_files

MAX_VALUE_BYTES = 64 << 10
MAX_SECRETS = 100
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


class SecretsFile(BaseModel, frozen=True, extra="forbid", strict=True):
    """The content of `<function>.json`."""

    version: int = 1
    secrets: dict[str, str] = Field(repr=False)


class Secrets:
    """The secrets of all functions. All methods are safe to call from several threads.

    `set`, `unset` and `forget` block until the change is durably on disk, or raise GatewayError.
    """

    def __init__(self, state: Path) -> None:
        self._folder = state / private_files.FOLDER / "secrets"
        self._secrets: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the files of all functions. Raise GatewayError if a file is damaged."""
        private_files.remove_leftovers(self._folder)
        for path in self._folder.glob("*.json"):
            if name_problem(path.stem) is None and (file := private_files.load(path, SecretsFile)):
                self._secrets[path.stem] = file.secrets

    def of(self, function: str) -> dict[str, str]:
        """Return the values of a function's secrets by their names, which become environment variables."""
        return dict(self._secrets.get(function, {}))

    def set(self, function: str, key: str, value: str) -> bool:
        """Store a secret. Return True if a secret of this name existed and was replaced.

        Raise SettingsError if the function's name is not valid. Raise BadInput if the secret's name or value
        is not valid, or if the function has too many secrets.
        """
        check_name(function)
        _check(key, value)
        with self._lock:
            known = self.of(function)
            if key not in known and len(known) >= MAX_SECRETS:
                raise BadInput(f"{function} has {MAX_SECRETS} secrets.", remedy="Unset some of them.")
            self._write(function, {**known, key: value})
        return key in known

    def unset(self, function: str, key: str) -> None:
        """Remove a secret. Raise UnknownSecret if the function has no secret of this name."""
        with self._lock:
            known = self.of(function)
            if known.pop(key, None) is None:
                remedy = f"See `pilotflame secrets list {function}`."
                raise UnknownSecret(f"{function} has no secret {key[:64]!r}.", remedy=remedy)
            self._write(function, known)

    def forget(self, function: str) -> None:
        """Remove all secrets of a function, so that a later function of the same name does not get them."""
        with self._lock:
            self._write(function, {})

    def _write(self, function: str, secrets: dict[str, str]) -> None:
        path = self._folder / f"{check_name(function)}.json"
        if secrets:
            private_files.write(path, SecretsFile(secrets=secrets).model_dump_json().encode())
            self._secrets[function] = secrets
        else:
            private_files.remove(path)
            self._secrets.pop(function, None)


def _check(key: str, value: str) -> None:
    if not _KEY.fullmatch(key):
        remedy = "It becomes an environment variable: letters, digits and _, no digit first."
        raise BadInput(f"{key[:64]!r} cannot be a secret's name.", remedy=remedy)
    if "\0" in value:
        raise BadInput(f"The value of {key} contains a NUL character.", remedy="Encode it as base64.")
    if len(value.encode()) > MAX_VALUE_BYTES:
        remedy = "Store larger data elsewhere, and only the credentials for it here."
        raise BadInput(f"The value of {key} is larger than {MAX_VALUE_BYTES} bytes.", remedy=remedy)
