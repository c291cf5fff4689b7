"""The table `[prefixes]` of a deploy: the first worker computes keys and values, and later workers map them.

Gateway, workers and files are real. The model is tiny and has random weights.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from live import Gateway, gateway_here, gone, short_folder
from pilotflame.errors import SettingsError
from pilotflame.handlers.language_model.declared_prefixes import MOST_TOOL_BYTES, DeclaredPrefixes
from pilotflame.handlers.language_model.model import LanguageModel
from pilotflame.runtime.calls.worker.confinement import landlock_version
from pilotflame.snapshot.computed import ComputedSnapshots
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot
from tiny_causal import generated
from tiny_tokenizer import HERMES, byte_tokenizer
from trained_model import TEMPLATE
from transformers import LlamaConfig, LlamaForCausalLM

SYSTEM = {"role": "system", "content": "You are a pilot flame. " * 4}
TOOLS = [{"type": "function", "function": {"name": "light", "parameters": {"type": "object"}}}]
CHAT = [SYSTEM, {"role": "user", "content": "Go"}]
PREFIXES = {
    "assistant": {"messages": [SYSTEM]},
    "tools": {"messages": [SYSTEM], "tools": "tools.json"},
}
HANDLER = (TEMPLATE / "handler.py").read_text()
FILE = "prefixes.safetensors"
# The length of the part that all chats share. The template writes the roles, too.
CACHED = len(f"system: {SYSTEM['content']}\nuser: ")


def write_model(folder: Path, seed: int = 0, chat_template: str | None = HERMES) -> Any:
    """Write a model of random weights with a tokenizer of bytes, and return it."""
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(chat_template or "")
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def place() -> AsyncIterator[Path]:
    with short_folder() as folder:
        yield folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def first(place: Path) -> tuple[Any, dict[str, int]]:
    """Return the model and the stored prefixes of the function `llm`. The gateway that deployed it has ended."""
    model = write_model(place / "weights")
    async with gateway_here(place / "state", drain_s=1.0) as gateway:
        await deploy(gateway, "llm", settings(place / "weights"))
        made = stored(gateway, "llm")
        assert len(made) == 1
        assert await chat(gateway, "llm") == (CACHED, expected(model))
    return model, made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(place: Path, first: object) -> AsyncIterator[Gateway]:
    async with gateway_here(place / "state", drain_s=1.0) as gateway:
        yield gateway


def settings(weights: Path, **more: Any) -> dict[str, Any]:
    return {
        "snapshot": str(weights), "concurrency": 4, "idempotent": True, "prefixes": json.dumps(PREFIXES), **more
    }  # fmt: skip


async def deploy(gateway: Gateway, name: str, given: dict[str, Any], handler: str = HANDLER) -> None:
    await gateway.deploy(handler, given, name=name, files={"tools.json": json.dumps(TOOLS)})


async def chat(gateway: Gateway, name: str, **more: Any) -> tuple[int, str]:
    """Return the cached tokens and the text of a chat."""
    body = {"model": name, "temperature": 0, "max_tokens": 12, "messages": CHAT, **more}
    found = await gateway.client.post("/v1/chat/completions", json=body)
    assert found.status_code == 200, found.text
    answer = found.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached, answer["choices"][0]["message"]["content"]


def stored(gateway: Gateway, name: str) -> dict[str, int]:
    """Return the inode of each stored file of prefixes, by its key."""
    return {
        file.parent.name: file.stat().st_ino
        for file in (gateway.state / "prefixes" / name).glob(f"[!.]*/{FILE}")
    }


def expected(model: Any) -> str:
    tokenizer = byte_tokenizer(HERMES)
    prompt = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    # An answer leaves out an incomplete character at its end.
    return str(tokenizer.decode(generated(model, ids, 12), skip_special_tokens=True)).rstrip("\ufffd")


async def mapped(gateway: Gateway, name: str) -> None:
    """Wait until the function's only worker is known, and assert that it has mapped the stored file."""
    (pid,) = await gateway.function(name).pids("worker")
    (inode,) = {
        line.split()[4] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if FILE in line
    }
    assert int(inode) in stored(gateway, name).values()


@pytest.mark.asyncio(loop_scope="module")
async def test_later_workers_map_what_the_deploy_has_computed(
    served: Gateway, place: Path, first: tuple[Any, dict[str, int]]
) -> None:
    wanted = (CACHED, expected(first[0]))
    assert await chat(served, "llm") == wanted
    await mapped(served, "llm")
    assert (await chat(served, "llm", tools=TOOLS, tool_choice="none"))[0] > CACHED
    for pid in await served.function("llm").pids("worker"):
        os.kill(pid, signal.SIGKILL)
        await gone(pid)
    assert await chat(served, "llm") == wanted
    # A deploy with equal keys uses the stored prefixes.
    await deploy(served, "llm", settings(place / "weights", timeout_s=50))
    assert await chat(served, "llm") == wanted
    assert stored(served, "llm") == first[1]


