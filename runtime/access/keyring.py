"""Holds all API keys of a gateway in memory, and stores them in `access/keys.json` of its state folder.

The file holds digests of the tokens, never a token. The file must still stay private, because with a signing digest,
requests to the routes of AWS Lambda can be signed (see `aws_signature.py`). A gateway that has this file requires an
API key from every caller, even after the last key is revoked. The empty file `access/closed` beside it says that there
were keys, so that the loss of keys.json opens no gateway: the gateway then does not start. To admit callers without a key
again, stop the gateway and remove both files. The used part of a quota is only in memory. After a start of the gateway, each quota is unused.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from ...errors import GatewayError, UnknownKey
from ..telemetry.metrics import Numbers, Reading
from . import private_files
from .deploy_policy import DeployPolicy
from .keys import NOBODY, TOKEN, ApiKey, Caller, NewKey, mint

# The time of a key's last use is rounded down to a multiple of USE_GRAIN_S, because each saved change costs an fsync.
USE_GRAIN_S = 3600.0
# A bucket admits a request if it holds at least 1 - _TOLERANCE tokens. With a limit of exactly 1, rounding could make
# `enter` refuse a caller who has waited exactly the time that `enter` returned.
_TOLERANCE = 1e-9
# The retry time for callers with too many running requests. The end of these requests cannot be predicted.
CONCURRENCY_WAIT_S = 1.0
MOST_DEBT_MIN = 10


# The file keeps the limits of at most this number of revoked keys: of the keys that were revoked last.
MOST_REVOKED = 10_000


class RevokedKey(BaseModel, frozen=True, extra="forbid"):
    """The limits of a key that was revoked. They still hold for the functions that were deployed with it."""

    id: str
    max_workers: int | None = None
    policy: DeployPolicy | None = None


class KeysFile(BaseModel, frozen=True, extra="forbid"):
    """The content of `keys.json`."""

    version: int = 1
    keys: tuple[ApiKey, ...] = ()
    revoked: tuple[RevokedKey, ...] = ()


def keys_path(state: Path) -> Path:
    """Return the path of the file with the keys of the gateway in a state folder."""
    return state / private_files.FOLDER / "keys.json"


class Meter:
    """Limits the requests of one API key to its quota. At most `concurrency` requests run at the same time.

    Each request takes one token out of a bucket, which holds at most `burst` tokens and gains `rate_per_s`
    tokens per second. The tokens of language models have a bucket of their own, which holds `model_tokens_per_min`. It may
    be overdrawn, because the tokens of an answer are counted when they are made; then no request is admitted. A limit
    that is None does not apply.
    """

    def __init__(
        self, rate_per_s: float | None, burst: int | None, concurrency: int | None, now_s: float,
        model_tokens_per_min: int | None = None,
    ) -> None:  # fmt: skip
        self._rate_per_s = rate_per_s
        self._burst = float(burst or max(1, math.ceil(rate_per_s or 0)))
        self._tokens = self._burst
        self._at_s = now_s
        self._concurrency = math.inf if concurrency is None else concurrency
        self._most_model_tokens = model_tokens_per_min
        self._model_tokens, self._model_at_s = float(model_tokens_per_min or 0), now_s
        self.running = 0

    def enter(self, now_s: float) -> float:
        """Admit a request and return 0.0, or return the seconds after which to retry.

        The caller must call `leave` when an admitted request has ended.
        """
        if wait_s := self.wait_s(now_s):
            return wait_s
        if self._rate_per_s is not None:
            self._tokens = max(0.0, self._tokens - 1.0)
        self.running += 1
        return 0.0

    def wait_s(self, now_s: float) -> float:
        """Return the seconds after which to call `enter`; 0.0 if `enter` admits a request now."""
        if self.running >= self._concurrency:
            return CONCURRENCY_WAIT_S
        if model_wait_s := self._model_wait_s(now_s):
            return model_wait_s
        if self._rate_per_s is None:
            return 0.0
        if now_s > self._at_s:
            self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate_per_s)
            self._at_s = now_s
        return 0.0 if self._tokens >= 1.0 - _TOLERANCE else (1.0 - self._tokens) / self._rate_per_s

    def _model_wait_s(self, now_s: float) -> float:
        """Return the seconds after which the bucket of language models' tokens is not overdrawn any more."""
        if (most := self._most_model_tokens) is None:
            return 0.0
        if now_s > self._model_at_s:
            self._model_tokens = min(most, self._model_tokens + (now_s - self._model_at_s) * most / 60)
            self._model_at_s = now_s
        return 0.0 if self._model_tokens > -_TOLERANCE else -self._model_tokens * 60 / most

    def spend_model_tokens(self, count: int) -> None:
        """Take tokens of language models out of their bucket. The bucket is overdrawn by what it gains in MOST_DEBT_MIN at
        most, because another tenant's handler may say how many tokens there were.
        """
        if (most := self._most_model_tokens) is not None:
            self._model_tokens = max(self._model_tokens - count, -float(MOST_DEBT_MIN * most))

    def leave(self) -> None:
        self.running -= 1


