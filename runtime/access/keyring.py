"""The keyring: all API keys of a gateway, in memory and in `access/keys.json` of its state folder.

The file holds digests only; who reads it can open nothing. It stays when the last key is revoked, so that a gateway that
was closed does not open by that: whoever wants it open removes the file while no gateway runs.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from ...errors import UnknownKey
from . import private_files
from .caller import Caller
from .keys import ApiKey, NewKey, key_id_of, mint, spend_the_time
from .quota import Meter

FILE = "keys.json"
# How exactly the last use of a key is known: writing it down costs an fsync, which no request should.
USE_GRAIN_S = 3600.0


class _File(BaseModel):
    """`keys.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int = 1
    keys: tuple[ApiKey, ...] = ()


class Held:
    """A key in memory: who comes with it, and what it has used of its quota."""

    __slots__ = ("caller", "key", "last_used_s", "meter")

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        self.caller = Caller(
            key.id, frozenset(key.scopes), None if key.functions is None else frozenset(key.functions)
        )
        self.meter = Meter(key.rate_per_s, key.burst, key.concurrency, time.monotonic())
        self.last_used_s = key.last_used_s or 0.0

    def used(self, now_s: float) -> bool:
        """Notes a use, coarsely; whether that is news worth saving."""
        grain_s = now_s - now_s % USE_GRAIN_S
        if grain_s <= self.last_used_s:
            return False
        self.last_used_s = grain_s
        return True


class Keyring:
    """The keys. `find` may be called at any time; what writes blocks, and may be called from any thread."""

    def __init__(self, state: Path) -> None:
        self.path = state / private_files.FOLDER / FILE
        self.exists = False
        """Whether there has ever been a key here: from then on nobody is let in without one."""
        self._held: dict[str, Held] = {}
        self._changing = threading.Lock()

    def load(self) -> None:
        """Reads the file. Raises GatewayError if it is there and cannot be understood."""
        private_files.tidy(self.path.parent)
        data = private_files.read(self.path)
        if data is None:
            return
        try:
            file = _File.model_validate_json(data)
        except ValidationError as error:
            problem = error.errors(include_url=False, include_input=False)[0]
            raise private_files.broken(self.path, f"{problem['loc']}: {problem['msg']}") from None
        self._held = {key.id: Held(key) for key in file.keys}
        self.exists = True

    def __len__(self) -> int:
        return len(self._held)

    def all(self) -> list[ApiKey]:
        """All of them, the oldest first."""
        return sorted((_as_used(held) for held in self._held.values()), key=lambda key: key.created_s)

    def find(self, token: str, now_s: float) -> Held | None:
        """The key that this token is; None if there is none, or it has expired."""
        key_id = key_id_of(token)
        if key_id is None:
            return None
        held = self._held.get(key_id)
        if held is None:
            spend_the_time(token)
            return None
        return held if held.key.opens(token, now_s) else None

    def create(self, new: NewKey, now_s: float) -> tuple[ApiKey, str]:
        """A new key with its token, which is told this once. It counts when it is on the disk."""
        key, token = mint(new, now_s)
        with self._changing:
            self._replace([*self._held.values(), Held(key)])
        return key, token

    def revoke(self, key_id: str) -> ApiKey:
        """Takes a key away: its next request is refused. Raises UnknownKey."""
        with self._changing:
            held = self._held.get(key_id)
            if held is None:
                raise UnknownKey(
                    f"There is no API key with the id {key_id[:64]!r}.", remedy="See `pilotflame keys list`."
                )
            self._replace(other for other in self._held.values() if other is not held)
        return held.key

    def save(self) -> None:
        """Writes down when keys were last used."""
        with self._changing:
            self._replace(self._held.values())

    def _replace(self, held: Iterable[Held]) -> None:
        kept = list(held)
        self._write([_as_used(one) for one in kept])
        self._held = {one.key.id: one for one in kept}
        self.exists = True

    def _write(self, keys: list[ApiKey]) -> None:
        private_files.write(self.path, _File(keys=tuple(keys)).model_dump_json(indent=1).encode())


def _as_used(held: Held) -> ApiKey:
    return held.key.model_copy(update={"last_used_s": held.last_used_s or None})
