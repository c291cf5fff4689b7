"""Embeddings by the client `openai`, and ranks, from the templates' handlers and from handlers of one's own."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import tiny_models
from live import Gateway, gateway_here, short_folder

openai = pytest.importorskip("openai")
pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio(loop_scope="module")
TEMPLATES = Path(__file__).resolve().parents[4] / "templates"
TEXTS = ["calm", "wild"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            for name, write in (
                ("text-embedding", lambda path: tiny_models.write_sentence_transformer(path, "mean")),
                ("reranking", lambda path: tiny_models.write_bert(path, "BertForSequenceClassification", **tiny_models.labels("calm"))),
            ):  # fmt: skip
                shutil.copytree(TEMPLATES / name, folder / name)
                model = await asyncio.to_thread(write, folder / f"{name}-model")
                body = {"path": str(folder / name), "overrides": {"snapshot": str(model)}}
                deployed = await gateway.client.post("/v1/functions", json=body, timeout=60)
                assert deployed.status_code == 201, deployed.text
            yield gateway


async def test_embeddings(client: Any, served: Gateway) -> None:
    packed = await client.embeddings.create(model="text-embedding", input=TEXTS)
    plain = await client.embeddings.create(model="text-embedding", input=TEXTS, encoding_format="float")
    raw = (await served.client.post("/invoke/text-embedding", json={"text": TEXTS})).json()
    assert [one.index for one in packed.data] == [0, 1]
    assert [one.embedding for one in plain.data] == raw["embedding"]
    for one, other in zip(packed.data, plain.data, strict=True):
        assert one.embedding == pytest.approx(other.embedding, abs=1e-6)
    assert packed.usage.prompt_tokens == raw["tokens"] > 0
    one = await client.embeddings.create(model="text-embedding", input=TEXTS[0])
    assert len(one.data) == 1
    assert [model.id async for model in client.models.list()] == ["reranking", "text-embedding"]


async def test_embeddings_of_tokens(client: Any, served: Gateway) -> None:
    texts = await client.embeddings.create(model="text-embedding", input=TEXTS, encoding_format="float")
    # The tokens 9 and 1 are the words in TEXTS.
    for sent in ([[9], [1]], [9]):
        found = await client.embeddings.create(model="text-embedding", input=sent, encoding_format="float")
        assert found.usage.prompt_tokens == len(found.data) == len(sent)
        for one, other in zip(found.data, texts.data, strict=False):
            assert one.embedding == pytest.approx(other.embedding, abs=1e-5)
    # A batch may have texts and tokens of several callers.
    mixed = await asyncio.gather(
        *(client.embeddings.create(model="text-embedding", input=one) for one in ([9], "calm", [[9]], "calm"))
    )
    assert all(one.data[0].embedding == pytest.approx(mixed[0].data[0].embedding, abs=1e-5) for one in mixed)
    for wrong, words in (([11], "11 is none of the model's 11"), ([9] * 65, "maximum context length is 64")):
        with pytest.raises(openai.BadRequestError, match=words):
            await client.embeddings.create(model="text-embedding", input=wrong)


async def test_ranks(served: Gateway) -> None:
    body = {"model": "reranking", "query": "calm", "documents": [TEXTS[0], {"text": TEXTS[1]}], "top_n": 1}
    found = (await served.client.post("/v1/rerank", json=body)).json()
    raw = (await served.client.post("/invoke/reranking", json={"query": "calm", "documents": TEXTS})).json()
    best = raw["results"][0]
    assert found["results"] == [
        {
            "index": best["index"],
            "relevance_score": best["score"],
            "document": {"text": TEXTS[best["index"]]},
        }
    ]
    assert found["usage"]["total_tokens"] == raw["tokens"] > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [1, -2]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": [[1], "a"]}, "input"),
        ({"input": []}, "input"),
        ({"dimensions": 3}, "dimensions"),
        ({"model": "reranking"}, "model"),
    ],
)
async def test_what_is_refused(client: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(**{"model": "text-embedding", "input": "a", **fields})
    assert (caught.value.param or "").startswith(param)


async def test_handlers_of_ones_own(client: Any, served: Gateway) -> None:
    await served.deploy(
        "from pilotflame import EmbeddingRequest\ndef handler(event: EmbeddingRequest):\n"
        "    return {'embedding': [[1.0, 0.0] for _ in event.text]} if event.text != ['odd'] else {}\n",
        name="own",
    )
    assert (await client.embeddings.create(model="own", input=["a", "b"])).data[1].embedding == [1.0, 0.0]
    with pytest.raises(openai.BadRequestError, match="texts, not tokens") as caught:
        await client.embeddings.create(model="own", input=[[1, 2]])
    assert caught.value.param == "input"
    with pytest.raises(openai.InternalServerError, match="returns something else"):
        await client.embeddings.create(model="own", input="odd")
    await served.deploy(
        "from pilotflame import RerankRequest\ndef handler(event: RerankRequest):\n    return {'results': [{'index': 7, 'score': 1}]}\n",
        name="own-ranks",
    )
    body = {"model": "own-ranks", "query": "a", "documents": ["b"]}
    wrong = await served.client.post("/v1/rerank", json=body)
    assert (wrong.status_code, "document 7" in wrong.text) == (500, True)
