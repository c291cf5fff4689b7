"""OpenAI's routes at the paths of one function, and the list of models for Together's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from live import Gateway, gateway_here, short_folder

openai = pytest.importorskip("openai")
pytestmark = pytest.mark.asyncio(loop_scope="module")
GREETS = """
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    yield Delta(text="hel", tokens=[1])
    yield Delta(text="lo", tokens=[2], finish_reason="stop", usage={"prompt_tokens": 3, "completion_tokens": 2})
"""
ENCODES = """
from pilotflame import EmbeddingRequest

def handler(event: EmbeddingRequest):
    return {"embedding": [[1.0] for _ in event.text], "tokens": 1}
"""
RANKS = """
from pilotflame import RerankRequest

def handler(event: RerankRequest):
    return {"results": [{"index": 0, "score": 1.0}], "tokens": 1}
"""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BASES = ("/v2/greets/openai", "/tgi/greets")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models() -> AsyncIterator[Gateway]:
    """A gateway with a model of each kind."""
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            for name, handler in (("greets", GREETS), ("encodes", ENCODES), ("ranks", RANKS)):
                await gateway.deploy(handler, name=name)
            yield gateway


@pytest.mark.parametrize("base", BASES)
async def test_the_paths_of_one_function(models: Gateway, base: str) -> None:
    url = f"{str(models.client.base_url).rstrip('/')}{base}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        # The path names the function, so a caller who has another name for the model need not change it.
        answer = await client.chat.completions.create(model="someone/model-7b", **CHAT)
        assert (answer.choices[0].message.content, answer.model) == ("hello", "someone/model-7b")
        stream = await client.chat.completions.create(model="x", stream=True, **CHAT)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream]) == "hello"
        assert (await client.completions.create(model="x", prompt="Hi")).choices[0].text == "hello"
        assert [model.id async for model in client.models.list()] == ["greets"]
        assert (await client.models.retrieve("x")).id == "greets"
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(model="x", extra_body={"invented": 1}, **CHAT)
        assert caught.value.param == "invented"


async def test_a_path_with_a_function_needs_no_model(models: Gateway) -> None:
    answer = await models.client.post(f"{BASES[0]}/v1/chat/completions", json=CHAT)
    assert answer.json()["model"] == "greets"
    missing = await models.client.post("/v1/chat/completions", json=CHAT)
    assert missing.json()["error"]["param"] == "model"


@pytest.mark.parametrize("base", ["/v2/{}/openai", "/tgi/{}"])
async def test_a_path_with_a_function_that_is_no_such_model(models: Gateway, base: str) -> None:
    for name, status in (("gone", 404), ("encodes", 400)):
        answer = await models.client.post(f"{base.format(name)}/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, "model")


async def test_errors_of_other_routes_keep_their_form(models: Gateway) -> None:
    job = (await models.client.get("/v2/greets/status/job-none")).json()
    assert job["error"]["type"] == "unknown_job"
    assert "error_type" in (await models.client.post("/tgi/greets/generate", json={})).json()


@pytest.mark.parametrize(
    "agent", ["Together/v1 PythonBindings/1.6.0", "Together/Python 2.42.0", "AsyncTogether/Python 2.42.0"]
)
async def test_models_for_togethers_client(models: Gateway, agent: str) -> None:
    listed = await models.client.get("/v1/models", headers={"User-Agent": agent})
    kinds = {model["id"]: model["type"] for model in listed.json()}
    assert kinds == {"encodes": "embedding", "greets": "chat", "ranks": "rerank"}
    assert all(set(model["pricing"].values()) == {0} for model in listed.json())
    one = await models.client.get("/openai/v1/models", headers={"User-Agent": "AsyncOpenAI/Python 3.0"})
    assert one.json()["object"] == "list"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/v1/audio/speech"), ("GET", "/v1/nothing"), ("DELETE", "/v1/usage")]
)
async def test_unknown_routes_below_v1_have_openais_form_and_ours(
    models: Gateway, method: str, path: str
) -> None:
    answer = await models.client.request(method, path)
    error = answer.json()["error"]
    assert (
        error["code"]
        == error["type"]
        == ("unknown_route" if answer.status_code == 404 else "method_not_allowed")
    )
    assert (error["param"], bool(error["message"]), bool(error["remedy"])) == (None, True, True)
    # Errors of pilotflame's own routes keep their form.
    assert "code" not in (await models.client.get("/v1/functions/gone")).json()["error"]


async def test_an_unknown_model_has_openais_code(models: Gateway) -> None:
    answer = await models.client.post("/v1/chat/completions", json={"model": "gone", **CHAT})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
