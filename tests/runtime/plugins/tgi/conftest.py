"""A gateway with the model `llm` of the template `text-generation`, and with functions whose answers the request scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio
from live import Gateway, short_folder
from trained_model import deploy, gateway_of_engine

# Yields the deltas that the prompt has as JSON.
SCRIPTED = """
import json
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    for delta in json.loads(event.prompt):
        yield Delta(**delta)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scripted() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_of_engine(folder / "state", bare_paths=True) as gateway:
            await gateway.deploy(SCRIPTED, name="scripted")
            yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trained() -> AsyncIterator[Gateway]:
    """`llm` knows a text by heart."""
    with short_folder() as folder:
        async with gateway_of_engine(folder / "state") as gateway:
            await deploy(gateway, folder, "llm", ["make_weights.py"])
            yield gateway