@pytest.mark.asyncio(loop_scope="module")
async def test_other_weights_have_other_prefixes(
    served: Gateway, place: Path, first: tuple[Any, dict[str, int]]
) -> None:
    other = write_model(place / "other", 1)
    await deploy(served, "llm", settings(place / "other"))
    assert await chat(served, "llm") == (CACHED, expected(other))
    assert expected(other) != expected(first[0])
    # The earlier prefixes stay for a rollback.
    assert stored(served, "llm").items() > first[1].items()
    assert (await served.client.delete("/v1/functions/llm")).is_success
    assert not (served.state / "prefixes" / "llm").exists()


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
async def test_a_private_function_writes_its_own_only(served: Gateway, place: Path) -> None:
    write_model(place / "private")
    await deploy(served, "private", settings(place / "private", **{"resources.files": "private"}))
    assert (await chat(served, "private"))[0]
    await mapped(served, "private")
    text = f"import os\ndef handler(event):\n    return os.listdir({str(served.state / 'prefixes' / 'private')!r})"
    other = await served.deploy(text, {"resources.files": "private"})
    assert "Permission denied" in (await other.error())["message"]


@pytest.mark.asyncio(loop_scope="module")
async def test_a_deploy_with_wrong_prefixes_fails_and_names_the_field(served: Gateway, place: Path) -> None:
    write_model(place / "wrong")
    unused = HANDLER.replace(", prefixes=context.prefixes", "")
    for handler, prefix, told in (
        (
            HANDLER,
            {"messages": [{**SYSTEM, "content": "x" * 600}]},
            "prefixes.a: The prefix 'a' has 615 tokens",
        ),
        (HANDLER, {"message": []}, "prefixes.a.message is not a setting; did you mean prefixes.a.messages?"),
        (unused, {"messages": [SYSTEM]}, "the handler does not use it"),
    ):
        given = settings(place / "wrong", prefixes=json.dumps({"a": prefix}))
        found = await served.send(handler, given, name="wrong")
        assert not found.is_success
        assert told in found.json()["error"]["message"]
    assert not (served.state / "prefixes" / "wrong").exists()


@pytest.mark.parametrize(
    ("prefix", "told"),
    [
        ({"messages": [{"content": 1}], "chat_template_kwargs": {"tokenize": True}}, "may not have tokenize"),
        ({"messages": "x"}, "prefixes.a.messages: "),
        ({"tools": [{"function": {"name": "a b"}}]}, "prefixes.a.tools.0.function.name: "),
        ({"tools": "none.json"}, "prefixes.a.tools: 'none.json' cannot be read: No such file"),
        ({"tools": "bad.json"}, "prefixes.a.tools: 'bad.json' cannot be read: it is no JSON"),
        ({"tools": "deep.json"}, "prefixes.a.tools: 'deep.json' cannot be read: it is no JSON"),
        ({"tools": "large.json"}, "prefixes.a.tools: 'large.json' cannot be read: it has more than 4 MiB"),
    ],
)
def test_values_that_do_not_fit(tmp_path: Path, prefix: dict[str, Any], told: str) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "large.json").write_text("[" + " " * MOST_TOOL_BYTES + "]")
    assert told in refused(tmp_path, prefix)


def refused(folder: Path, prefix: dict[str, Any]) -> str:
    declared = DeclaredPrefixes({"a": prefix}, folder, ComputedSnapshots(folder / "kept", 0))
    snapshot = Snapshot(folder / "model", create(folder / "model"))
    with pytest.raises(SettingsError, match=r"prefixes\.a") as raised:
        LanguageModel(snapshot, rows=1, window=512, prefixes=declared)
    assert declared.prepare is None
    return raised.value.message


def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    write_model(tmp_path / "model", chat_template=None)
    assert "no chat template" in refused(tmp_path, {"messages": [SYSTEM]})


def test_more_bytes_than_the_node_keeps(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    kept = ComputedSnapshots(tmp_path / "kept", 10_000)
    declared = DeclaredPrefixes({"a": {"messages": [SYSTEM]}}, tmp_path, kept)
    snapshot = Snapshot(tmp_path / "model", create(tmp_path / "model"))
    LanguageModel(snapshot, rows=1, window=512, prefixes=declared)
    snapshot.open()
    assert declared.prepare is not None
    with pytest.raises(Exception, match="more than 10,000 bytes, which this node keeps"):
        declared.prepare()


def test_two_models_cannot_share_declared_prefixes(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    declared = DeclaredPrefixes(
        {"a": {"messages": [SYSTEM]}}, tmp_path, ComputedSnapshots(tmp_path / "kept", 0)
    )
    snapshot = Snapshot(tmp_path / "model", create(tmp_path / "model"))
    LanguageModel(snapshot, rows=1, window=512, prefixes=declared)
    with pytest.raises(SettingsError, match="Two models have the declared prefixes"):
        LanguageModel(snapshot, rows=1, window=512, prefixes=declared)


def test_prefixes_with_a_damaged_list_are_computed_again(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    for _ in range(2):
        kept = ComputedSnapshots(tmp_path / "kept", 1 << 30)
        declared = DeclaredPrefixes({"a": {"messages": [SYSTEM]}}, tmp_path, kept)
        snapshot = Snapshot(tmp_path / "model", create(tmp_path / "model"))
        model = LanguageModel(snapshot, rows=1, window=512, prefixes=declared)
        snapshot.open()
        assert declared.prepare is not None
        declared.prepare()
        assert model.engine.prefixes is not None
        (listed,) = (tmp_path / "kept").glob("*/prefixes.json")
        assert listed.stat().st_size
        listed.write_text("")
