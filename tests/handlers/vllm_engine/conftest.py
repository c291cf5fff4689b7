"""A double of vLLM, and a model whose folder has a snapshot. Each byte is a token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pilotflame.handlers.language_model.contract import Delta, GenerationRequest
from pilotflame.handlers.vllm_engine.model import ENVIRONMENT, VllmModel
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot
from safetensors.torch import save_file
from tiny_tokenizer import THINKING, byte_tokenizer

DOUBLE = Path(__file__).parents[2] / "vllm_double"
MARKS = ("<tool_call>", "</tool_call>", "<think>", "</think>")


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    byte_tokenizer(THINKING, MARKS).save_pretrained(made)
    (made / "generation_config.json").write_text('{"temperature": 0.5, "top_k": 7}')
    torch.manual_seed(0)
    tensors = {f"layers.{number}.weight": torch.randn(8, 16) for number in range(3)}
    save_file(tensors | {"norm.weight": torch.randn(16).half()}, made / "model.safetensors")
    return made


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The class of the double's engine, whose `calls` are empty."""
    monkeypatch.syspath_prepend(str(DOUBLE))
    for name in ENVIRONMENT | {"PILOTFLAME_VLLM_OWNER": ""}:
        # `setup` sets these variables, and monkeypatch removes them again.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    from vllm.v1.engine.async_llm import AsyncLLM

    AsyncLLM.calls, AsyncLLM.separate = [], False
    yield AsyncLLM
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


@pytest.fixture
def snapshot(folder: Path) -> Snapshot:
    made = Snapshot(folder, create(folder))
    made.open()
    return made


class Started:
    """A model in a worker whose engine runs. `retired` counts how often it has ended its worker."""

    def __init__(self, snapshot: Snapshot, **arguments: Any) -> None:
        self.retired = 0
        self.model = VllmModel(snapshot, **arguments)
        asyncio.run(self.model.setup(SimpleNamespace(retire=self._retire)))
        self.engine: Any = self.model._engine

    def _retire(self) -> None:
        self.retired += 1

    def deltas(self, **fields: Any) -> list[Delta]:
        async def run() -> list[Delta]:
            return [delta async for delta in self.model.generate(GenerationRequest.model_validate(fields))]

        return asyncio.run(run())

    def text(self, **fields: Any) -> str:
        return "".join(delta.text for delta in self.deltas(**fields))

    def params(self) -> Any:
        """Return the SamplingParams of the last request."""
        return [one for one in self.engine.calls if isinstance(one, tuple) and len(one) == 4][-1][1]


@pytest.fixture
def start(vllm: Any, snapshot: Snapshot) -> Iterator[Callable[[], Started]]:
    """Starts an engine, which ends with the test."""
    made: list[Started] = []

    def begin() -> Started:
        made.append(Started(snapshot))
        return made[-1]

    yield begin
    for one in made:
        one.model.teardown()


@pytest.fixture
def started(start: Callable[[], Started]) -> Started:
    return start()
