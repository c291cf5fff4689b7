"""Tests of a launcher: zygotes, the workers that are forked from them, secrets, failures and ends."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import pytest
from pilotflame.errors import HandlerError, LauncherError
from pilotflame.runtime.calls.link.child import Child, EndCause
from pilotflame.runtime.calls.link.worker_spec import WorkerSpec
from pilotflame.runtime.ground.telemetry.logs import LogChannel
from pilotflame.runtime.node.launching.launcher import NO_SECRETS, Launcher, WorkerSource

WAIT_S = 60.0
ECHO = "def handler(event):\n    return event\n"
SECRET = "import os\nassert os.environ.get('TOKEN') == 'hush', 'no token'\n" + ECHO


@asynccontextmanager
async def launched(
    launcher: Launcher,
    spec: WorkerSpec,
    on_death: Callable[[], None] = lambda: None,
    secrets: Mapping[str, str] = NO_SECRETS,
) -> AsyncIterator[WorkerSource]:
    """Launch a revision. At the end, end its zygote and forget it."""
    source = await launcher.launch(spec, LogChannel(), on_death, secrets)
    yield source
    source.close()
    await source.wait_closed(WAIT_S)
    assert not source.alive
    await launcher.forget(spec)


async def forked(source: WorkerSource, name: str) -> Child:
    """Return a new worker whose link is read, so that it is closed at the worker's end."""
    child = await source.fork(name, LogChannel())
    child.link.bind(lambda _frame: None, lambda: None)
    return child


async def killed(child: Child) -> None:
    """Kill a worker, and wait for its end."""
    child.kill()
    await child.wait_gone(WAIT_S)
    assert child.gone.is_set()


class LauncherTests:
    """Tests of a `Launcher`.

    Needs the fixtures `launcher`, which also closes it, and `make_spec`: `make_spec(source)` writes handler.py to a new folder
    and returns the WorkerSpec of a revision with this code. Both belong to the event loop of the test.
    """

    async def test_workers_are_forked_and_killed(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec]
    ) -> None:
        spec = make_spec(ECHO)
        await launcher.prepare(spec)
        async with launched(launcher, spec) as source:
            assert source.alive
            assert source.facts["entry"] == "handler.py:handler"
            first, second = await forked(source, "w1"), await forked(source, "w2")
            assert len({first.pid, second.pid, os.getpid()}) == 3
            await killed(first)
            assert await first.cause() == EndCause("signal 9 (SIGKILL)")
            assert source.alive
            assert not second.gone.is_set()
            await killed(second)

    async def test_a_stuck_worker_is_killed_with_a_reason(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec]
    ) -> None:
        async with launched(launcher, make_spec(ECHO)) as source:
            child = await forked(source, "w1")
            child.kill_stuck("it does not answer")
            await child.wait_gone(WAIT_S)
            assert (await child.cause()).text.endswith("sent by the gateway because it does not answer")

    async def test_the_death_of_a_zygote_is_reported(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec]
    ) -> None:
        died = asyncio.Event()
        async with launched(launcher, make_spec(ECHO), died.set) as source:
            if source.zygote_pid is None:
                pytest.skip("the launcher spawns workers")
            os.kill(source.zygote_pid, signal.SIGKILL)
            async with asyncio.timeout(WAIT_S):
                await died.wait()
            assert not source.alive
            with pytest.raises(LauncherError):
                await source.fork("w1", LogChannel())

    async def test_a_handler_has_its_secrets_when_it_is_imported(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec]
    ) -> None:
        async with launched(launcher, make_spec(SECRET), secrets={"TOKEN": "hush"}) as source:
            assert source.alive
            # Another revision does not get these secrets.
            with pytest.raises(HandlerError, match="no token"):
                await launcher.launch(make_spec(SECRET), LogChannel(), lambda: None)
        assert "TOKEN" not in os.environ

    async def test_a_handler_that_cannot_be_imported_is_an_error_of_the_handler(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec]
    ) -> None:
        with pytest.raises(HandlerError, match="no_such_module"):
            await launcher.launch(make_spec("import no_such_module\n"), LogChannel(), lambda: None)
        async with launched(launcher, make_spec(ECHO)) as source:
            assert source.alive

    async def test_a_process_that_dies_while_it_is_launched_is_an_error(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec]
    ) -> None:
        spec = make_spec("import os\nos._exit(3)\n")
        with pytest.raises((LauncherError, HandlerError)):
            await launcher.launch(spec, LogChannel(), lambda: None)

    async def test_closing_ends_all_processes(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec]
    ) -> None:
        source = await launcher.launch(make_spec(ECHO), LogChannel(), lambda: None)
        child = await forked(source, "w1")
        await launcher.close()
        await child.wait_gone(WAIT_S)
        assert child.gone.is_set()
        assert not source.alive
        assert launcher.base_pids() == []
        with pytest.raises(LauncherError):
            await launcher.launch(make_spec(ECHO), LogChannel(), lambda: None)

    @pytest.mark.parametrize("prepared", [False, True])
    async def test_closing_ends_a_launch(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec], prepared: bool
    ) -> None:
        spec = make_spec(ECHO)
        if prepared:
            await launcher.prepare(spec)
        launching = asyncio.create_task(launcher.launch(spec, LogChannel(), lambda: None))
        # Let the launch run until it waits for another process.
        await asyncio.sleep(0)
        await launcher.close()
        with pytest.raises(LauncherError):
            await launching
        assert launcher.base_pids() == []
