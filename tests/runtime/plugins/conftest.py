"""Foreign handlers, unchanged: deployed from the folders of `tests/examples`, or resolved and called in the test."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live import Function, Gateway
from pilotflame.handlers.contract import Context
from pilotflame.handlers.handler import Handler, HandlerKind
from pilotflame.handlers.recognise import installed_dialects
from pilotflame.handlers.resolve import resolve

EXAMPLES = Path(__file__).parents[2] / "examples"
PLATFORMS = ("runpod", "cog")


@pytest_asyncio.fixture(loop_scope="module")
async def deploy_folder(gateway: Gateway) -> AsyncIterator[Callable[..., Any]]:
    """`await deploy_folder("runpod-plain", **overrides)` deploys a function until the test ends."""
    functions: list[Function] = []

    async def deployed(folder: str, **overrides: Any) -> Function:
        order = {"path": str(EXAMPLES / folder), "overrides": {"name": folder, **overrides}}
        response = await gateway.client.post("/v1/functions", json=order)
        assert response.status_code == 201, response.text
        functions.append(gateway.function(response.json()["name"], response.json()))
        return functions[-1]

    yield deployed
    for function in functions:
        await gateway.client.delete(f"/v1/functions/{function.name}")


class Host:
    """Stands for a worker, and records what the handler asks it to do."""

    def __init__(self) -> None:
        self.progressed: list[Any] = []
        self.measured: list[Any] = []
        self.retired = 0
        self.sizes: list[int] = []

    def progress(self, channel: int, value: Any) -> None:
        self.progressed.append(value)

    def metrics(self, channel: int, values: Any) -> None:
        self.measured.append(values)

    def retire(self) -> None:
        self.retired += 1

    def resize(self, concurrency: int) -> None:
        self.sizes.append(concurrency)


class Resolved:
    """A resolved handler, and a worker for it."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.host = Host()
        self.state: Any = None

    def set_up(self) -> Any:
        assert self.handler.setup is not None
        self.state = self.handler.setup(Context("tone", "r1", host=self.host))
        if asyncio.iscoroutine(self.state):
            self.state = asyncio.run(self.state)
        return self.state

    def __call__(self, event: Any = None, *, about: dict[str, Any] | None = None, bare: bool = False) -> Any:
        """Return the output, or the list of streamed pieces."""
        extra = {"job": about, "bare": bare}
        context = Context("tone", "r1", invocation_id="i1", state=self.state, host=self.host, extra=extra)
        given = self.handler.call(event, context)
        if self.handler.kind is HandlerKind.GENERATOR:
            return list(given)
        return asyncio.run(_all(given)) if self.handler.kind.on_loop else given


async def _all(given: Any) -> Any:
    return [piece async for piece in given] if hasattr(given, "__aiter__") else await given


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo imports of foreign files, and hide the platforms' packages even if they are installed."""
    cwd, before, environ = Path.cwd(), dict(sys.modules), dict(os.environ)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    for name in before:
        if name.partition(".")[0] in PLATFORMS:
            del sys.modules[name]

    def absent(name: str) -> Any:
        found = importlib.util.find_spec(name)
        hidden = found is None or "site-packages" in str(found.origin)
        return None if hidden else found

    monkeypatch.setattr("pilotflame.handlers.stand_in.find_spec", absent)
    yield
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    for name in set(sys.modules) - set(before):
        if name.partition(".")[0] in PLATFORMS or not name.startswith("pilotflame"):
            del sys.modules[name]
    sys.modules.update(
        {name: before[name] for name in before if name.partition(".")[0] in (*PLATFORMS, "__main__")}
    )


@pytest.fixture
def made(alone: None, tmp_path: Path) -> Callable[..., Resolved]:
    """`made("handler.py", source, **{"other.py": …})` writes these files and resolves the handler as a zygote does."""

    def make(reference: str, source: str, **others: str) -> Resolved:
        folder = tmp_path / "tone"
        for name, text in {
            reference.split(":")[1] if ":" in reference else reference: source,
            **others,
        }.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        dialects = installed_dialects()
        entry = dialects.recognise(folder, reference if ":" in reference else "handler.py")
        return Resolved(resolve(folder, entry.reference, "tone", dialects.resolver(entry)))

    return make
