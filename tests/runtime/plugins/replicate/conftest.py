"""Functions for Replicate's clients, and a gateway with API keys."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest_asyncio
from live import Function, Gateway, gateway_here, short_folder

PREDICT = """
import gate, io
from typing import Iterator
from cog import BasePredictor, Input, Path
class Predictor(BasePredictor):
    def predict(self, text: str, image: Path = Input(default=None), times: int = Input(default=1, ge=1, le=3)) -> str:
        if text == "raise":
            raise ValueError("no such text")
        if text.startswith("wait"):
            gate.wait(text)
        return text * times + (image.read_text() + image.suffix if image else "")
"""
STREAM = """
from cog import BasePredictor, ConcatenateIterator
class Predictor(BasePredictor):
    def predict(self, text: str) -> ConcatenateIterator[str]:
        for word in text.split():
            yield word + "\\n "
        if "raise" in text:
            raise ValueError("in the middle")
"""
FILES = """
from cog import BasePredictor, Path
class Predictor(BasePredictor):
    def predict(self) -> Path:
        path = Path("out.txt")
        path.write_text("from a file")
        return path
"""


@pytest_asyncio.fixture(loop_scope="module")
async def predictor(gateway: Gateway) -> AsyncIterator[Callable[..., Any]]:
    """`await predictor(source, gate=…)` deploys a predictor until the test ends."""
    functions: list[Function] = []

    async def deployed(source: str = PREDICT, **how: Any) -> Function:
        settings = how.pop("settings", None)
        functions.append(await gateway.deploy(None, settings, files={"predict.py": source}, **how))
        return functions[-1]

    yield deployed
    for function in functions:
        await gateway.client.delete(f"/v1/functions/{function.name}")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    """A gateway that requires keys; its client is an administrator."""
    with short_folder() as folder:
        async with gateway_here(
            folder / "state", drain_s=5.0, auth="always", webhook_networks=("127.0.0.0/8",)
        ) as found:
            found.client.headers["Authorization"] = f"Bearer {await new_key(found, scopes=['admin'])}"
            yield found


async def new_key(gateway: Gateway, **wanted: Any) -> str:
    async with gateway.at_home() as home:
        response = await home.post("/v1/keys", json={"name": "k", **wanted})
        return str(response.json()["key"])


@pytest_asyncio.fixture(loop_scope="module")
async def key(gateway: Gateway) -> Callable[..., Any]:
    """`await key(functions=…)` creates an API key with the scope invoke and returns its token."""

    async def created(**wanted: Any) -> str:
        return await new_key(gateway, **wanted)

    return created
