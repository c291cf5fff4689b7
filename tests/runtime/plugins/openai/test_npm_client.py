"""The package `openai` of npm, and all probes of the package `compatcanary`, against a gateway. Without Node and npm the tests are skipped."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from live import Gateway

from .conftest import MESSAGES, TOOL, TRAIN_ECHO, deploy

pytestmark = pytest.mark.asyncio(loop_scope="module")
VERSIONS = ("openai@6.49.0", "compatcanary@0.2.2")
SCRIPT = """
const OpenAI = require("openai");
const [baseURL, messages, tools] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const asked = { model: "caller", temperature: 0, messages: JSON.parse(messages), tools: JSON.parse(tools) };

async function main() {
  const found = {};
  found.models = (await client.models.list()).data.map((model) => model.id);
  found.chat = (await client.chat.completions.create({ model: "llm", temperature: 0, messages: [{ role: "user", content: "A pilot flame" }] })).choices[0].message.content;
  const stream = client.chat.completions.stream(asked);
  found.chunks = 0;
  for await (const chunk of stream) found.chunks += 1;
  found.calls = (await stream.finalChatCompletion()).choices[0].message.tool_calls.map((call) => call.function.arguments);
  const responses = client.responses.stream({ model: "llm", temperature: 0, input: "A pilot flame" });
  found.events = [];
  for await (const event of responses) found.events.push(event.type);
  found.response = (await responses.finalResponse()).output_text;
  found.error = await client.completions.create({ model: "none", prompt: "A" }).catch((error) => [error.status, error.param]);
  console.log(JSON.stringify(found));
}
main().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Node finds the packages."""
    if shutil.which("node") is None or (npm := shutil.which("npm")) is None:
        pytest.skip("Node and npm are not installed")
    folder = tmp_path_factory.mktemp("npm")
    install = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *VERSIONS]
    done = subprocess.run(install, capture_output=True, text=True, check=False, timeout=90)
    assert done.returncode == 0, done.stderr
    return folder


async def finished(*command: str, cwd: Path) -> str:
    process = await asyncio.create_subprocess_exec(
        *command, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 90)
    assert process.returncode == 0, (out + err).decode()
    return out.decode()


async def test_the_client_of_npm(served: Gateway, packages: Path) -> None:
    (packages / "test.js").write_text(SCRIPT)
    base = f"{served.client.base_url}/v1".replace("//v1", "/v1")
    found = json.loads(
        await finished("node", "test.js", base, json.dumps(MESSAGES), json.dumps([TOOL]), cwd=packages)
    )
    known = " lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
    assert found["models"] == ["caller", "llm"]
    assert found["chat"] == found["response"] == known
    assert found["calls"] == ['{"city": "Ulm"}', '{"city": "Rom"}']
    assert found["chunks"] > 3
    assert found["events"][-1] == "response.completed"
    assert found["error"] == [404, "model"]


async def test_all_probes_of_compatcanary(served: Gateway, packages: Path, tmp_path: Path) -> None:
    await deploy(served, tmp_path, "echo", ["-c", TRAIN_ECHO])
    base = f"{served.client.base_url}/v1".replace("//v1", "/v1")
    options = ("--base-url", base, "--model", "echo", "--format", "json", "--fail-on", "never")
    report = json.loads(await finished("node_modules/.bin/compatcanary", "scan", *options, cwd=packages))
    assert {probe["status"] for probe in report["results"]} == {"pass"}, json.dumps(report, indent=1)
