"""Deploys that install requirements: the environment of a function, and the service of other callers during a build."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from live import LIMIT_S, gateway_here, gone, until
from pilotflame.runtime.node.functions.revisions import DEPLOY_THREADS
from pilotflame.runtime.node.functions.store import Store
from pilotflame.runtime.node.packaging import environment
from pilotflame.runtime.node.packaging.requirements import requirements_digest
from wheels import write_wheel

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a function's folder. One of its requirements is only in an index in a folder."""
    (tmp_path / "index").mkdir()
    write_wheel(tmp_path / "index", "tinything", "1.0", "SIZE = 'tiny'\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    folder = tmp_path / "small"
    folder.mkdir()
    source = "import sys, tinything, pydantic\ndef handler(event):\n    return [tinything.SIZE, sys.prefix]\n"
    (folder / "handler.py").write_text(source)
    (folder / "requirements.txt").write_text("tinything\npydantic\n")
    return folder


@contextlib.contextmanager
def installing(state: Path, folder: Path) -> Iterator[None]:
    """Within the block, deploys of the folder wait as if another deploy was building its environment."""
    key = environment._key(requirements_digest((folder / "requirements.txt").read_text()))
    (state / "environments").mkdir(exist_ok=True)
    with (state / "environments" / f"{key}.lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


async def test_a_function_runs_in_the_environment_of_its_requirements(state, small: Path, monkeypatch):
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setattr(environment, "CACHE_BYTES", 0)
    async with gateway_here(state) as gateway:
        body = {"path": str(small), "install": True}
        response = await gateway.client.post("/v1/functions", json=body)
        assert response.status_code == 201, response.text
        size, prefix = await gateway.function("small").answer()
        assert size == "tiny"
        assert prefix.startswith(str(gateway.state / "environments"))
        assert len(list((state / "environments").glob("py*/"))) == 1

        async def tidied() -> bool:
            return not gateway.server.node.retirements._ending

        await until(tidied, "the end of what follows the first deploy")
        read, environments = list[Store](), Store.environments
        monkeypatch.setattr(Store, "environments", lambda store: read.append(store) or environments(store))
        # The first deploy removes no revision, so it reads no record of another function. A deploy that fails may leave an
        # environment, so the next deploy reads the records to remove unused environments.
        for handler, reads in (("pass", 0), ("raise RuntimeError", 0), ("pass", 1)):
            response = await gateway.send(f"{handler}\ndef handler(event):\n    return event")
            assert (response.status_code == 201) == (handler == "pass")
            await until(tidied, "the end of what follows a deploy")
            assert len(read) == reads
        # The delete of the last function that needs the environment removes it, and what uv has downloaded for it.
        await gateway.client.delete("/v1/functions/small")
        assert list((state / "environments").glob("py*/")) == []
        assert list((state / "environments" / ".uv-cache").rglob("tinything.py")) == []


async def test_environments_are_built_again_where_the_state_folder_was_moved_or_they_are_missing(
    state, small: Path
):
    async with gateway_here(state) as gateway:
        body = {"path": str(small), "install": True}
        response = await gateway.client.post("/v1/functions", json=body)
        assert response.status_code == 201, response.text
    moved = state.with_name("moved")
    state.rename(moved)
    async with gateway_here(moved) as gateway:
        size, prefix = await gateway.function("small").answer()
        assert (size, prefix.startswith(f"{moved}/environments/py")) == ("tiny", True)
    (scripts,) = moved.glob("environments/py*/bin/activate")
    assert str(state) + "/" not in scripts.read_text()
    shutil.rmtree(moved / "environments")
    async with gateway_here(moved) as gateway:
        size, prefix = await gateway.function("small").answer()
        assert (size, prefix.startswith(f"{moved}/environments/py")) == ("tiny", True)


async def test_a_function_starts_while_all_threads_of_the_deploys_wait(state, small: Path, tmp_path: Path):
    other = shutil.copytree(small, tmp_path / "other")
    (other / "requirements.txt").write_text("tinything==1.0\n")
    async with gateway_here(state) as gateway:
        body = {"path": str(small), "install": True}
        assert (await gateway.client.post("/v1/functions", json=body)).status_code == 201
        function = gateway.function("small")
        with installing(state, other):
            body = {"path": str(other), "install": True}
            deploying = [
                asyncio.create_task(gateway.client.post("/v1/functions", json=body))
                for _ in range(DEPLOY_THREADS)
            ]

            async def waiting() -> bool:
                # One thread is reserved for other owners.
                return len(list((state / "staging").iterdir())) == DEPLOY_THREADS - 1

            await until(waiting, "deploys that wait")
            for role in ("zygote", "worker"):
                for pid in await function.pids(role):
                    os.kill(pid, signal.SIGKILL)
                    await gone(pid)
            async with asyncio.timeout(LIMIT_S):
                assert (await function.answer())[0] == "tiny"
            for task in deploying:
                task.cancel()
            await asyncio.gather(*deploying, return_exceptions=True)


async def test_a_deploy_whose_caller_leaves_while_files_are_prepared_leaves_nothing(state, small: Path):
    async with gateway_here(state) as gateway:
        staging = state / "staging"

        async def staged() -> bool:
            return any(staging.iterdir())

        async def left() -> bool:
            return not any(staging.iterdir())

        with installing(state, small):
            body = {"path": str(small), "install": True}
            deploying = asyncio.create_task(gateway.client.post("/v1/functions", json=body))
            await until(staged, "the staged folder")
            deploying.cancel()
            await asyncio.gather(deploying, return_exceptions=True)
        await until(left, "the end of the staged folder")
        assert (await gateway.client.get("/v1/functions/small")).status_code == 404


async def test_deploys_that_wait_keep_nobody_from_a_compressed_answer(state, small: Path):
    async with gateway_here(state) as gateway:
        function = await gateway.deploy("def handler(event):\n    return 'x' * 100_000")
        with installing(state, small):
            body = {"path": str(small), "install": True}
            deploying = [
                asyncio.create_task(gateway.client.post("/v1/functions", json=body)) for _ in range(40)
            ]

            async def waiting() -> bool:
                return any((state / "staging").iterdir())

            await until(waiting, "a deploy that waits")
            async with asyncio.timeout(LIMIT_S):
                response = await function.call(Accept_Encoding="gzip")
            assert response.headers["content-encoding"] == "gzip"
            for task in deploying:
                task.cancel()
            await asyncio.gather(*deploying, return_exceptions=True)
