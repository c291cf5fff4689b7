"""Applies the quota of an API key to its requests at all gateways that share a database.

Each gateway has the whole quota of a key, and subtracts what the others have taken of it (`Bucket.debit`). It learns their use up to two heartbeats later,
so a key may exceed its quota for two seconds. A caller who keeps within the quota is never refused, whichever gateways the requests reach.

For this reason, requests that run at other gateways count only if the key certainly exceeds its `concurrency`. To find this out, each gateway
reports the least number of requests that ran there at the same time in the last seconds. If the sum of these numbers is larger than
`concurrency`, each gateway admits only its share for EXCEEDED_S.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

from .gateway_shares import GatewayUse, by_name, share_of
from .keyring import Keyring, Meter

KEYS = "keys"
WINDOW_S, WINDOWS = 1.0, 2
"""A gateway reports the least number of running requests in the present window and in the `WINDOWS` windows before it, so that the periods of all reports overlap."""
UNUSED_S = 10.0
"""A gateway leaves a key out of its reports if the key was not used for this time."""
EXCEEDED_S = 10.0
"""Gateways admit only their shares of `concurrency` for this time after the key has exceeded it."""
_SESSIONS = itertools.count(1)


class KeyUse(NamedTuple):
    """The use of a key at one gateway, as this gateway reports it to the others."""

    session: int = 0
    """A new number each time the key is used again after a pause. `requests` and `model_tokens` count from that time."""
    requests: float = 0.0
    model_tokens: float = 0.0
    running: int = 0
    """The least number of requests that ran at the same time in the last seconds."""


NO_USE = KeyUse()


class SharedMeter(Meter):
    """The meter of a key that is used at several gateways."""

    def __init__(self, *limits: Any) -> None:
        """`limits` are the arguments of Meter."""
        super().__init__(*limits)
        # The least number of running requests in this window, and in the windows before.
        self._least, self._before = 0, deque([0] * WINDOWS, maxlen=WINDOWS)
        self._window_s = self._used_s = self._exceeded_until_s = -math.inf
        self._session, self._base, self._taken = 0, (0.0, 0.0), (0.0, 0.0)

    def leave(self, requests: int = 1) -> None:
        super().leave(requests)
        self._least = min(self._least, self.running - self.elsewhere)

    def tell(self, now_s: float) -> KeyUse | None:
        """Return the use that this gateway reports to the others; None if the key was not used lately."""
        own, taken = self.running - self.elsewhere, self._taken_until(now_s)
        if now_s - self._window_s >= WINDOW_S:
            self._before.append(self._least)
            self._window_s, self._least = now_s, own
        before, self._taken, unused = self._taken, taken, now_s - self._used_s > UNUSED_S
        if own or before != taken:
            if unused:
                self._session, self._base = next(_SESSIONS), before
            self._used_s = now_s
        elif unused:
            return None
        requests, tokens = (now - base for now, base in zip(taken, self._base, strict=True))
        return KeyUse(self._session, requests, tokens, min(self._least, *self._before))

    def _taken_until(self, now_s: float) -> tuple[float, float]:
        requests, tokens = self._requests, self._model_tokens
        return requests.taken(now_s) if requests else 0.0, tokens.taken(now_s) if tokens else 0.0

    def take_elsewhere(self, now_s: float, before: KeyUse, use: KeyUse) -> None:
        """Subtract what another gateway has taken between two reports."""
        base = before if before.session == use.session else NO_USE
        if self._requests is not None:
            self._requests.debit(now_s, use.requests - base.requests)
        if self._model_tokens is not None:
            self._model_tokens.debit(now_s, use.model_tokens - base.model_tokens)

    def limit_running(self, now_s: float, gateway: str, uses: Mapping[str, KeyUse]) -> None:
        """Count requests of other gateways as running if the key exceeds its concurrency. `uses` has the use at each gateway, by incarnation."""
        if self._concurrency == math.inf:
            return
        most, elsewhere = int(self._concurrency), 0
        running = {one: GatewayUse(use.running, use.running, use.running) for one, use in uses.items()}
        if sum(use.have for use in running.values()) > most:
            self._exceeded_until_s = now_s + EXCEEDED_S
        if now_s < self._exceeded_until_s and running:
            elsewhere = most - share_of(gateway, "", most, running)
        self._count_elsewhere(elsewhere)

    def cut_off(self) -> None:
        """Admit at least one request at a time while no reports arrive, because the other gateways may have ended."""
        if self.elsewhere:
            self._count_elsewhere(min(self.elsewhere, int(self._concurrency) - 1))

    def _count_elsewhere(self, elsewhere: int) -> None:
        self.running += elsewhere - self.elsewhere
        self.elsewhere = elsewhere


class SharedQuotas:
    """The quotas of all keys of a gateway."""

    def __init__(self, keyring: Keyring) -> None:
        """The meters of the keyring must be SharedMeters."""
        self._meters = cast("Callable[[], dict[str, SharedMeter]]", keyring.meters)
        self._told: dict[str, dict[str, KeyUse]] | None = None

    def report(self, now_s: float) -> dict[str, KeyUse]:
        """Return what to tell the other gateways, by key. Keys that were not used lately are left out."""
        told = {name: meter.tell(now_s) for name, meter in self._meters().items()}
        return {name: use for name, use in told.items() if use is not None}

    def cut_off(self) -> None:
        """Go on without the reports of the other gateways."""
        for meter in self._meters().values():
            meter.cut_off()

    def take(self, gateway: str, reports: Mapping[str, Any], now_s: float) -> None:
        """Apply the reports of the living gateways, by incarnation. `gateway` is the incarnation of this gateway."""
        told, meters = by_name(reports, KEYS, KeyUse, len(NO_USE)), self._meters()
        # The first reports debit nothing: their requests were sent before this gateway began.
        before, self._told = told if self._told is None else self._told, told
        for name in before.keys() | told.keys():
            if (meter := meters.get(name)) is not None:
                uses, last = told.get(name, {}), before.get(name, {})
                for one in uses.keys() - {gateway}:
                    meter.take_elsewhere(now_s, last.get(one, NO_USE), uses[one])
                meter.limit_running(now_s, gateway, uses)
