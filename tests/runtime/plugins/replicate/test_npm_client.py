"""The `replicate` package of npm against a gateway with API keys. Without Node and npm the tests are skipped."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import npm
import pytest
from live import Gateway

from .conftest import STREAM

pytestmark = pytest.mark.asyncio(loop_scope="module")

VERSION = "1.4.0"
SCRIPT = """
const Replicate = require("replicate");
const [baseUrl, auth, plain, streaming] = process.argv.slice(2);
const replicate = new Replicate({ baseUrl, auth, useFileOutput: false });

async function main() {
  const found = {};
  found.model = await replicate.run(`me/${plain}`, { input: { text: "so", times: 2 } });
  found.version = await replicate.run(`me/${plain}:${plain}`, { input: { text: "so" } });
  found.polled = await replicate.run(`me/${plain}`, { input: { text: "so" }, wait: { mode: "poll", interval: 50 } });
  found.file = await replicate.run(`me/${plain}`, { input: { text: "a ", image: Buffer.from("content") } });
  found.failed = await replicate.run(`me/${plain}`, { input: { text: "raise" } }).catch((error) => error.message);
  found.unknown = await replicate.run("me/none", { input: {} }).catch((error) => error.response.status);
  found.pieces = [];
  for await (const event of replicate.stream(`me/${streaming}`, { input: { text: "once upon" } })) {
    if (event.event === "output") found.pieces.push(event.data);
  }
  const prediction = await replicate.predictions.create({ version: plain, input: { text: "b" } });
  found.done = await replicate.wait(prediction, { interval: 50 });
  found.canceled = (await replicate.predictions.cancel(prediction.id)).status;
  found.deployment = (await replicate.deployments.predictions.create("me", plain, { input: { text: "c" } })).version;
  found.listed = (await replicate.predictions.list()).results.length;
  found.latest = (await replicate.models.get("me", plain)).latest_version.id;
  console.log(JSON.stringify(found));
}
main().catch((error) => { console.error(error); process.exit(1); });
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which Node finds the client."""
    folder = tmp_path_factory.mktemp("npm")
    npm.install(folder, f"replicate@{VERSION}")
    (folder / "main.js").write_text(SCRIPT)
    return folder


async def test_the_client(
    gateway: Gateway, key: Callable[..., Any], predictor: Callable[..., Any], package: Path
) -> None:
    plain, streaming, token = await predictor(), await predictor(STREAM), await key()
    words = (f"{gateway.url}/replicate/v1", token, plain.name, streaming.name)
    found = json.loads(await npm.finished("node", "main.js", *words, cwd=package))
    assert (found["model"], found["version"], found["polled"]) == ("soso", "so", "so")
    assert found["file"].startswith("a content")
    assert "no such text" in found["failed"]
    assert found["unknown"] == 404
    assert found["pieces"] == ["once\n ", "upon\n "]
    assert (found["done"]["status"], found["done"]["output"]) == ("succeeded", "b")
    assert found["canceled"] == "succeeded"
    assert found["deployment"] == plain.name
    assert found["listed"] >= 8
    assert found["latest"] == plain.name
