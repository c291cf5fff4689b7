"""The package `openai` of npm, and all probes of the package `compatcanary`, against a gateway. Without Node and npm the tests are skipped."""

from __future__ import annotations

import json
from pathlib import Path

import npm
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
    folder = tmp_path_factory.mktemp("npm")
    npm.install(folder, *VERSIONS)
    return folder


async def test_the_client_of_npm(served: Gateway, packages: Path) -> None:
    (packages / "test.js").write_text(SCRIPT)
    base = f"{served.client.base_url}/v1".replace("//v1", "/v1")
    found = json.loads(
        await npm.finished("node", "test.js", base, json.dumps(MESSAGES), json.dumps([TOOL]), cwd=packages)
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
    report = json.loads(await npm.finished("node_modules/.bin/compatcanary", "scan", *options, cwd=packages))
    assert {probe["status"] for probe in report["results"]} == {"pass"}, json.dumps(report, indent=1)
