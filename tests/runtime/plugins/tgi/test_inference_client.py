"""`InferenceClient.text_generation` of huggingface_hub against a gateway. The model is tiny, and runs in a worker."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import pytest
import pytest_asyncio
from live import Gateway
from trained_model import KNOWN

pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio(loop_scope="module")
CLIENT = """
import dataclasses, json, sys
from huggingface_hub import InferenceClient
from huggingface_hub.errors import ValidationError

client = InferenceClient(base_url=sys.argv[1])
flame = "A pilot flame"
drawn = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 20}
digits = {"type": "regex", "value": "[0-9]{3}"}
schema = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"], "additionalProperties": False}
found = {}
found["whole"] = client.text_generation(flame)
found["stream"] = list(client.text_generation(flame, stream=True))
found["full"] = client.text_generation(flame, return_full_text=True, max_new_tokens=5)
found["details"] = dataclasses.asdict(client.text_generation(flame, details=True, max_new_tokens=3, top_n_tokens=2))
found["stopped"] = dataclasses.asdict(client.text_generation(flame, details=True, stop=["burner"]))
pieces = client.text_generation(flame, details=True, stream=True, max_new_tokens=3)
found["pieces"] = [dataclasses.asdict(piece) for piece in pieces]
found["drawn"] = [client.text_generation(flame, seed=seed, **drawn) for seed in (1, 1, 2)]
unseeded = client.text_generation(flame, details=True, **drawn)
found["repeated"] = [unseeded.generated_text, client.text_generation(flame, seed=unseeded.details.seed, **drawn)]
found["digits"] = client.text_generation(flame, grammar=digits)
for kind, value in (("json", schema), ("json", json.dumps(schema)), ("json_schema", {"name": "city", "schema": schema})):
    found.setdefault("json", []).append(client.text_generation(flame, grammar={"type": kind, "value": value}))
try:
    client.text_generation(flame, typical_p=0.5)
except ValidationError as error:
    found["refused"] = str(error)
found["chat"] = client.chat_completion([{"role": "user", "content": flame}], temperature=0).choices[0].message.content
print(json.dumps(found))
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def found(trained: Gateway) -> dict[str, Any]:
    """Return the answers that the script of the client has printed."""
    base = f"{str(trained.client.base_url).rstrip('/')}/tgi/llm"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, base, env={**os.environ, "HF_HUB_OFFLINE": "0"},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode == 0, err.decode()
    return dict(json.loads(out.decode().splitlines()[-1]))


async def test_texts(found: dict[str, Any]) -> None:
    assert found["whole"] == found["chat"] == KNOWN
    assert "".join(found["stream"]) == KNOWN
    # Each byte is a token, and the last token is the model's end.
    assert len(found["stream"]) == len(KNOWN.encode()) + 1
    assert found["full"] == "A pilot flame lets"


async def test_details(found: dict[str, Any]) -> None:
    answer, details = found["details"], found["details"]["details"]
    assert answer["generated_text"] == " le"
    assert (details["finish_reason"], details["generated_tokens"], details["seed"]) == ("length", 3, None)
    assert [token["text"] for token in details["tokens"]] == list(" le")
    assert all(-0.5 < token["logprob"] <= 0 and not token["special"] for token in details["tokens"])
    assert [top[0]["id"] for top in details["top_tokens"]] == [token["id"] for token in details["tokens"]]
    assert [len(top) for top in details["top_tokens"]] == [2, 2, 2]


async def test_a_stop_text_is_in_the_answer(found: dict[str, Any]) -> None:
    assert found["stopped"]["generated_text"] == " lets the burner"
    assert found["stopped"]["details"]["finish_reason"] == "stop_sequence"


async def test_a_stream_with_details(found: dict[str, Any]) -> None:
    *first, last = found["pieces"]
    assert [piece["index"] for piece in found["pieces"]] == [1, 2, 3]
    assert [piece["token"]["text"] for piece in found["pieces"]] == list(" le")
    assert [(piece["generated_text"], piece["details"]) for piece in first] == [(None, None)] * 2
    assert last["generated_text"] == " le"
    end = {
        "finish_reason": "length",
        "generated_tokens": 3,
        "seed": None,
        "input_length": len("A pilot flame"),
    }
    assert last["details"] == end


async def test_a_seed_repeats_an_answer(found: dict[str, Any]) -> None:
    one, again, other = found["drawn"]
    assert one == again != other
    # The second request has the seed that the gateway had drawn for the first one and named in the details.
    one, again = found["repeated"]
    assert one == again


async def test_a_grammar(found: dict[str, Any]) -> None:
    assert found["digits"].isdecimal()
    assert len(found["digits"]) == 3
    assert {tuple(json.loads(text)) for text in found["json"]} == {("city",)}
    assert len(found["json"]) == 3


async def test_an_unsupported_parameter(found: dict[str, Any]) -> None:
    assert "parameters.typical_p" in found["refused"]


async def test_tokens_count(found: dict[str, Any], trained: Gateway) -> None:
    before = (await trained.client.get("/v1/usage")).json()
    body = {"inputs": "A pilot flame", "parameters": {"max_new_tokens": 5}}
    assert (await trained.client.post("/tgi/llm/generate", json=body)).status_code == 200
    after = (await trained.client.get("/v1/usage")).json()
    assert _tokens(after) - _tokens(before) == len("A pilot flame") + 5


def _tokens(usage: dict[str, Any]) -> int:
    counted = {row["key"]: row["usage"] for row in usage["rows"]}["llm"]
    return int(counted["prompt_tokens"] + counted["generated_tokens"])
