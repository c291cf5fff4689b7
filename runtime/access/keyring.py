"""All API keys of a gateway, in memory and in `access/keys.json` of its state folder.

The file holds only digests, which are not accepted as keys. It is kept when the last key is revoked, so that revoking keys never
opens a closed gateway. To open it again, remove the file while no gateway runs.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from ...errors import UnknownKey
from . import private_files
from .keys import NOBODY, TOKEN, ApiKey, Caller, NewKey, mint

# The last use of a key is known to the hour: storing it needs an fsync, which must not happen for each request.
USE_GRAIN_S = 3600.0
# Sums of fractions are a hair too small. A caller who waits as long as `enter` returned must be admitted.
_TOLERANCE = 1e-9
# The wait for a caller with too many running requests, whose ends are unknown.
CONCURRENCY_WAIT_S = 1.0


class KeysFile(BaseModel, frozen=True, extra="forbid"):
    """The content of `keys.json`."""

    version: int = 1
    keys: tuple[ApiKey, ...] = ()


class Meter:
    """One key's use of its quota: running requests, and a token bucket of `burst` tokens refilled at `rate_per_s`."""

    def __init__(
        self, rate_per_s: float | None, burst: int | None, concurrency: int | None, now_s: float
    ) -> None:
        self._rate_per_s = rate_per_s
        self._burst = float(burst or max(1, math.ceil(rate_per_s or 0)))
        self._tokens = self._burst
        self._at_s = now_s
        self._concurrency = math.inf if concurrency is None else concurrency
        self.running = 0

    def enter(self, now_s: float) -> float:
        """Begin a request and return 0.0, and `leave` must follow; or return the seconds to wait before a retry."""
        if self.running >= self._concurrency:
            return CONCURRENCY_WAIT_S
        if self._rate_per_s is not None:
            if now_s > self._at_s:
                self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate_per_s)
                self._at_s = now_s
            if self._tokens < 1.0 - _TOLERANCE:
                return (1.0 - self._tokens) / self._rate_per_s
            self._tokens = max(0.0, self._tokens - 1.0)
        self.running += 1
        return 0.0

    def leave(self) -> None:
        self.running -= 1


class Held:
    """A key in memory, with its caller and its use of the quota."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        functions = None if key.functions is None else frozenset(key.functions)
        self.caller = Caller(key.id, frozenset(key.scopes), functions)
        self.meter = Meter(key.rate_per_s, key.burst, key.concurrency, time.monotonic())
        self.last_used_s = key.last_used_s or 0.0

    def used(self, now_s: float) -> bool:
        """Note a use. Return True if that should be saved."""
        before_s, self.last_used_s = self.last_used_s, max(self.last_used_s, now_s - now_s % USE_GRAIN_S)
        return self.last_used_s > before_s

    def to_store(self) -> ApiKey:
        return self.key.model_copy(update={"last_used_s": self.last_used_s or None})


class Keyring:
    """The keys. Writing blocks until the disk has it. Safe to call from several threads."""

    def __init__(self, state: Path) -> None:
        self.path = state / private_files.FOLDER / "keys.json"
        self.exists = False
        """Whether there has ever been a key: from then on, callers without one are refused."""
        self._held: dict[str, Held] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the file. Raise GatewayError if it is damaged."""
        private_files.remove_leftovers(self.path.parent)
        if file := private_files.load(self.path, KeysFile):
            self._held = {key.id: Held(key) for key in file.keys}
            self.exists = True

    def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first."""
        return sorted((held.to_store() for held in self._held.values()), key=lambda key: key.created_s)

    def find(self, token: str, now_s: float) -> Held | None:
        """Return the key of this token, or None if it is unknown or expired."""
        match = TOKEN.fullmatch(token)
        held = self._held.get(match[1]) if match else None
        return held if (held.key if held else NOBODY).opens(token, now_s) else None

    def create(self, new: NewKey, now_s: float) -> tuple[ApiKey, str]:
        """Store a new key. Return it with its token, which is not stored."""
        key, token = mint(new, now_s)
        with self._lock:
            self._replace([*self._held.values(), Held(key)])
        return key, token

    def revoke(self, key_id: str) -> ApiKey:
        """Remove a key: its next request is refused. Raise UnknownKey."""
        with self._lock:
            if (held := self._held.get(key_id)) is None:
                message = f"No API key has the id {key_id[:64]!r}."
                raise UnknownKey(message, remedy="See `pilotflame keys list`.")
            self._replace(other for other in self._held.values() if other is not held)
        return held.key

    def save(self) -> None:
        """Store when the keys were last used."""
        with self._lock:
            self._replace(self._held.values())

    def _replace(self, held: Iterable[Held]) -> None:
        kept = {one.key.id: one for one in held}
        file = KeysFile(keys=tuple(one.to_store() for one in kept.values()))
        private_files.write(self.path, file.model_dump_json(indent=1).encode())
        self._held = kept
        self.exists = True
