"""Holds all API keys of a gateway in memory, and stores them in the document `access/keys.json`.

The document holds digests of the tokens, never a token. It must still stay private, because with a signing digest,
requests to the routes of AWS Lambda can be signed (see `aws_signature.py`). A gateway that has this document requires an
API key from every caller, even after the last key is revoked. The empty document `access/closed` beside it says that there
were keys. If keys.json is lost, a gateway that finds `access/closed` does not start, so that it does not admit callers without a
key. To admit them again, stop the gateway and remove both documents. The used part of a quota is only in memory. After a start of
the gateway, each quota is unused.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from pydantic import BaseModel

from ....errors import GatewayError, QuotaExceeded, UnknownKey
from ..storing.documents import Documents
from ..storing.private_files import parse
from ..telemetry.metrics import Numbers, Reading
from .deploy_policy import DeployPolicy, StoredPolicy, unknown_members
from .keys import NOBODY, TOKEN, ApiKey, Caller, NewKey, mint

# The time of a key's last use is rounded down to a multiple of USE_GRAIN_S, because each saved change costs an fsync.
USE_GRAIN_S = 3600.0
# A bucket admits a request if it holds at least 1 - _TOLERANCE tokens. With a limit of exactly 1, rounding could make
# `enter` refuse a caller who has waited exactly the time that `enter` returned.
_TOLERANCE = 1e-9
# The longest time from a request at another gateway until this gateway debits it: two heartbeats, and their delays.
LATE_S = 2.2
# The retry time for callers with too many running requests. The end of these requests cannot be predicted.
CONCURRENCY_WAIT_S = 1.0
MOST_CALL_MIN = 10

# The names of all documents with keys or secrets begin with ACCESS.
ACCESS = "access/"
KEYS, CLOSED = f"{ACCESS}keys.json", f"{ACCESS}closed"
# The document keeps the limits of at most this number of revoked keys: of the keys that were revoked last.
MOST_REVOKED = 10_000


class RevokedKey(BaseModel, frozen=True, extra="allow"):
    """The limits of a key that was revoked. They still hold for the functions that were deployed with it."""

    id: str
    max_workers: int | None = None
    policy: StoredPolicy | None = None


class KeysFile(BaseModel, frozen=True, extra="allow"):
    """The content of the document KEYS.

    A gateway of another version may have written it. So unknown members of the document and of its keys are ignored, and written again.
    """

    version: int = 1
    keys: tuple[ApiKey, ...] = ()
    revoked: tuple[RevokedKey, ...] = ()

    def without(self, key: ApiKey) -> KeysFile:
        """Return the content after a key was revoked."""
        kept, revoked = tuple(other for other in self.keys if other.id != key.id), self.revoked
        if key.max_workers is not None or key.policy is not None:
            limits = RevokedKey(id=key.id, max_workers=key.max_workers, policy=key.policy)
            revoked = (*revoked, limits)[-MOST_REVOKED:]
        return self.model_copy(update={"keys": kept, "revoked": revoked})


def stored_keys(documents: Documents) -> KeysFile | None:
    """Return the stored keys, or None if there are none. Raise GatewayError if they are damaged."""
    stored = documents.get(KEYS)
    return None if stored is None else parse(stored, KeysFile, documents.place(KEYS))


class Bucket:
    """A token bucket. It holds at most `most` tokens, and gains `per_s` tokens a second. `level` may be negative."""

    __slots__ = ("_at_s", "_begun_s", "_gone", "_lost", "_per_s", "level", "most")

    def __init__(self, most: float, per_s: float, now_s: float) -> None:
        self.most, self._per_s = most, per_s
        self.level, self._at_s = most, now_s
        # `_lost` counts tokens that the full bucket did not gain, and that a debit may give back. `_gone` counts all other tokens that left the
        # bucket, but that no caller of this gateway has taken.
        self._begun_s, self._lost, self._gone = now_s, 0.0, 0.0

    def wait_s(self, now_s: float, count: float) -> float:
        """Return the seconds after which the bucket holds `count`; 0.0 if it does now."""
        if now_s > self._at_s:
            self.level += (now_s - self._at_s) * self._per_s
            self._at_s = now_s
            if self.level > self.most:
                self._lost += self.level - self.most
                self.level = self.most
        lacking = count - self.level
        return lacking / self._per_s if lacking > _TOLERANCE else 0.0

    def taken(self, now_s: float) -> float:
        """Return how much the callers of this gateway have taken so far."""
        self.wait_s(now_s, 0.0)
        gained = (self._at_s - self._begun_s) * self._per_s
        return round(self.most + gained - self._lost - self._gone - self.level, 3)

    def debit(self, now_s: float, count: float) -> None:
        """Subtract what callers of another gateway have taken of the same quota, in the last LATE_S. If the bucket was full in this time, it
        gets back the tokens that it did not gain then: it would have gained them if the debit had come at once.
        """
        self.wait_s(now_s, 0.0)
        lately = LATE_S * self._per_s
        count = min(count, self.most + lately)
        lost = min(self._lost, lately)
        back = max(0.0, min(count, lost))
        self.level -= count - back
        self._gone, self._lost = self._gone + self._lost - lost + count, lost - back


class Meter:
    """Limits the requests of one API key to its quota. At most `concurrency` requests run at the same time.

    Each request takes one token out of a bucket, which holds at most `burst` tokens and gains `rate_per_s`
    tokens per second. A request for several answers, or with several prompts or events, counts as several. The tokens of language models have a
    bucket of their own, which holds `model_tokens_per_min`. A request reserves the tokens that it is expected to take, and settles at its
    end. A request larger than a bucket is admitted when the bucket is full, and overdraws it. A limit
    that is None does not apply.
    """

    def __init__(
        self, rate_per_s: float | None, burst: int | None, concurrency: int | None, now_s: float,
        model_tokens_per_min: int | None = None,
    ) -> None:  # fmt: skip
        size = float(burst or max(1, math.ceil(rate_per_s or 0)))
        self._requests = None if rate_per_s is None else Bucket(size, rate_per_s, now_s)
        most = model_tokens_per_min
        self._model_tokens = None if most is None else Bucket(most, most / 60, now_s)
        self._concurrency = math.inf if concurrency is None else concurrency
        self.running = 0
        self.elsewhere = 0
        """The part of `running` that runs at other gateways."""
        self.limit = ""
        """After a refusal, the name of the limit that refused the request. An admitted request may change it, too."""

    @property
    def limited(self) -> bool:
        """True if a limit applies."""
        return not (self._requests is None and self._model_tokens is None and self._concurrency == math.inf)

    def enter(self, now_s: float) -> float:
        """Admit a request and return 0.0, or return the seconds after which to retry.

        The caller must call `leave` when an admitted request has ended.
        """
        if wait_s := self.wait_s(now_s):
            return wait_s
        self.take(1)
        return 0.0

    def wait_s(self, now_s: float, more: int = 1, entered: int = 0, model_tokens: int = 0) -> float:
        """Return the seconds after which `more` requests, which take `model_tokens`, may be admitted; 0.0 if they may be now.

        A request may count as several requests: `entered` of them are admitted already.
        """
        whole, most = more + entered, self._concurrency
        # A request larger than the limit is admitted alone. So count at most `most` of its parts: otherwise the later parts would be refused.
        if more and self.running - entered + min(whole, most) > most:
            self.limit = "concurrency"
            return CONCURRENCY_WAIT_S
        if (bucket := self._model_tokens) is not None:
            self.limit = "model_tokens_per_min"
            if wait_s := bucket.wait_s(now_s, min(model_tokens, bucket.most)):
                return wait_s
        if (bucket := self._requests) is None or not more:
            return 0.0
        self.limit = "rate_per_s"
        return bucket.wait_s(now_s, min(whole, bucket.most) - entered)

    def widen(self, now_s: float, more: int, entered: int, model_tokens: int = 0) -> float:
        """Count `more` further requests for a request that counts as `entered` requests, and take tokens of language models. Return 0.0, or the
        seconds after which the caller may send the request again.
        """
        if wait_s := self.wait_s(now_s, more, entered, model_tokens):
            if self._requests is not None:
                # Give back the tokens that the refused request took in `enter` and in earlier calls.
                self._requests.level += entered
            return wait_s
        self.take(more, model_tokens)
        return 0.0

    def take(self, requests: int, model_tokens: int = 0) -> None:
        """Take requests, and tokens of language models, out of the buckets, and count the requests as running."""
        if self._requests is not None:
            self._requests.level -= requests
        if self._model_tokens is not None:
            self._model_tokens.level -= model_tokens
        self.running += requests

    def leave(self, requests: int = 1) -> None:
        self.running -= requests

    def reserve(
        self, now_s: float, answers: int, model_tokens: int, *, asked: int = 0, patient: bool = False
    ) -> tuple[float, Reservation | None]:
        """Reserve the further answers and the tokens of a call, whose request already counts. Return (0.0, reservation), or (seconds
        after which to retry, None).

        `asked` is the most tokens that the caller has asked for. The handler reports the used tokens, and may belong to another tenant. So
        a call takes at most `asked`, or what the bucket gains in MOST_CALL_MIN if that is more. A `patient` call is never refused, because
        it was admitted earlier.
        """
        most = max(asked, MOST_CALL_MIN * (self._model_tokens.most if self._model_tokens is not None else 0))
        more, model_tokens = answers - 1, min(model_tokens, int(most))
        if not patient and (wait_s := self.widen(now_s, more, 1, model_tokens)):
            return wait_s, None
        if patient:
            self.take(more, model_tokens)
        return 0.0, Reservation(self, more, model_tokens, int(most))

    def settle(self, requests: int, reserved: int, used: int) -> None:
        """End a reservation: the call has taken `used` tokens in place of the `reserved` ones."""
        self.leave(requests)
        if (bucket := self._model_tokens) is not None:
            bucket.level += reserved - used


class Reservation:
    """The requests and tokens that one call of a language model takes of a quota until it ends."""

    def __init__(self, meter: Meter, requests: int, model_tokens: int, most: int) -> None:
        self._meter: Meter | None = meter
        self._requests, self._model_tokens, self._most = requests, model_tokens, most

    def settle(self, used: int) -> None:
        """Replace the reserved tokens by the used ones. Later calls change nothing."""
        meter, self._meter = self._meter, None
        if meter is not None:
            meter.settle(self._requests, self._model_tokens, min(used, self._most))


def check_quota(meter: Meter, wait_s: float) -> None:
    """Raise QuotaExceeded, which names the limit, unless `wait_s`, the time until the key may send its next request, is 0."""
    if wait_s:
        message = f"This API key's quota is used up: its limit {meter.limit}."
        remedy = "Try again after the seconds in Retry-After, or ask for a larger quota."
        details = {"retry_after_s": wait_s, "limit": meter.limit}
        raise QuotaExceeded(message, remedy=remedy, details=details)


class Held:
    """An API key in memory: the stored key, the caller that it identifies, and the meter of its quota."""

    def __init__(self, key: ApiKey, meter: type[Meter] = Meter) -> None:
        self.key = key
        functions = None if key.functions is None else frozenset(key.functions)
        self.caller = Caller(
            key.id, frozenset(key.scopes), functions, key.name, key.expires_s, key.container_only
        )
        self.meter = meter(
            key.rate_per_s, key.burst, key.concurrency, time.monotonic(), key.model_tokens_per_min
        )
        self.last_used_s = key.last_used_s or 0.0

    def used(self, now_s: float) -> bool:
        """Record that the key was used now. Return True if the rounded time of last use has changed."""
        before_s, self.last_used_s = self.last_used_s, max(self.last_used_s, now_s - now_s % USE_GRAIN_S)
        return self.last_used_s > before_s

    def acting(self, owner: str, expires_s: float) -> Held:
        """Return a copy of this key for a caller whose token acts as the key until `expires_s`. Both have the same meter."""
        found = copy.copy(self)
        ends_s = expires_s if self.caller.expires_s is None else min(expires_s, self.caller.expires_s)
        name = f"{self.key.id}:{owner}" if owner else self.key.id
        found.caller = replace(self.caller, owner=name, expires_s=ends_s)
        return found

    def is_of(self, key: ApiKey) -> bool:
        """Return True if `key` equals this key, apart from the time of last use."""
        return self.key == key.model_copy(update={"last_used_s": self.key.last_used_s})

    def to_store(self) -> ApiKey:
        return self.key.model_copy(update={"last_used_s": self.last_used_s or None})


class Keyring:
    """The API keys of one gateway. All methods are safe to call from several threads.

    `create`, `revoke` and `save` block until the change is durably stored, or raise GatewayError. They keep what another
    gateway with the same documents has changed meanwhile.
    """

    def __init__(self, documents: Documents, meter: type[Meter] = Meter) -> None:
        """Each key gets an instance of `meter`, which measures its quota."""
        self._documents, self._meter = documents, meter
        self.exists = False
        """True once a key was created, even if all keys were revoked. If it is True, the gateway refuses callers without a key."""
        self.current_until_s = math.inf
        """The Unix time until which the keys in memory are valid. Later, no key is accepted, because other gateways may have revoked it."""
        self._held: dict[str, Held] = {}
        self._others = KeysFile()
        """All that is stored beside the keys."""
        self._revoked: dict[str, RevokedKey] = {}
        self._stored: bytes | None = None
        """The document as this gateway has written it last."""
        self._lock = threading.Lock()

    def load(self) -> None:
        """Read the stored keys, if there are any. Raise GatewayError if they are damaged, or missing although there were
        keys; then the keys in memory stay. The meters of unchanged keys go on.
        """
        with self._lock:
            if (file := stored_keys(self._documents)) is not None:
                self._hold(file)
                self._note_keys()
            elif self._documents.get(CLOSED) is not None:
                keys, closed = map(self._documents.place, (KEYS, CLOSED))
                fault = f"{keys} is missing, and this gateway has had API keys."
                remedy = f"Restore it from a backup. To make new keys, remove {closed}, too, and start with `--auth always`:"
                remedy += " otherwise the gateway admits callers without a key."
                raise GatewayError(fault, remedy=remedy)

    def all(self) -> list[ApiKey]:
        """Return all keys, the oldest first."""
        return sorted((held.to_store() for held in self._held.values()), key=lambda key: key.created_s)

    @property
    def container_only(self) -> list[str]:
        """The names of the keys with which only code in containers may be deployed."""
        return [key.name for key in self.all() if key.container_only]

    def find(self, token: str, now_s: float) -> Held | None:
        """Return the key that `token` belongs to. Return None if there is no such key or if it has expired.

        Raise GatewayError if the keys in memory are no longer valid.
        """
        self._check_current(now_s)
        match = TOKEN.fullmatch(token)
        held = self._held.get(match[1]) if match else None
        return held if (held.key if held else NOBODY).opens(token, now_s) else None

    def signer(self, key_id: str, now_s: float) -> Held | None:
        """Return the key with this id. Return None if there is no such key or if it has expired.

        Raise GatewayError if the keys in memory are no longer valid.
        """
        self._check_current(now_s)
        held = self._held.get(key_id)
        return held if held is not None and not held.key.expired(now_s) else None

    def _check_current(self, now_s: float) -> None:
        if now_s > self.current_until_s:
            message = (
                "This gateway cannot reach its database, so it does not know which API keys are still valid."
            )
            raise GatewayError(
                message, remedy="Try again when the database is back. See the setting store_grace_s."
            )

    def meter(self, owner: str) -> Meter | None:
        """Return the meter of an owner's key (`Caller.owner`); None if it has no limits."""
        held = self._held.get(owner.partition(":")[0])
        return held.meter if held is not None and held.meter.limited else None

    def meters(self) -> dict[str, Meter]:
        """Return the meter of each key that has limits, by the key's id."""
        return {name: held.meter for name, held in list(self._held.items()) if held.meter.limited}

    def of_issuer(self, url: str, now_s: float) -> list[Held]:
        """Return the keys as which tokens of this issuer can act. Leave out expired keys, and keys whose issuer has conditions that this version
        does not know.
        """
        return [
            held
            for held in list(self._held.values())
            if held.key.issuer is not None
            and held.key.issuer.url == url
            and not unknown_members(held.key.issuer)
            and not held.key.expired(now_s)
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
        self._change(lambda file: file.model_copy(update={"keys": (*file.keys, key)}))
        return key, token

    def revoke(self, key_id: str) -> ApiKey:
        """Remove a key and return it. Raise UnknownKey if no key has this id."""
        found = list[ApiKey]()

        def without(file: KeysFile) -> KeysFile:
            found[:] = [key for key in file.keys if key.id == key_id]
            if not found:
                message = f"No API key has the id {key_id[:64]!r}."
                raise UnknownKey(message, remedy="See `pilotflame keys list`.")
            return file.without(found[0])

        self._change(without)
        return found[0]

    async def readings(self) -> list[Reading]:
        """Return the metrics of all keys together: metrics with a label for each key would grow with the keys."""
        now_s, held = time.time(), list(self._held.values())
        expired = sum(one.key.expired(now_s) for one in held)
        states: Numbers = {("valid",): len(held) - expired, ("expired",): expired}
        running: Numbers = {(): sum(one.meter.running - one.meter.elsewhere for one in held)}
        return [
            Reading("keys", "API keys.", states, ("state",)),
            Reading("key_requests_running", "Requests with an API key that are running.", running, ()),
        ]

    def save(self) -> None:
        """Store the keys again, with the times at which they were last used."""
        self._change(lambda file: file)

    def _change(self, change: Callable[[KeysFile], KeysFile]) -> None:
        """Store the content that `change` makes of the keys, then keep it in memory."""
        file = KeysFile()

        def changed(stored: bytes | None) -> bytes:
            nonlocal file
            # If the document was removed by hand, write it again from memory.
            if stored is not None and stored != self._stored:
                # This gateway has not written the stored document, so its keys may differ from the keys in memory.
                self._hold(parse(stored, KeysFile, self._documents.place(KEYS)))
            keys = tuple(held.to_store() for held in self._held.values())
            file = change(self._others.model_copy(update={"keys": keys}))
            return file.model_dump_json(indent=1).encode()

        with self._lock:
            self._stored = self._documents.update(KEYS, changed)
            self._hold(file)
            self._note_keys()

    def _hold(self, file: KeysFile) -> None:
        held = dict[str, Held]()
        for key in file.keys:
            # Keep the meter of an unchanged key, with the used part of its quota.
            known = self._held.get(key.id)
            one = held[key.id] = known if known is not None and known.is_of(key) else Held(key, self._meter)
            if (used_s := key.last_used_s or 0.0) > one.last_used_s:
                one.last_used_s = used_s
        # Set `_revoked` before `_held`: other threads read both without the lock, and must always find the limits of a revoked key.
        self._revoked, self._others = (
            {key.id: key for key in file.revoked},
            file.model_copy(update={"keys": ()}),
        )
        self._held = held
        self.exists = True

    def _note_keys(self) -> None:
        if self._documents.get(CLOSED) is None:
            self._documents.put(CLOSED, b"")
