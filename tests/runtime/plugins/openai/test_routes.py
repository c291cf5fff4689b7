"""OpenAI's routes at the paths of one function, and the list of models for Together's client."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pilotflame
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
COUNTS = """
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    assert event.prompt_only and event.max_tokens == 1
    ids = event.prompt if isinstance(event.prompt, list) else list((event.prompt or event.messages[-1]["content"]).encode())
    prompt = {"ids": ids, "pieces": [chr(one) for one in ids], "text": bytes(ids).decode(), "most": 64}
    yield Delta(prompt=prompt, finish_reason="length")
"""
ODDS = """
import math
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest, context):
    logprobs = [{"token": "a", "id": 1, "logprob": 0.0, "top": [["b", 2, -math.inf]]}]
    yield Delta(text="a", tokens=[1], finish_reason="stop", logprobs=logprobs)
"""
ENCODES = """
from pilotflame import EmbeddingRequest

def handler(event: EmbeddingRequest):
    return {"embedding": [[1.0] for _ in event.text], "tokens": 1}
"""
RANKS = """
from pilotflame import RerankRequest

def handler(event: RerankRequest):
    found = [{"index": index, "score": len(event.query) + len(text) / 100} for index, text in enumerate(event.documents) if text != "lost"]
    return {"results": sorted(found, key=lambda one: -one["score"]), "tokens": len(event.documents)}
