"""Creates the functions of this node, and the parts that run and count them: launcher, fetcher, accounts, metrics."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...addresses import Addresses
from ...entry_points import DIALECTS, load
from ...errors import GatewayError
from ...handlers.recognise import Dialects
from ...snapshot.caching.node import Budgets
from ...snapshot.extras import require
from ..front.listening.sockets import bind
from ..ground.access.deploy_policy import DeployPolicies, DeployPolicy
from ..ground.access.keyring import Keyring
from ..ground.billing.ledger import Ledger
from ..ground.billing.usage import DISK_SHARE, Prices
from ..ground.billing.usage_store import UsageStore
from ..ground.settings.gateway_settings import GatewaySettings
from ..ground.telemetry.background import BackgroundTasks
from ..ground.telemetry.metrics import Metrics, Totals
from ..node.functions.function_events import FunctionEvents
from ..node.functions.registry import Functions
from ..node.functions.retirements import Retirements
from ..node.functions.revisions import Revisions
from ..node.functions.rollouts import Rollouts
from ..node.launching.container_launcher import ContainerLauncher
from ..node.launching.fetcher_client import FetcherClient, Sharing
from ..node.launching.gpu_driver import GpuDriver
from ..node.launching.gpus import find_driver
from ..node.launching.launcher import LauncherByImage
from ..node.launching.listener import Listener
from ..node.launching.process_launcher import ProcessLauncher
from ..node.measuring.node_memory import MemoryMeter
from ..node.measuring.recorder import Recorder
from ..node.reconciling.function_histories import FunctionHistories
from ..node.reconciling.gpu_bookings import GpuBookings
from ..node.reconciling.reconciler import Reconciler
from ..node.scaling.placement import Gpu
from .observing import observe, open_recorder
from .state import State

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunningNode:
    """The functions of a gateway, and the parts that measure them."""

    functions: Functions
    revisions: Revisions
    retirements: Retirements
    rollouts: Rollouts
    metrics: Metrics
    ledger: Ledger
    memory: MemoryMeter
    recorder: Recorder


async def open_node(
    settings: GatewaySettings, state: State, engine: str | None, stack: contextlib.AsyncExitStack
) -> RunningNode:
    """Return a node that has no functions yet. Raise LauncherError if the fetcher cannot serve chunks to peers."""
    sharing = _sharing(settings)
    listener = _listen(state, stack)
    tasks = await stack.enter_async_context(BackgroundTasks())
    gpus, driver = await asyncio.to_thread(_find_gpus, settings)
    launcher, fetcher = _launcher(
        settings, engine, listener, state, tasks, sharing, (gpus, driver.cdi_kind), stack
    )
    await fetcher.share()

    def totals(function: str) -> Totals:
        # The metrics are made below. The ledger calls this later, when it writes or shows usage.
        return metrics.totals(function)

    ledger = await _open_ledger(settings, state, totals, stack)
    functions = Functions(
        state.store, tasks, state.secrets, FunctionEvents(logged=state.logs.logged), state.logs, settings,
        _deploy_policies(settings, state.keyring),
    )  # fmt: skip
    revisions = Revisions(
        functions, state.folder / "environments", launcher, fetcher,
        await FunctionHistories.open(state.own_documents, tasks, ledger.account),
        Reconciler(GpuBookings(gpus, driver), settings.max_workers, state.keyring.max_workers, settings.drain_s),
        Dialects(load(DIALECTS, settings.plugins).values()),
    )  # fmt: skip
    stack.callback(revisions.threads.close)
    retirements = Retirements(functions, revisions)
    rollouts = Rollouts(functions, revisions, retirements)
    metrics = Metrics(
        functions.worker_counts, tasks.failures, [fetcher.metrics.readings], lambda: state.logs.files.dropped
    )
    metrics.readers += [
        functions.readings, state.keyring.readings, ledger.readings, state.readings, revisions.reconciler.gpus.readings,
        revisions.reconciler.readings,
    ]  # fmt: skip
    memory = observe(revisions, metrics, ledger, state.keyring, settings, stack)
    recorder = open_recorder(functions, state.folder / "records", stack)
    return RunningNode(functions, revisions, retirements, rollouts, metrics, ledger, memory, recorder)


def _deploy_policies(settings: GatewaySettings, keyring: Keyring) -> DeployPolicies:
    """Return the policies for deploys. Raise PackageMissing if signatures are required and cannot be checked."""
    if settings.snapshot_signers:
        require({"The setting snapshot_signers": "cryptography"})
    gateway = DeployPolicy(
        kind=settings.policy_kind, networks=settings.policy_networks, images=settings.policy_images,
        snapshots=settings.policy_snapshots, queues=settings.policy_queues, gpus=settings.policy_gpus,
        memory_mb=settings.policy_memory_mb, cpus=settings.policy_cpus,
    )  # fmt: skip
    return DeployPolicies(
        gateway, keyring.policy, settings.snapshot_identity,
        Addresses.of(settings.snapshot_networks), Addresses.of(settings.queue_networks), settings.snapshot_signers,
    )  # fmt: skip


def _listen(state: State, stack: contextlib.AsyncExitStack) -> Listener:
    """Open the socket to which zygotes and workers connect."""
    listener = Listener(state.folder / "run" / "link.sock")
    listener.open()
    stack.callback(listener.close)
    return listener


def _launcher(
    settings: GatewaySettings, engine: str | None, listener: Listener, state: State, tasks: BackgroundTasks,
    sharing: Sharing | None, gpus: tuple[Sequence[Gpu], str], stack: contextlib.AsyncExitStack,
) -> tuple[LauncherByImage, FetcherClient]:  # fmt: skip
    budgets = Budgets(settings.cache_memory_mb, settings.cache_disk_mb)
    containers = ContainerLauncher(engine, listener, tasks, str(state.folder), LOG.warning, budgets, *gpus)
    launcher = LauncherByImage(ProcessLauncher(listener, tasks, state.folder, settings.cache_dir), containers)
    fetcher = FetcherClient(settings.cache_dir, tasks, budgets, sharing)
    # `stack` closes the launcher first, because its containers have folders of the fetcher's cache mounted.
    for close in (fetcher.close, launcher.close):
        stack.push_async_callback(close)
    return launcher, fetcher


def _sharing(settings: GatewaySettings) -> Sharing | None:
    """Return how this node exchanges chunks of snapshots with its peers, or None if it has no peers.

    Raise GatewayError if the port for peers is taken.
    """
    if not settings.peers or settings.peers_token is None:
        return None
    try:
        # Check the port here, before the gateway has started anything. Later, the fetcher binds it again.
        bind(settings.host, settings.peers_port).close()
    except GatewayError as error:
        raise GatewayError(error.message, remedy="Choose another PILOTFLAME_PEERS_PORT.") from None
    certificate = None
    if settings.peers[0].startswith("https:") and settings.tls_cert is not None:
        certificate = (str(settings.tls_cert), str(settings.tls_key))
    token = settings.peers_token.get_secret_value()
    return Sharing(settings.host, settings.peers_port, settings.peers, token, certificate)


def _find_gpus(settings: GatewaySettings) -> tuple[list[Gpu], GpuDriver]:
    """Return the GPUs on which workers are placed, and their driver."""
    driver = find_driver()
    if settings.gpus is None:
        return driver.find(), driver
    pairs = (text.split(":") for text in settings.gpus)
    return [Gpu(name, int(memory_mb)) for name, memory_mb in pairs], driver


async def _open_ledger(
    settings: GatewaySettings, state: State, totals: Callable[[str], Totals], stack: contextlib.AsyncExitStack
) -> Ledger:
    """Open the accounts of the functions. `totals` returns a function's counts from the metrics."""
    memory = settings.price_memory_gb_hour
    prices = Prices(memory, round(memory * DISK_SHARE, 12), settings.price_device_hour)
    store = UsageStore(state.folder / "usage.sqlite3")
    fresh = state.members is not None and not state.members.first
    ledger = Ledger(store, prices, totals, settings.currency, fresh=fresh)
    await asyncio.to_thread(ledger.open)
    stack.push_async_callback(ledger.close)
    return ledger
