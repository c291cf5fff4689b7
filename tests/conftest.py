"""Fixtures for tests with real gateways: one gateway per module, and gates for handlers."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import httpx
import hypothesis
import pytest
import pytest_asyncio
import uvloop
from browser import REQUIRED as BROWSER_REQUIRED
from containers import REQUIRED as CONTAINERS_REQUIRED
from live import Function, Gate, Gateway, gateway_here, short_folder
from pilotflame.snapshot.caching.memory import unmount
from pilotflame.snapshot.caching.stored import is_mounted

# Half of hypothesis' default number of examples keeps CI short. PILOTFLAME_TEST_EXAMPLES draws more.
# No example has a deadline of its own: on a machine that others use, any of them may take long.
hypothesis.settings.register_profile(
    "house",
    max_examples=int(os.environ.get("PILOTFLAME_TEST_EXAMPLES", "50")),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("house")


def pytest_report_header() -> str:
    containers = "required" if CONTAINERS_REQUIRED else "skipped where podman is missing"
    return f"containers: {containers}; browser: {'required' if BROWSER_REQUIRED else 'skipped where Chromium is missing'}"


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests on the event loop that the gateway uses."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture(scope="session", autouse=True)
def _memory_given_back() -> Iterator[None]:
    """Remove the cache tiers in shared memory that tests have left."""
    shared = Path("/dev/shm")
    # Another test process may still use its tiers; fetchers sweep unused ones later.
    if "PYTEST_XDIST_WORKER" in os.environ:
        yield
        return
    before = set(shared.glob(f"pilotflame-{os.getuid()}-*"))
    yield
    for root in set(shared.glob(f"pilotflame-{os.getuid()}-*")) - before:
        if any(is_mounted(folder) for folder in root.glob("snapshots/*")):
            # A container of another test session uses it.
            continue
        if root.is_mount():
            unmount(root)
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def state() -> Any:
    """A path for one gateway's state folder, short enough for a unix socket; it does not exist yet."""
    with short_folder() as folder:
        yield folder / "state"


@pytest_asyncio.fixture(loop_scope="module")
async def gate() -> AsyncIterator[Gate]:
    with short_folder() as folder:
        async with Gate(folder / "gate") as found:
            yield found


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """One gateway on the module's event loop. The module needs `pytestmark = pytest.mark.asyncio(loop_scope="module")`."""
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0) as found:
            yield found


@pytest_asyncio.fixture(loop_scope="module")
async def deploy(gateway: Gateway) -> AsyncIterator[Callable[..., Any]]:
    """`await deploy(handler_source, settings, files=…, gate=…)` deploys a function and deletes it after the test."""
    functions: list[Function] = []

    async def deployed(handler: str, settings: Mapping[str, Any] | None = None, **how: Any) -> Function:
        functions.append(await gateway.deploy(handler, settings, **how))
        return functions[-1]

    yield deployed
    for name in {function.name for function in functions}:
        await gateway.client.delete(f"/v1/functions/{name}")


@pytest.fixture
def client(gateway: Gateway) -> httpx.AsyncClient:
    return gateway.client
