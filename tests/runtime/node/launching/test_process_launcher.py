"""The launcher of processes fulfils the contract of launchers, also behind the launcher that chooses by image."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from launcher_tests import ECHO, LauncherTests, forked, launched
from pilotflame.errors import HandlerImportError, LauncherError
from pilotflame.runtime.calls.link.worker_spec import Confinement, WorkerSpec
from pilotflame.runtime.ground.telemetry.background import BackgroundTasks
from pilotflame.runtime.node.launching import process_launcher
from pilotflame.runtime.node.launching.confinements import Confinements
from pilotflame.runtime.node.launching.container_launcher import ContainerLauncher
from pilotflame.runtime.node.launching.launcher import Launcher, LauncherByImage
from pilotflame.runtime.node.launching.listener import Listener
from pilotflame.runtime.node.launching.process_launcher import ProcessLauncher


@pytest.fixture
def make_spec(tmp_path: Path) -> Callable[[str], WorkerSpec]:
    def make(source: str) -> WorkerSpec:
        code = tmp_path / f"code-{len([*tmp_path.iterdir()])}"
        code.mkdir()
        (code / "handler.py").write_text(source)
        return WorkerSpec(function="tone", revision=f"1-{code.name}", code=code)

    return make


async def fails_to_start(_self: object, _python: str, _preload: tuple[str, ...]) -> Any:
    raise LauncherError("half of a package is there")


class TestProcessLauncher(LauncherTests):
    def made(self, listener: Listener, tasks: BackgroundTasks, state: Path) -> Launcher:
        return ProcessLauncher(listener, tasks, state, state / "cache")

    async def test_a_base_that_a_launch_is_about_to_use_is_not_unused(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory becomes short while the launch makes the confinement of its first process. The base must not end."""
        first, second = make_spec(ECHO), make_spec(ECHO)
        await launcher.prepare(first)
        make = Confinements.make

        def made(self: Confinements, spec: WorkerSpec) -> Confinement:
            loop.call_soon_threadsafe(launcher.end_unused)
            return make(self, spec)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(Confinements, "make", made)
        async with launched(launcher, second) as source:
            assert (await forked(source, "w1")).pid

    @pytest.mark.parametrize(
        ("failure", "named"),
        [
            ('os.environ["MODEL_HOME"]', True),
            ('os.environ["GIVEN_HOME"]', False),
            ('os.environ["_"]', False),
            ('os.environ.get("MODEL_HOME") + 1', False),
            ("{}[\"KeyError: 'MODEL_HOME'\"]", False),
            ("exec('raise ValueError(\"KeyError: \\\\\\'MODEL_HOME\\\\\\'\")')", False),
        ],
    )
    async def test_a_failed_import_names_only_the_dropped_variable_that_it_lacks(
        self,
        launcher: Launcher,
        make_spec: Callable[[str], WorkerSpec],
        monkeypatch: pytest.MonkeyPatch,
        failure: str,
        named: bool,
    ) -> None:
        for name in ("MODEL_HOME", "GIVEN_HOME", "OTHER_HOME", "_"):
            monkeypatch.setenv(name, "/models")
        spec = make_spec(
            f"import os\nfor _ in 'OTHER_HOME',:\n    os.environ.pop('GIVEN_HOME', 0)\n    {failure}\n"
        )
        with pytest.raises(HandlerImportError) as caught:
            async with launched(launcher, spec.model_copy(update={"env": {"GIVEN_HOME": "/own"}})):
                pass
        inherited = "Functions do not inherit MODEL_HOME of the gateway: set env in pilotflame.toml."
        assert (inherited in caught.value.remedy) is named
        assert caught.value.remedy.count("not inherit") == named

    async def test_a_base_that_dies_at_its_start_says_its_last_line(
        self,
        launcher: Launcher,
        make_spec: Callable[[str], WorkerSpec],
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho Traceback >&2\necho 'No module named pilotflame' >&2\nexit 3\n")
        python.chmod(0o755)
        with pytest.raises(LauncherError, match="ended with code 3 before it was ready") as caught:
            await launcher.prepare(make_spec(ECHO).model_copy(update={"python": str(python)}))
        assert "No module" not in str(caught.value)
        assert "before it was ready: No module named pilotflame." in caught.value.whole.message
        assert "base: Traceback" in caplog.text

    async def test_packages_that_are_installed_make_a_new_base(
        self, launcher: Launcher, make_spec: Callable[[str], WorkerSpec], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first, second = make_spec(ECHO), make_spec(ECHO)
        async with launched(launcher, first) as source:
            (old,) = launcher.base_pids()
            await launcher.prepare(second)
            assert launcher.base_pids() == [old]
            starting = ProcessLauncher._start_base
            monkeypatch.setattr(process_launcher, "_installed", lambda _python: 7)
            monkeypatch.setattr(ProcessLauncher, "_start_base", fails_to_start)
            await launcher.prepare(second)
            assert launcher.base_pids() == [old]
            monkeypatch.setattr(ProcessLauncher, "_start_base", starting)
            monkeypatch.setattr(process_launcher, "_installed", lambda _python: 8)
            await launcher.prepare(second)
            # `base_pids` lists the old base as long as it has children.
            new, last = launcher.base_pids()
            assert new != last == old
            # Zygotes of the old base still fork workers.
            assert (await forked(source, "w1")).pid
        launcher.end_unused()

    @pytest_asyncio.fixture
    async def launcher(self, state: Path) -> AsyncIterator[Launcher]:
        state.mkdir()
        listener = Listener(state / "run" / "link.sock")
        listener.open()
        async with BackgroundTasks() as tasks:
            launcher = self.made(listener, tasks, state)
            yield launcher
            await launcher.close()
            listener.close()
        assert tasks.failures == {}


class TestLauncherByImage(TestProcessLauncher):
    def made(self, listener: Listener, tasks: BackgroundTasks, state: Path) -> Launcher:
        containers = ContainerLauncher(f"unix://{state}/none.sock", listener, tasks, str(state), print)
        return LauncherByImage(super().made(listener, tasks, state), containers)


def test_an_installation_changes_what_a_base_has_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda _kind: str(tmp_path))
    before = process_launcher._installed(sys.executable)
    os.utime(tmp_path, ns=(1, 1))
    (tmp_path / "new_package").mkdir()
    assert process_launcher._installed(sys.executable) != before
    assert process_launcher._installed("/other/python") == 0
    monkeypatch.setattr("importlib.metadata.version", lambda _name: "9.9")
    assert process_launcher._installed(sys.executable) == 0
    monkeypatch.undo()
    # Some Pythons name a folder that does not exist.
    monkeypatch.setattr("sysconfig.get_path", lambda _kind: str(tmp_path / "none"))
    assert process_launcher._installed(sys.executable) == 0
