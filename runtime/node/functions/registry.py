"""Keeps the functions that are deployed now, with their live revisions, and checks the rights of their owners."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ....errors import Forbidden, GatewayError, UnknownFunction
from ...calls.serving.revision import Revision
from ...ground.access.deploy_policy import Deployer, DeployPolicies
from ...ground.access.host_claims import HostClaims
from ...ground.access.keys import Caller, Scope
from ...ground.access.secrets import Secrets
from ...ground.settings.gateway_settings import GatewaySettings
from ...ground.telemetry.background import BackgroundTasks
from ...ground.telemetry.logs import Logs
from ...ground.telemetry.metrics import Numbers, Reading, WorkerCounts
from ..scaling.rung_figures import HoldingPrices
from .function_events import FunctionEvents
from .live import Live, ladder_spec_of
from .shared_revisions import SharedRevisions
from .store import Store


@dataclass(eq=False)
class Functions:
    """All functions of one gateway. Its methods must be called in the thread of the event loop."""

    store: Store
    tasks: BackgroundTasks
    secrets: Secrets
    events: FunctionEvents
    logs: Logs
    settings: GatewaySettings
    policies: DeployPolicies
    shared: SharedRevisions | None = field(default=None, init=False)
    """The functions that all gateways with the same database serve; None if this gateway does not share a database."""
    closing: bool = field(default=False, init=False)
    """True once the gateway is shutting down."""
    proving: list[tuple[str, str]] = field(default_factory=list, init=False)
    """Pairs (function, revision) of revisions that are checked now and may become live. Their files must not be removed."""
    # Sorted by name.
    _live: dict[str, Live] = field(default_factory=dict, init=False)
    # The locks by function. A lock vanishes when no deploy and no delete holds it or waits for it, so that locks of
    # deleted functions do not accumulate.
    _locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary, init=False)
    # Only one function is paused or resumed at a time, so that memory and disk agree.
    _pausing: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)

    def __post_init__(self) -> None:
        self.hosts = HostClaims(
            self.settings.app_hosts, lambda: [live.record.settings for live in self._live.values()]
        )
        for changed in (self.events.live, self.events.deleted):
            changed.append(self.hosts.update)

    # -- what is live

    def live(self, name: str) -> Revision:
        """Return the live revision of the function `name`. Raise the errors of `get`."""
        return self.get(name).revision

    def get(self, name: str) -> Live:
        """Return the function `name`.

        Raise UnknownFunction if it does not exist. Raise GatewayError if the gateway is shutting down.
        """
        if (live := self._live.get(name)) is None:
            raise UnknownFunction.named(name)
        self.check_open()
        return live

    def find(self, name: str) -> Live | None:
        """Return the function `name`; None if it does not exist."""
        return self._live.get(name)

    def is_live(self, live: Live) -> bool:
        """Return True if `live` is a function's live revision, and the gateway is not shutting down."""
        return self._live.get(live.record.function) is live and not self.closing

    def all(self) -> list[Live]:
        """Return all functions, sorted by name."""
        return list(self._live.values())

    def worker_counts(self) -> Mapping[str, WorkerCounts]:
        """Return the counts of workers and calls of each function's live revision, by the function's name."""
        return {name: live.workers.worker_counts() for name, live in self._live.items()}

    async def readings(self) -> list[Reading]:
        """Return the metric that lists the functions that may not run."""
        stopped: Numbers = {
            (name, live.function.stopped): 1 for name, live in self._live.items() if live.function.stopped
        }
        return [
            Reading("function_stopped", "Functions that may not run now.", stopped, ("function", "reason"))
        ]

    def check_open(self) -> None:
        """Raise GatewayError if the gateway is shutting down."""
        if self.closing:
            raise GatewayError("The gateway is shutting down.", remedy="Try again when it is up.")

    # -- what becomes live

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock of a function. Each deploy and the deletion of the function take it, so that they run one
        after the other.
        """
        return self._locks.setdefault(name, asyncio.Lock())

    def put(self, live: Live) -> asyncio.Task[None]:
        """Make a revision the live revision of its function. From now on, the revision's budget applies, and the
        function's ladder moves the revision between rungs.

        Return the task that plans the function's idle period.
        """
        name, last = live.record.function, next(reversed(self._live), "")
        self._live[name] = live
        if name < last:
            self._live = dict(sorted(self._live.items()))
        live.open_account()
        ladder, build_s = live.function.ladder, float(live.record.handler.get("build_s", 0.0))
        return ladder.adopt(live.workers, ladder_spec_of(live.record, self._prices), build_s, self.tasks)

    @property
    def _prices(self) -> HoldingPrices:
        """The prices of memory, devices and waiting on this node."""
        settings = self.settings
        memory_byte_s = settings.price_memory_gb_hour / 3600 / 1e9
        return HoldingPrices(memory_byte_s, settings.price_device_hour / 3600, settings.price_waiting_s)

    def remove(self, name: str, *, followed: bool = False) -> None:
        """Forget a function, because its deletion begins. `followed` is True if the function was deleted on another
        gateway.
        """
        del self._live[name]
        self.events.deleted(name)
        if not followed:
            self.events.disowned(name)

    # -- what its owner wants of it

    def reset(self, name: str) -> Live:
        """Let a function start workers at once, although the last starts failed. Also run its waiting jobs."""
        live = self.get(name)
        live.workers.reset()
        self.events.live(name)
        return live

    async def pause(self, name: str, *, paused: bool, followed: int = 0) -> Live:
        """Pause a function, or resume it if `paused` is False. Raise the errors of `get`.

        The function stays paused after a restart of the gateway. New calls are refused, and jobs and messages of queues
        wait. When the running calls have ended, the function's processes end. If this follows a change by another
        gateway, `followed` is the generation of the change.
        """
        live, shared = self.get(name), self.shared
        # Do not take the function's own lock here, because a deploy may hold it for minutes.
        async with self._pausing:
            if shared is not None and not followed:
                await shared.pause(live.record, paused=paused)
            elif shared is not None and shared.applied.get(name, 0) >= followed:
                return live
            await asyncio.to_thread(self.store.pause, name, paused=paused)
            live = self.get(name)
            if shared is not None and not followed:
                shared.confirm(name)
            if live.function.paused != paused:
                live.function.paused = paused
                live.function.decisions.note("pause" if paused else "resume", "owner")
                live.logs.write("gateway", f"{name} is paused" if paused else f"{name} is resumed")
                live.workers.look()
                self.events.live(name)
        if shared is not None and not followed:
            await shared.settle(name)
        return live

    def expect(self, name: str, invocations: int) -> None:
        """Start workers for messages that wait for a function. Do nothing if the function was deleted, or if the
        gateway is shutting down.
        """
        with contextlib.suppress(GatewayError, UnknownFunction):
            self.get(name).workers.expect(invocations, "backlog")

    def log(self, name: str, text: str) -> None:
        """Write a line with the source `gateway` to the log of a function, if the function exists."""
        if (live := self._live.get(name)) is not None:
            live.logs.write("gateway", text)

    # -- who owns it

    def owns(self, caller: Caller, name: str) -> bool:
        """Return True if the caller may change this function, and so may see all of it: settings, logs and tracebacks.

        A caller needs the scope `deploy`. A caller with an untrusted key owns a function only if the same owner has
        deployed it.
        """
        if not (caller.has(Scope.DEPLOY) and caller.allows(name)):
            return False
        if not caller.confined:
            return True
        live, own = self._live.get(name), Deployer(caller.owner, caller.name)
        return live is not None and self.policies.same_owner(live.record.owner, own)

    def signed_as(self, name: str) -> str:
        """Return the name whose secret signs webhooks of a function. The name of an untrusted function contains its
        deployer, so that two owners never get the same secret.
        """
        live = self._live.get(name)
        if live is None or not self.policies.confined(live.record.deployed_by):
            return name
        return f"function:{name}:{live.record.deployer}"

    def check_owner(self, caller: Caller, name: str) -> None:
        """Raise Forbidden if the caller may not deploy a function of this name, or does not own the function that has it."""
        caller.check_deploy(name)
        if name in self._live and not self.owns(caller, name):
            remedy = "Use the key with which it was deployed, a key of the same name, or a trusted one."
            raise Forbidden(f"{name} was deployed with another key.", remedy=remedy)
