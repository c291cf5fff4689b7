"""Fixtures for tests with real gateways: one gateway per module, and gates for handlers."""

from __future__ import annotations

import asyncio
import functools
import gc
import os
import ssl
from asyncio.base_events import BaseEventLoop
from asyncio.unix_events import _UnixSelectorEventLoop
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
# Tests have no GPU, also on a machine with GPUs. `make bench-gpu` runs test_cuda.py with a GPU.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import httpx
import httpx._transports.default as httpx_transports
import hypothesis
import pytest
import pytest_asyncio
import round_robin
import slow_suites
import uvloop
from browser import REQUIRED as BROWSER_REQUIRED
from containers import REQUIRED as CONTAINERS_REQUIRED
from example_count import DRAWN
from live import Function, Gate, Gateway, gateway_here, give_memory_back, short_folder

pytest_plugins = ["fast_first", "postgres"]

# Rewrite the assertions of these modules too, so that pytest shows the values when they fail.
pytest.register_assert_rewrite(
    "blobs_tests", "device_tests", "job_store_machine", "job_store_tests", "launcher_tests", "source_tests"
)

# Half of hypothesis' default number of examples keeps CI short. PILOTFLAME_TEST_EXAMPLES draws more, also in the tests that draw fewer (example_count.py).
# No example has a deadline of its own: on a machine with other load, any example may take long.
# `make mutants` only counts failures. It uses the profile without shrinking, because shrinking takes longer
# than the test.
hypothesis.settings.register_profile(
    "house",
    max_examples=DRAWN,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "no-shrinking",
    hypothesis.settings.get_profile("house"),
    phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
)
hypothesis.settings.load_profile("house")


# The files that take 50 s and more in CI, the longest first.
LONGEST = (
    "test_environments.py", "test_cli.py", "test_topic.py", "test_how_to.py", "test_templates.py", "test_fetcher_client.py",
    "test_engine_process.py", "test_container_launcher.py", "test_console_browser.py", "test_compiled.py", "test_hostile_http.py",
    "test_standalone.py", "test_consumer.py", "test_snapshot_prefixes.py", "test_other_clients.py", "test_snapshot_record.py",
    "test_parking.py", "test_declared_prefixes.py", "test_gpu_bookings.py", "test_main.py", "test_house.py", "test_compose.py",
    "test_image_engine.py", "test_other_runtimes.py", "test_examples.py", "test_entry_points.py", "test_model_template.py", "test_soak.py",
)  # fmt: skip


def pytest_report_header() -> list[str]:
    suites = "; ".join(_left_out()) or "none"
    containers = "required" if CONTAINERS_REQUIRED else "skipped where podman is missing"
    browser = "required" if BROWSER_REQUIRED else "skipped where Chromium is missing"
    found = [f"containers: {containers}; browser: {browser}", f"slow suites that are left out: {suites}"]
    return found if round_robin.GATEWAYS == 1 else [*found, f"gateways: {round_robin.GATEWAYS}"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Exclude the objects of the collection (about a million) from garbage collection, which took 6 of the collection's 19 seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Leave out the slow suites whose paths have not changed."""
    return any(slow_suites.is_of(collection_path, tests) for tests in _left_out().values()) or None


@functools.cache
def _left_out() -> Mapping[str, list[str]]:
    return slow_suites.unchanged()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start the longest files first: otherwise one process still runs a long file when all others have finished.

    With several gateways, deselect the tests that need a single gateway.
    """
    if left := [item for item in items if round_robin.why_one(item.nodeid)]:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]
    if "PYTEST_XDIST_WORKER" in os.environ:
        ranks = {name: rank for rank, name in enumerate(LONGEST)}
        items.sort(key=lambda item: ranks.get(item.path.name, len(ranks)))


@functools.cache
def _certificates(trust_env: bool, _file: str | None, _folder: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=trust_env)


def _ssl_context(
    verify: ssl.SSLContext | str | bool = True, cert: Any = None, trust_env: bool = True
) -> ssl.SSLContext:
    """Return the SSL context that httpx would create.

    Its creation reads all certificates of the machine, which takes 60 ms, so the clients share one
    context.
    """
    if verify is not True or cert is not None:
        return httpx.create_ssl_context(verify, cert, trust_env)
    return _certificates(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


httpx_transports.create_ssl_context = _ssl_context


class _Loop(uvloop.Loop):
    """The gateway's event loop, except that it starts processes by vfork, as asyncio's own loop does.

    uvloop forks, which copies the page tables. That is slow, because pytest's processes are large.
    """

    _debug = False
    subprocess_exec = BaseEventLoop.subprocess_exec  # type: ignore[assignment]
    _make_subprocess_transport = _UnixSelectorEventLoop._make_subprocess_transport  # type: ignore[attr-defined]
    _child_watcher_callback = _UnixSelectorEventLoop._child_watcher_callback  # type: ignore[attr-defined]


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run async tests on `_Loop`."""
    return {"uvloop": _Loop}


@pytest.fixture(scope="session", autouse=True)
def _database_of_several(request: pytest.FixtureRequest) -> None:
    """Start a PostgreSQL server if PILOTFLAME_TEST_GATEWAYS asks for several gateways."""
    if round_robin.GATEWAYS > 1:
        round_robin.use(request.getfixturevalue("postgres").url)


@pytest.fixture(scope="session", autouse=True)
def _memory_given_back(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the caches in shared memory that tests with `tmp_path` have left."""
    yield
    give_memory_back(tmp_path_factory.getbasetemp())


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
