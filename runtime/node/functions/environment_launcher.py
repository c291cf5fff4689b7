"""Launches a revision in its Python environment, which is built before the launch if it is missing."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from ...calls.link.worker_spec import WorkerSpec
from ...ground.telemetry.logs import Log
from ..launching.launcher import NO_SECRETS, RevisionLauncher, WorkerSource
from ..packaging.environment import WriteLine, ensure_environment, present_python


class EnvironmentLauncher(RevisionLauncher):
    """Launches one revision with `launcher`. Before the launch, it builds the revision's Python environment, if there
    is none yet.
    """

    def __init__(
        self, launcher: RevisionLauncher, root: Path, requirements_of: Callable[[WorkerSpec], str],
        in_thread: Callable[[Callable[[], Path]], Awaitable[Path]],
    ) -> None:  # fmt: skip
        """`root` holds the environments. `requirements_of` reads the requirements of a revision from its code.

        `in_thread` runs a function that may take minutes in a thread.
        """
        self._launcher, self._root = launcher, root
        self._requirements_of, self._in_thread = requirements_of, in_thread
        self._present: WorkerSpec | None = None

    async def launch(
        self, spec: WorkerSpec, logs: Log, on_death: Callable[[], None],
        secrets: Mapping[str, str] = NO_SECRETS,
    ) -> WorkerSource:  # fmt: skip
        loop = asyncio.get_running_loop()

        def log(text: str) -> None:
            loop.call_soon_threadsafe(logs.write, "gateway", text)

        return await self._launcher.launch(await self._resolved(spec, log), logs, on_death, secrets)

    async def prepare(self, spec: WorkerSpec) -> None:
        await self._launcher.prepare(await self._resolved(spec, lambda _text: None))

    async def forget(self, spec: WorkerSpec) -> None:
        await self._launcher.forget(self._present or spec)

    async def _resolved(self, spec: WorkerSpec, log: WriteLine) -> WorkerSpec:
        """Return `spec` with the Python that runs the revision now. Return the same object in each call, because the
        launcher identifies a spec by its id.
        """
        recorded = Path(spec.python)
        if recorded == Path(sys.executable):
            return spec
        requirements = await asyncio.to_thread(self._requirements_of, spec)
        python = await asyncio.to_thread(present_python, self._root, recorded, requirements)
        if python is None:
            python = await self._in_thread(lambda: ensure_environment(self._root, requirements, log))
        if self._present is None:
            self._present = spec.model_copy(update={"python": str(python)})
        return self._present
