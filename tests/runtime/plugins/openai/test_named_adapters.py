"""Adapters of a model, by the name `function:adapter`. Gateway, worker, adapters and client are real."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live import Gateway, gateway_here, short_folder
from peft import PeftModel
from trained_model import TEMPLATE, deploy
from transformers import AutoModelForCausalLM, AutoTokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")
PROMPT = "A pilot"
NAMES = ("", "formal", "casual")
# Adapters for the model that the template has trained.
WRITE_ADAPTERS = """
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

for seed, name in enumerate(("formal", "casual")):
    torch.manual_seed(seed)
    made = get_peft_model(AutoModelForCausalLM.from_pretrained("weights"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for key, parameter in made.named_parameters():
        if "lora_" in key:
            parameter.data.normal_(std=0.5)
    made.save_pretrained(f"adapters/{name}", save_embedding_layers=False)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def adapted() -> AsyncIterator[tuple[Gateway, Path]]:
    """A gateway with the model `llm` and two adapters, and the function's folder."""
    assert "adapters=context.adapters" in (TEMPLATE / "handler.py").read_text()
    with short_folder() as folder:
        async with gateway_here(folder / "state") as gateway:
            await deploy(gateway, folder, "llm", ["make_weights.py"])
            made = folder / "llm"
            command = [sys.executable, "-c", WRITE_ADAPTERS]
            await asyncio.to_thread(subprocess.run, command, cwd=made, check=True, capture_output=True)
            overrides = {f"adapters.{name}": f"adapters/{name}" for name in NAMES[1:]}
            body = {"path": str(made), "overrides": {"name": "llm", **overrides}}
            deployed = await gateway.client.post("/v1/functions", json=body, timeout=60)
            assert deployed.status_code == 201, deployed.text
            yield gateway, made


@pytest_asyncio.fixture(loop_scope="module")
async def client(adapted: tuple[Gateway, Path]) -> AsyncIterator[Any]:
    import openai

    base = f"{adapted[0].url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as found:
        yield found


def wanted(folder: Path, name: str) -> str:
    """Return the answer that transformers and peft give with this adapter."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder / "weights")
    if name:
        model = PeftModel.from_pretrained(model, str(folder / "adapters" / name))
    tokenizer = AutoTokenizer.from_pretrained(folder / "weights")
    given = tokenizer(PROMPT, return_tensors="pt")
    made = model.generate(**given, max_new_tokens=12, do_sample=False, pad_token_id=0)
    text = str(tokenizer.decode(made[0, given["input_ids"].shape[1] :], skip_special_tokens=True))
    # Remove an incomplete character at the end, because the gateway leaves it out, too.
    return text.rstrip("\ufffd")


async def test_requests_with_different_adapters_share_steps(
    adapted: tuple[Gateway, Path], client: Any
) -> None:
    names = [name for name in NAMES for _ in range(3)]
    found = await asyncio.gather(*(
        client.completions.create(
            model=f"llm:{name}" if name else "llm", prompt=PROMPT, max_tokens=12, temperature=0
        )
        for name in names
    ))  # fmt: skip
    texts = {name: wanted(adapted[1], name) for name in NAMES}
    assert [one.choices[0].text for one in found] == [texts[name] for name in names]
    assert len({*texts.values()}) == 3
    assert found[4].model == "llm:formal"


async def test_adapters_are_listed_as_models(client: Any) -> None:
    found = [(one.id, getattr(one, "parent", None)) for one in (await client.models.list()).data]
    assert found == [("llm", None), ("llm:formal", "llm"), ("llm:casual", "llm")]
    assert (await client.models.retrieve("llm:casual")).id == "llm:casual"


async def test_other_protocols_name_adapters_too(adapted: tuple[Gateway, Path]) -> None:
    post, wants = adapted[0].client.post, wanted(adapted[1], "formal")
    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    found = (await post("/v2/llm/openai/v1/completions", json={**asked, "model": "llm:formal"})).json()
    assert found["choices"][0]["text"] == wants
    parameters = {"max_new_tokens": 12, "adapter_id": "formal"}
    generated = await post("/tgi/llm/generate", json={"inputs": PROMPT, "parameters": parameters})
    assert generated.json()["generated_text"] == wants
    parameters["adapter_id"] = "none"
    refused = await post("/tgi/llm/generate", json={"inputs": PROMPT, "parameters": parameters})
    assert (refused.status_code, refused.json()["error_type"]) == (422, "validation")


async def test_an_adapter_that_there_is_not(adapted: tuple[Gateway, Path], client: Any) -> None:
    import openai

    for call in (
        client.completions.create(model="llm:none", prompt="A"),
        client.responses.create(model="llm:none", input="A"),
        client.models.retrieve("llm:none"),
    ):
        with pytest.raises(openai.NotFoundError, match="no adapter 'none'") as raised:
            await call
        assert raised.value.param == "model"
    event = {"prompt": "A", "adapter": "none"}
    refused = await adapted[0].client.post("/invoke/llm", json=event)
    assert (refused.status_code, refused.json()["error"]["type"]) == (422, "input_invalid")
    assert "there: formal, casual" in refused.json()["error"]["message"]