class Held:
    """An API key in memory: the stored key, the caller that it identifies, and the meter of its quota."""

    def __init__(self, key: ApiKey) -> None:
        self.key = key
        functions = None if key.functions is None else frozenset(key.functions)
        self.caller = Caller(
            key.id, frozenset(key.scopes), functions, key.name, key.expires_s, key.container_only
        )
        self.meter = Meter(
            key.rate_per_s, key.burst, key.concurrency, time.monotonic(), key.model_tokens_per_min
        )
        self.last_used_s = key.last_used_s or 0.0

    def used(self, now_s: float) -> bool:
        """Record that the key was used now. Return True if the rounded time of last use has changed."""
        before_s, self.last_used_s = self.last_used_s, max(self.last_used_s, now_s - now_s % USE_GRAIN_S)
        return self.last_used_s > before_s

    def acting(self, owner: str, expires_s: float) -> Held:
        """Return this key for the caller whose token acts as it until `expires_s`. The meter is the same."""
        found = copy.copy(self)
        ends_s = expires_s if self.caller.expires_s is None else min(expires_s, self.caller.expires_s)
        name = f"{self.key.id}:{owner}" if owner else self.key.id
        found.caller = replace(self.caller, owner=name, expires_s=ends_s)
        return found

    def to_store(self) -> ApiKey:
        return self.key.model_copy(update={"last_used_s": self.last_used_s or None})