"""
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
BASES = ("/v2/greets/openai", "/tgi/greets")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def models() -> AsyncIterator[Gateway]:
    """A gateway with a model of each kind."""
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            for name, handler in (
                ("greets", GREETS),
                ("odds", ODDS),
                ("counts", COUNTS),
                ("encodes", ENCODES),
                ("ranks", RANKS),
            ):
                await gateway.deploy(handler, name=name)
            yield gateway


@pytest.mark.parametrize("base", BASES)
async def test_the_paths_of_one_function(models: Gateway, base: str) -> None:
    url = f"{str(models.client.base_url).rstrip('/')}{base}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        # The path names the function, so callers may send any name for the model.
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
    assert kinds == {
        "counts": "chat",
        "encodes": "embedding",
        "greets": "chat",
        "odds": "chat",
        "ranks": "rerank",
    }
    assert all(set(model["pricing"].values()) == {0} for model in listed.json())
    one = await models.client.get("/openai/v1/models", headers={"User-Agent": "AsyncOpenAI/Python 3.0"})
    assert one.json()["object"] == "list"


@pytest.mark.parametrize(
    ("method", "path"), [("POST", "/openai/v1/audio/speech"), ("GET", "/v1/nothing"), ("DELETE", "/v1/usage")]
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


async def test_a_token_that_cannot_follow_has_the_logprob_of_vllm(models: Gateway) -> None:
    answer = await models.client.post(
        "/v1/completions", json={"model": "odds", "prompt": "Hi", "logprobs": 1}
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["logprobs"]["top_logprobs"] == [{"b": -9999.0}]


@pytest.mark.parametrize("sent", ["", [""], ["a", ""]])
async def test_an_empty_text_has_no_embedding(models: Gateway, sent: Any) -> None:
    answer = await models.client.post("/v1/embeddings", json={"model": "encodes", "input": sent})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")


@pytest.mark.parametrize(
    "options",
    [None, {}, {"continuous_usage_stats": True}, {"include_usage": False, "continuous_usage_stats": True}],
)
async def test_a_stream_has_no_usage_unless_it_is_asked_for(models: Gateway, options: Any) -> None:
    body = {"model": "greets", "stream": True, "stream_options": options, **CHAT}
    answer = await models.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200
    assert '"usage"' not in answer.text


async def test_a_response_repeats_the_metadata_and_instructions_of_its_request(models: Gateway) -> None:
    body = {"model": "greets", "input": "Hi", "metadata": {"run": "7"}, "instructions": "Be brief."}
    found = (await models.client.post("/v1/responses", json=body)).json()
    assert (found["metadata"], found["instructions"]) == ({"run": "7"}, "Be brief.")
    plain = (
        await models.client.post("/v1/responses", json={"model": "greets", "input": "Hi", "metadata": None})
    ).json()
    assert (plain["metadata"], plain["instructions"]) == ({}, None)


@pytest.mark.parametrize("base", ["/openai", *BASES])
async def test_the_state_and_the_version_as_vllm_has_them(models: Gateway, base: str) -> None:
    health = await models.client.get(f"{base}/health")
    assert (health.status_code, health.content) == (200, b"")
    assert (await models.client.get(f"{base}/version")).json() == {"version": pilotflame.__version__}
    # Where several functions are served, the paths without a prefix belong to the gateway.
    assert (await models.client.get("/version")).status_code == 404


@pytest.mark.parametrize("base", ["/openai", "/v2/counts/openai"])
async def test_the_tokens_of_a_text_and_the_text_of_tokens(models: Gateway, base: str) -> None:
    asked: dict[str, Any] = {"model": "counts", "prompt": "Hi", "return_token_strs": True}
    answer = await models.client.post(f"{base}/tokenize", json=asked)
    assert answer.json() == {"count": 2, "max_model_len": 64, "tokens": [72, 105], "token_strs": ["H", "i"]}
    chat = await models.client.post(
        f"{base}/tokenize", json={"model": "counts", "add_generation_prompt": True, **CHAT}
    )
    assert (chat.json()["tokens"], chat.json()["token_strs"]) == ([72, 105], None)
    back = await models.client.post(f"{base}/detokenize", json={"model": "counts", "tokens": [72, 105]})
    assert back.json() == {"prompt": "Hi"}
    assert (
        await models.client.post(f"{base}/detokenize", json={"model": "counts", "tokens": [-1]})
    ).status_code == 400


async def test_a_handler_that_does_not_tell_its_tokens(models: Gateway) -> None:
    answer = await models.client.post("/openai/tokenize", json={"model": "greets", "prompt": "Hi"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_supported")


@pytest.mark.parametrize(
    ("sides", "scores"),
    [
        ({"text_1": "ab", "text_2": "c"}, [2.01]),
        ({"text_1": "ab", "text_2": ["c", "cc", "c"]}, [2.01, 2.02, 2.01]),
        ({"text_1": ["ab"], "text_2": ["c", "cc"]}, [2.01, 2.02]),
        ({"text_1": ["ab", "a", "ab"], "text_2": ["c", "c", "cc"]}, [2.01, 1.01, 2.02]),
        ({"queries": "ab", "documents": ["c"]}, [2.01]), ({"queries": "ab", "items": "c"}, [2.01]),
        ({"data_1": "ab", "data_2": ["c"]}, [2.01]),
    ],
)  # fmt: skip
async def test_pairs_of_texts_are_scored_as_vllm_does(
    models: Gateway, sides: dict[str, Any], scores: list[float]
) -> None:
    for path in ("/v1/score", "/openai/score", "/openai/v1/score", "/v2/ranks/openai/score"):
        answer = await models.client.post(path, json={"model": "ranks", **sides})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        wanted = [{"index": at, "object": "score", "score": score} for at, score in enumerate(scores)]
        assert (found["object"], found["model"], found["data"]) == ("list", "ranks", wanted)
        assert found["id"].startswith("score-")
        assert found["usage"]["total_tokens"] == len(scores)


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, 400, "text_1"), ({"text_2": "a"}, 400, "text_1"), ({"text_1": "a", "text_2": []}, 400, "text_2"),
        ({"text_1": "a", "text_2": "b", "model": "greets"}, 400, "model"), ({"text_1": "a", "text_2": ["b", "lost"]}, 500, None),
    ],
)  # fmt: skip
async def test_pairs_that_cannot_be_scored(
    models: Gateway, fields: dict[str, Any], status: int, param: str | None
) -> None:
    answer = await models.client.post("/v1/score", json={"model": "ranks", **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text


async def test_ranks_at_the_paths_of_vllm(models: Gateway) -> None:
    body = {"model": "ranks", "query": "a", "documents": ["b", "bb"], "top_n": 0}
    for path in ("/openai/rerank", "/v1/rerank"):
        found = (await models.client.post(path, json=body)).json()
        assert [one["index"] for one in found["results"]] == [1, 0]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "gone", **CHAT}), ("/v1/completions", {"model": "greets"}), ("/v1/embeddings", {"model": "encodes"}),
        ("/v1/responses", {"model": "greets"}), ("/v1/rerank", []), ("/v1/score", {}), ("/openai/tokenize", {}), ("/v2/greets/openai/v1/completions", {}),
        ("/openai/deployments/gone/chat/completions", CHAT),
    ],
)  # fmt: skip
async def test_an_error_in_openais_form_has_its_remedy(models: Gateway, path: str, body: Any) -> None:
    error = (await models.client.post(path, json=body)).json()["error"]
    assert {"message", "type", "param", "code", "remedy"} == error.keys()
    assert error["remedy"]
    assert error["message"].endswith(error["remedy"])


async def test_where_one_function_is_served_alone() -> None:
    with short_folder() as folder:
        async with gateway_here(folder / "state", bare_paths=True) as gateway:
            await gateway.deploy(COUNTS, name="counts")
            assert (await gateway.client.get("/health")).status_code == 200
            assert (await gateway.client.get("/version")).json() == {"version": pilotflame.__version__}
            # vLLM's clients need not name the only model.
            assert (await gateway.client.post("/tokenize", json={"prompt": "Hi"})).json()["tokens"] == [
                72,
                105,
            ]
            assert (await gateway.client.post("/detokenize", json={"tokens": [72]})).json() == {"prompt": "H"}
