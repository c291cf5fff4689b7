"""The client `AzureOpenAI` of PyPI against a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from live import gateway_here, short_folder

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")
WRITER = """
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest):
    for word in ("It ", "rains."):
        yield Delta(text=word, tokens=[1])
    yield Delta(finish_reason="stop", usage={"prompt_tokens": 3})
"""
ENCODER = """
from pilotflame import EmbeddingRequest

def handler(event: EmbeddingRequest):
    return {"embedding": [[1.0, 2.0] for _ in event.text], "tokens": 2}
"""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Rain?"}]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def azure() -> AsyncIterator[Any]:
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            await gateway.deploy(WRITER, name="writer")
            await gateway.deploy(ENCODER, name="encoder")
            async with gateway.at_home() as home:
                made = await home.post("/v1/keys", json={"name": "azure", "scopes": ["invoke"]})
            url, key = str(gateway.client.base_url).rstrip("/"), made.json()["key"]
            async with openai.AsyncAzureOpenAI(
                azure_endpoint=url, api_version="2024-10-21", api_key=key, max_retries=0
            ) as client:
                yield client


async def test_a_chat_whole_and_as_a_stream(azure: Any) -> None:
    answer = await azure.chat.completions.create(model="writer", **CHAT)
    assert answer.choices[0].message.content == "It rains."
    stream = await azure.chat.completions.create(model="writer", **CHAT, stream=True)
    said = [chunk.choices[0].delta.content async for chunk in stream]
    assert "".join(filter(None, said)) == "It rains."


async def test_the_deployment_of_the_address_answers_whatever_the_model(azure: Any) -> None:
    reply = await azure.post(
        "/deployments/writer/completions", body={"prompt": "A", "model": "gpt-4o"}, cast_to=object
    )
    assert reply["choices"][0]["text"] == "It rains."


async def test_embeddings(azure: Any) -> None:
    found = await azure.embeddings.create(model="encoder", input=["a", "b"])
    assert [one.embedding for one in found.data] == [[1.0, 2.0]] * 2


async def test_errors(azure: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await azure.chat.completions.create(model="gone", **CHAT)
    assert missing.value.code == "DeploymentNotFound"
    assert missing.value.body["remedy"]
    with pytest.raises(openai.AuthenticationError):
        await azure.chat.completions.create(model="writer", **CHAT, extra_headers={"api-key": "wrong"})
    # The routes below /v1, Azure's newer address, read the key in the header `api-key`, too.
    newer: Any = await azure.get("/v1/models", cast_to=object)
    assert [model["id"] for model in newer["data"]] == ["encoder", "writer"]