class Keyring:
    """The API keys of one gateway. All methods are safe to call from several threads.

    `create`, `revoke` and `save` block until the file is durably on disk, or raise GatewayError.
    """

    def __init__(self, state: Path) -> None:
        self.path = keys_path(state)
        self._mark = self.path.with_name("closed")
        self.exists = False
        """True once a key was created, even if all keys were revoked. If it is True, the gateway refuses callers
        without a key.
        """
        self._held: dict[str, Held] = {}
        self._revoked: dict[str, RevokedKey] = {}
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the keys from the file, if it exists. Raise GatewayError if it is damaged, or missing although there were
        keys.
        """
        private_files.remove_leftovers(self.path.parent)
        if self._mark.exists() and not self.path.exists():
            fault = f"{self.path} is missing, and this gateway has had API keys."
            remedy = f"Restore it from a backup. To admit callers without a key, remove {self._mark}, too."
            raise GatewayError(fault, remedy=remedy)
        if file := private_files.load(self.path, KeysFile):
            self._held = {key.id: Held(key) for key in file.keys}
            self._revoked = {key.id: key for key in file.revoked}
            self._note_keys()

    def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first."""
        return sorted((held.to_store() for held in self._held.values()), key=lambda key: key.created_s)

    @property
    def container_only(self) -> list[str]:
        """The names of the keys with which only code in containers may be deployed."""
        return [key.name for key in self.all() if key.container_only]

    def find(self, token: str, now_s: float) -> Held | None:
        """Return the key that `token` belongs to. Return None if there is no such key or if it has expired."""
        match = TOKEN.fullmatch(token)
        held = self._held.get(match[1]) if match else None
        return held if (held.key if held else NOBODY).opens(token, now_s) else None

    def signer(self, key_id: str, now_s: float) -> Held | None:
        """Return the key with this id. Return None if there is no such key or if it has expired."""
        held = self._held.get(key_id)
        return held if held is not None and not held.key.expired(now_s) else None

    def spend_model_tokens(self, owner: str, count: int) -> None:
        """Count tokens of language models that were read or made for an owner (`Caller.owner`)."""
        held = self._held.get(owner.partition(":")[0])
        if held is not None:
            held.meter.spend_model_tokens(count)

    def of_issuer(self, url: str, now_s: float) -> list[Held]:
        """Return the keys as which tokens of this issuer can act. Keys that have expired are left out."""
        return [
            held
            for held in list(self._held.values())
            if held.key.issuer is not None and held.key.issuer.url == url and not held.key.expired(now_s)
        ]

    @property
    def federated(self) -> bool:
        """True if tokens of an issuer can act as a key."""
        return any(held.key.issuer is not None for held in list(self._held.values()))

    def max_workers(self, key_id: str) -> int | None:
        """Return how many workers all functions that were deployed with a key may have; None for no limit.

        A key that has expired or was revoked still limits these functions.
        """
        limits = self._limits_of(key_id)
        return limits.max_workers if limits is not None else None

    def policy(self, key_id: str) -> DeployPolicy | None:
        """Return the policy of what may be deployed with a key; None if everything may be. The policy still applies to
        functions after the key has expired or was revoked.
        """
        limits = self._limits_of(key_id)
        return limits.policy if limits is not None else None

    def _limits_of(self, key_id: str) -> ApiKey | RevokedKey | None:
        held = self._held.get(key_id)
        return held.key if held is not None else self._revoked.get(key_id)

    def create(self, new: NewKey, now_s: float) -> tuple[ApiKey, str]:
        """Make and store a new key. Return the key and its token, which is not stored."""
        key, token = mint(new, now_s)
        with self._lock:
            self._replace([*self._held.values(), Held(key)])
        return key, token

    def revoke(self, key_id: str) -> ApiKey:
        """Remove a key and return it. Raise UnknownKey if no key has this id."""
        with self._lock:
            if (held := self._held.get(key_id)) is None:
                message = f"No API key has the id {key_id[:64]!r}."
                raise UnknownKey(message, remedy="See `pilotflame keys list`.")
            revoked = self._revoked
            if held.key.max_workers is not None or held.key.policy is not None:
                limits = RevokedKey(id=key_id, max_workers=held.key.max_workers, policy=held.key.policy)
                revoked = revoked | {key_id: limits}
                revoked = dict(list(revoked.items())[-MOST_REVOKED:])
            self._replace((other for other in self._held.values() if other is not held), revoked)
        return held.key

    async def readings(self) -> list[Reading]:
        """Return the metrics of all keys together: metrics with a label for each key would grow with the keys."""
        now_s, held = time.time(), list(self._held.values())
        expired = sum(one.key.expired(now_s) for one in held)
        states: Numbers = {("valid",): len(held) - expired, ("expired",): expired}
        running: Numbers = {(): sum(one.meter.running for one in held)}
        return [
            Reading("keys", "API keys.", states, ("state",)),
            Reading("key_requests_running", "Requests with an API key that are running.", running, ()),
        ]

    def save(self) -> None:
        """Write the file again, with the times at which the keys were last used."""
        with self._lock:
            self._replace(self._held.values())

    def _replace(self, held: Iterable[Held], revoked: Mapping[str, RevokedKey] | None = None) -> None:
        kept, limits = {one.key.id: one for one in held}, self._revoked if revoked is None else dict(revoked)
        file = KeysFile(keys=tuple(one.to_store() for one in kept.values()), revoked=tuple(limits.values()))
        private_files.write(self.path, file.model_dump_json(indent=1).encode())
        self._held, self._revoked = kept, limits
        self._note_keys()

    def _note_keys(self) -> None:
        self.exists = True
        if not self._mark.exists():
            private_files.write(self._mark, b"")
