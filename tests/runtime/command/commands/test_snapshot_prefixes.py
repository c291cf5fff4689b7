"""`pilotflame snapshot prefixes`, and a function whose requests begin with such a prefix. The model is tiny and runs in a worker."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live import Gateway, gateway_here, short_folder
from trained_model import TEMPLATE, train

pytest.importorskip("transformers")
pytestmark = pytest.mark.asyncio(loop_scope="module")
Run = Callable[..., Any]
SYSTEM = {"role": "system", "content": "A pilot flame"}
CHAT = [SYSTEM, {"role": "user", "content": " lets the burner"}]
KNOWN = " start at once. Ein Flämmchen genügt: 火 🔥"


def command(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "pilotflame.runtime.cli", "snapshot", "prefixes", *words]
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False, timeout=100)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def folder() -> AsyncIterator[Path]:
    """The template's folder with weights and their prefixes."""
    with short_folder() as place:
        folder = place / "llm"
        shutil.copytree(TEMPLATE, folder)
        await asyncio.to_thread(train, folder, ["make_weights.py"])
        (folder / "prefixes.json").write_text(
            json.dumps({"flame": {"messages": [SYSTEM]}, "none": {"messages": [CHAT[1]]}})
        )
        done = await asyncio.to_thread(
            command, "weights", "prefixes.json", "-o", "prefixes", "--json", cwd=folder
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["tokens"] == {
            "flame": len(SYSTEM["content"]),
            "none": len(CHAT[1]["content"]),
        }
        settings = (folder / "pilotflame.toml").read_text().replace('snapshot = "weights"', "")
        (folder / "pilotflame.toml").write_text(
            f'{settings}\n[snapshots]\nmodel = "weights"\nprefixes = "prefixes"\n'
        )
        handler = (folder / "handler.py").read_text()
        call = 'language_model(context.snapshots["model"], prefixes=context.snapshots["prefixes"])'
        (folder / "handler.py").write_text(re.sub(r"language_model\(.*\)", call, handler))
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(folder: Path) -> AsyncIterator[Gateway]:
    async with gateway_here(folder.parent / "state") as gateway:
        yield gateway


async def deploy(gateway: Gateway, folder: Path) -> Any:
    body = {"path": str(folder), "overrides": {"name": "llm"}}
    return await gateway.client.post("/v1/functions", json=body, timeout=60)


async def test_a_prompt_with_a_prefix_reads_the_rest_only(served: Gateway, folder: Path) -> None:
    assert (await deploy(served, folder)).status_code == 201
    for messages, cached in (
        (CHAT, len(SYSTEM["content"])),
        ([SYSTEM], 0),
        ([{"role": "user", "content": "A pilot"}], 0),
    ):
        body = {"model": "llm", "temperature": 0, "messages": messages, "n": 3}
        answer = (await served.client.post("/v1/chat/completions", json=body)).json()
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        if cached:
            assert {choice["message"]["content"] for choice in answer["choices"]} == {KNOWN}


async def test_prefixes_of_another_model_are_refused_at_deploy(served: Gateway, folder: Path) -> None:
    other = folder.parent / "other"
    shutil.copytree(folder, other)
    settings = other / "weights" / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("{", '{"other": 1, ', 1))
    refused = await deploy(served, other)
    assert refused.status_code == 422
    assert "tokenizer, weights differ" in refused.text
    assert "snapshot prefixes" in refused.text


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{}", "no beginnings"),
        ("[", "the file"),
        ('{"a": {"message": []}}', "a.message"),
        ('{"a b": {"messages": []}}', "a b"),
        ('{"a": {"messages": []}}', "'a' has no tokens"),
        ('{"a": {"tools": [{}]}}', "a.tools.0.function"),
    ],
)
async def test_a_file_that_is_not_valid(
    folder: Path, run_here: Run, tmp_path: Path, content: str, told: str
) -> None:
    file = tmp_path / "prefixes.json"
    file.write_text(content)
    # Run the command in this process: a new process would import transformers, which takes seconds.
    words = ("snapshot", "prefixes", folder / "weights", file, "-o", tmp_path / "out")
    done = await asyncio.to_thread(run_here, *words)
    assert done.returncode != 0
    assert told in done.stderr.replace("\n", " ")
    assert not (tmp_path / "out").exists()
