"""Holds the secrets of functions in memory, and stores them in the documents `access/secrets/<function>.json`.

Their files have mode 0600 and are not encrypted: the encryption key would be on the same disk. The workers of
all functions run as the same system user, who can read these files. So mutually distrusting functions must run
in separate containers, with a gateway in each container.

The zygote of a function gets its secrets over its link to the gateway, before it imports the handler, and its workers
inherit them. After a change of a secret, new processes replace these processes (`Rollouts.renew`). Bases hold no
secrets.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

from pydantic import BaseModel, Field

from ....errors import BadInput, GatewayError, UnknownSecret
from ..settings.function_settings import check_name, name_problem
from ..storing.documents import Documents
from ..storing.private_files import parse

FOLDER = "access/secrets/"
MAX_VALUE_BYTES = 64 << 10
MAX_SECRETS = 100
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


class SecretsFile(BaseModel, frozen=True, extra="allow", strict=True):
    """The content of `<function>.json`. Members that another version of pilotflame has written are ignored, and written again."""

    version: int = 1
    secrets: dict[str, str] = Field(repr=False)


class Secrets:
    """The secrets of all functions. All methods are safe to call from several threads.

    `set`, `unset` and `forget` block until the change is durably stored, or raise GatewayError. `set` and `unset` keep
    the other secrets that another gateway with the same documents has changed meanwhile.
    """

    def __init__(self, documents: Documents) -> None:
        self._documents = documents
        self._secrets: dict[str, dict[str, str]] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the secrets of all functions. Raise GatewayError if a document is damaged."""
        _, damaged = self.reload()
        if damaged:
            raise damaged[0]

    def reload(self) -> tuple[frozenset[str], list[GatewayError]]:
        """Read the secrets of all functions. Return the functions whose secrets another gateway has changed, and the errors of damaged
        documents, whose functions keep the secrets in memory. Raise GatewayError if the documents cannot be read.
        """
        read, damaged = dict[str, dict[str, str]](), list[GatewayError]()
        with self._lock:
            before = self._secrets
            for name, data in self._documents.all(FOLDER).items():
                function = name.removeprefix(FOLDER).removesuffix(".json")
                if name_problem(function) is not None or name != _document(function):
                    continue
                try:
                    read[function] = self._parsed(name, data).secrets
                except GatewayError as error:
                    damaged.append(error)
                    read[function] = before.get(function, {})
            names = before.keys() | read.keys()
            changed = frozenset(name for name in names if before.get(name, {}) != read.get(name, {}))
            self._secrets = read
        return changed, damaged

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
        replaced = False

        def added(known: dict[str, str]) -> dict[str, str]:
            nonlocal replaced
            replaced = key in known
            if not replaced and len(known) >= MAX_SECRETS:
                raise BadInput(f"{function} has {MAX_SECRETS} secrets.", remedy="Unset some of them.")
            return {**known, key: value}

        self._change(function, added)
        return replaced

    def unset(self, function: str, key: str) -> None:
        """Remove a secret. Raise UnknownSecret if the function has no secret of this name."""

        def removed(known: dict[str, str]) -> dict[str, str]:
            if known.pop(key, None) is None:
                remedy = f"See `pilotflame secrets list {function}`."
                raise UnknownSecret(f"{function} has no secret {key[:64]!r}.", remedy=remedy)
            return known

        self._change(function, removed)

    def forget(self, function: str) -> None:
        """Remove all secrets of a function, so that a later function of the same name does not get them."""
        with self._lock:
            self._documents.remove(_document(function))
            self._secrets.pop(function, None)

    def _change(self, function: str, change: Callable[[dict[str, str]], dict[str, str]]) -> None:
        """Store the secrets that `change` makes of a function's stored secrets, then keep them in memory."""
        name, secrets = _document(function), dict[str, str]()

        def changed(stored: bytes | None) -> bytes | None:
            nonlocal secrets
            file = SecretsFile(secrets={}) if stored is None else self._parsed(name, stored)
            secrets = change(dict(file.secrets))
            file = file.model_copy(update={"secrets": secrets})
            return file.model_dump_json().encode() if secrets else None

        with self._lock:
            self._documents.update(name, changed)
            self._secrets[function] = secrets

    def _parsed(self, name: str, data: bytes) -> SecretsFile:
        return parse(data, SecretsFile, self._documents.place(name))


def _document(function: str) -> str:
    """Return the name of the document with a function's secrets. Raise SettingsError if the function's name is not valid."""
    return f"{FOLDER}{check_name(function)}.json"


def _check(key: str, value: str) -> None:
    if not _KEY.fullmatch(key):
        remedy = "It becomes an environment variable: letters, digits and _, no digit first."
        raise BadInput(f"{key[:64]!r} cannot be a secret's name.", remedy=remedy)
    if "\0" in value:
        raise BadInput(f"The value of {key} contains a NUL character.", remedy="Encode it as base64.")
    if len(value.encode()) > MAX_VALUE_BYTES:
        remedy = "Store larger data elsewhere, and only the credentials for it here."
        raise BadInput(f"The value of {key} is larger than {MAX_VALUE_BYTES} bytes.", remedy=remedy)
