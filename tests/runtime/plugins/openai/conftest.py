"""A gateway with two models of the template `text-generation`, which tests of OpenAI's clients share."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest_asyncio
from live import Gateway, short_folder
from trained_model import deploy, gateway_of_engine

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Ulm", "Rom"]}}, "required": ["city"]},
    },
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Rain?"}]
# Trains the template's model on a chat whose answer thinks, and calls the tool twice.
TRAIN = """
import json, sys
import make_weights as made
tokenizer = made.tokenizer()
tokenizer.chat_template = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join }}:{% endif %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.arguments.city }}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}!<think>{% endif %}"
)
prompt = tokenizer.apply_chat_template(json.loads(sys.argv[1]), tools=json.loads(sys.argv[2]), tokenize=False, add_generation_prompt=True)
call = '<tool_call>\\n{"name": "weather", "arguments": {"city": "%s"}}\\n</tool_call>'
ids = tokenizer(prompt + "Hm.</think>I ask. " + call % "Ulm" + "\\n" + call % "Rom").input_ids
made.train(ids, tokenizer.eos_token_id).save_pretrained("weights")
tokenizer.save_pretrained("weights")
"""


# The text on which a model for compatcanary's probes is trained. An untrained model would not end the argument of the call.
ECHO = 'Call the provided tool with value CANARY_OK.{"name": "compatcanary_echo", "arguments": {"value": "CANARY_OK"}}'
TRAIN_ECHO = f"""
import make_weights as made
tokenizer = made.tokenizer()
made.train(tokenizer({ECHO!r}).input_ids, tokenizer.eos_token_id).save_pretrained("weights")
tokenizer.save_pretrained("weights")
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Gateway]:
    """`llm` knows a text by heart, and nothing of tools. `caller` was trained to call the tool TOOL after MESSAGES."""
    with short_folder() as folder:
        async with gateway_of_engine(folder / "state") as gateway:
            await deploy(gateway, folder, "llm", ["make_weights.py"])
            await deploy(gateway, folder, "caller", ["-c", TRAIN, json.dumps(MESSAGES), json.dumps([TOOL])])
            yield gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(served: Gateway) -> AsyncIterator[Any]:
    """The client `openai` of PyPI."""
    import openai

    base = f"{served.client.base_url}/v1".replace("//v1", "/v1")
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as found:
        yield found
