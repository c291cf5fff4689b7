"""The vault: the secrets of functions, in memory and in `access/secrets/<function>.json` of the state folder.

The files are plain, mode 0600: a key to encrypt them with would lie beside them, and protect from nobody who can read
them. A function's workers, and no other process, are given its secrets, over their own link when they are activated, so
that no zygote and no standby ever holds one, and no fork inherits one; what is changed reaches workers that are activated
from then on. Workers of all functions run as one user of the system, who can read these files: between functions that do
not trust each other, only containers make the separation more than a convention.
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ...errors import BadInput, UnknownSecret
from ..settings.function_settings import check_name, name_problem
from . import private_files

MAX_VALUE_BYTES = 64 << 10
MAX_SECRETS = 100
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")


class _File(BaseModel):
    """`<function>.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    version: int = 1
    secrets: dict[str, str] = Field(repr=False)


class Secrets:
    """Secrets by function. `of` and `names` may be called at any time; what writes blocks, and may be called from any thread."""

    def __init__(self, state: Path) -> None:
        self._folder = state / private_files.FOLDER / "secrets"
        self._secrets: dict[str, dict[str, str]] = {}
        self._changing = threading.Lock()

    def load(self) -> None:
        """Reads all files. Raises GatewayError if one cannot be understood."""
        private_files.tidy(self._folder)
        for path in self._folder.glob("*.json"):
            if name_problem(path.stem) is None:
                self._secrets[path.stem] = _read(path)

    def of(self, function: str) -> dict[str, str]:
        """A function's secrets, by the names of their environment variables."""
        return dict(self._secrets.get(function, {}))

    def names(self, function: str) -> list[str]:
        return sorted(self._secrets.get(function, {}))

    def set(self, function: str, key: str, value: str) -> bool:
        """Keeps a secret; whether it replaces one. Raises BadInput."""
        check_name(function)
        _check(key, value)
        with self._changing:
            known = self.of(function)
            if key not in known and len(known) >= MAX_SECRETS:
                raise BadInput(f"{function} has {MAX_SECRETS} secrets.", remedy="Unset some of them.")
            self._write(function, {**known, key: value})
        return key in known

    def unset(self, function: str, key: str) -> None:
        """Raises UnknownSecret."""
        with self._changing:
            known = self.of(function)
            if known.pop(key, None) is None:
                raise UnknownSecret(
                    f"{function} has no secret {key[:64]!r}.",
                    remedy=f"See `pilotflame secrets list {function}`.",
                )
            self._write(function, known)

    def forget(self, function: str) -> None:
        """Removes a function's secrets: another one of its name must not get them."""
        with self._changing:
            self._write(function, {})

    def _write(self, function: str, secrets: dict[str, str]) -> None:
        path = self._folder / f"{check_name(function)}.json"
        if secrets:
            private_files.write(path, _File(secrets=secrets).model_dump_json().encode())
            self._secrets[function] = secrets
        else:
            private_files.remove(path)
            self._secrets.pop(function, None)


def _check(key: str, value: str) -> None:
    if not _KEY.fullmatch(key):
        raise BadInput(
            f"{key[:64]!r} cannot be a secret's name.",
            remedy="It becomes an environment variable: letters, digits and _, no digit first.",
        )
    if "\0" in value:
        raise BadInput(f"The value of {key} holds a zero byte.", remedy="Encode it, as base64 for example.")
    if len(value.encode()) > MAX_VALUE_BYTES:
        raise BadInput(
            f"The value of {key} is larger than {MAX_VALUE_BYTES} bytes.",
            remedy="Keep in it what opens a larger thing.",
        )


def _read(path: Path) -> dict[str, str]:
    data = private_files.read(path)
    try:
        return _File.model_validate_json(data or b"").secrets
    except ValidationError as error:  # which would quote what it found
        problem = error.errors(include_url=False, include_input=False)[0]
        raise private_files.broken(path, str(problem["type"])) from None
