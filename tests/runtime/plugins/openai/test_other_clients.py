"""litellm, together and huggingface_hub's InferenceClient against a gateway. Each is installed into an environment of its own."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from live import Gateway
from trained_model import KNOWN

from .conftest import MESSAGES, TOOL

pytestmark = pytest.mark.asyncio(loop_scope="module")
VERSIONS = ("litellm==1.110.2", "huggingface_hub==2.4.0", "together==2.42.0")
LITELLM = """
import json, sys, litellm
base, messages, tools = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
where = {"api_base": base, "api_key": "none", "temperature": 0, "num_retries": 0}
flame = [{"role": "user", "content": "A pilot flame"}]
found = {}
found["chat"] = litellm.completion(model="hosted_vllm/llm", messages=flame, **where).choices[0].message.content
chunks = litellm.completion(model="openai/llm", messages=flame, stream=True, **where)
found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
message = litellm.completion(model="openai/caller", messages=messages, tools=tools, **where).choices[0].message
found["calls"] = [call.function.arguments for call in message.tool_calls]
found["reasoning"] = message.reasoning_content
found["text"] = litellm.text_completion(
    model="text-completion-openai/llm", prompt="A pilot flame", max_tokens=5, **where).choices[0].text
found["response"] = litellm.responses(model="openai/llm", input="A pilot flame", **where).output[0].content[0].text
try:
    litellm.completion(model="openai/none", messages=flame, **where)
except litellm.NotFoundError as error:
    found["unknown"] = error.status_code
print(json.dumps(found))
"""
INFERENCE_CLIENT = """
import json, sys
from huggingface_hub import InferenceClient
client = InferenceClient(base_url=sys.argv[1], api_key="none")
flame = [{"role": "user", "content": "A pilot flame"}]
tools = json.loads(sys.argv[3])
found = {}
found["chat"] = client.chat_completion(flame, model="llm", temperature=0).choices[0].message.content
chunks = client.chat_completion(flame, model="llm", temperature=0, stream=True)
found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
answer = client.chat_completion(json.loads(sys.argv[2]), model="caller", temperature=0, tools=tools)
found["calls"] = [call.function.arguments for call in answer.choices[0].message.tool_calls]
print(json.dumps(found))
"""

TOGETHER = """
import json, sys
from together import Together
client = Together(base_url=sys.argv[1], api_key="none", max_retries=0)
flame = {"model": "llm", "messages": [{"role": "user", "content": "A pilot flame"}], "temperature": 0}
asked = {"model": "caller", "messages": json.loads(sys.argv[2]), "tools": json.loads(sys.argv[3]), "temperature": 0}
found = {}
found["chat"] = client.chat.completions.create(**flame).choices[0].message.content
chunks = client.chat.completions.create(**flame, stream=True)
found["stream"] = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
calls = client.chat.completions.create(**asked).choices[0].message.tool_calls
found["calls"] = [call.function.arguments for call in calls]
found["models"] = [model.id for model in client.models.list()]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the clients."""
    folder = tmp_path_factory.mktemp("clients")
    uv = [sys.executable, "-m", "uv"]
    for command in (
        ["venv", str(folder)],
        ["pip", "install", "--python", str(folder / "bin/python"), *VERSIONS],
    ):
        done = subprocess.run([*uv, *command], capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
    return str(folder / "bin/python")


@pytest.mark.parametrize(
    "script", [LITELLM, INFERENCE_CLIENT, TOGETHER], ids=["litellm", "InferenceClient", "together"]
)
async def test_a_client(served: Gateway, python: str, script: str) -> None:
    base = f"{served.client.base_url}/v1".replace("//v1", "/v1")
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    process = await asyncio.create_subprocess_exec(
        python, "-c", script, base, json.dumps(MESSAGES), json.dumps([TOOL]), env=environment,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, err.decode()
    found = json.loads(out.decode().splitlines()[-1])
    assert found.pop("chat") == found.pop("stream") == KNOWN
    assert found.pop("calls") == ['{"city": "Ulm"}', '{"city": "Rom"}']
    wanted = {"reasoning": "Hm.", "text": " lets", "response": KNOWN, "unknown": 404}
    assert found in ({}, wanted, {"models": ["caller", "llm"]})
