"""Adapters as requests of vLLM."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pilotflame.errors import InputInvalid, SnapshotError
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.vllm_engine.model import VllmModel
from pilotflame.snapshot.adapters import Adapters
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import ADAPTERS, Snapshot
from safetensors.torch import save_file


def adapters(folder: Path, **ranks: Any) -> Adapters:
    made = []
    for name, rank in ranks.items():
        (folder / name).mkdir()
        (folder / name / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
        save_file({"a": torch.ones(2)}, folder / name / "adapter_model.safetensors")
        made.append(Snapshot(folder / name, create(folder / name), name=ADAPTERS + name))
    return Adapters(made)


async def ask(model: VllmModel, **fields: Any) -> None:
    async for _ in model.generate(GenerationRequest.model_validate({"prompt": "a", **fields})):
        pass


def test_a_request_names_its_adapter(vllm: Any, snapshot: Snapshot, tmp_path: Path) -> None:
    model = VllmModel(snapshot, adapters=adapters(tmp_path, formal=4, legal=24))

    async def run() -> list[Any]:
        await model.setup(SimpleNamespace(retire=print))
        for name in ("legal", None, "formal"):
            await ask(model, adapter=name)
        with pytest.raises(InputInvalid, match=r"no adapter 'gone' \(there: formal, legal\)"):
            await ask(model, adapter="gone")
        return [one[2] for one in vllm.calls]

    try:
        legal, plain, formal = asyncio.run(run())
    finally:
        model.teardown()
    assert plain is None
    assert (legal.lora_name, formal.lora_name) == ("legal", "formal")
    assert (legal.lora_int_id, formal.lora_int_id) == (2, 1)
    assert {path.name for path in Path(legal.lora_path).iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_the_engine_learns_ranks_and_numbers(vllm: Any, snapshot: Snapshot, tmp_path: Path) -> None:
    model = VllmModel(snapshot, adapters=adapters(tmp_path, formal=4, legal=24), max_loras=5)
    asyncio.run(model.setup(SimpleNamespace(retire=print)))
    given = model._engine.vllm_config.engine_args
    model.teardown()
    assert (given.enable_lora, given.max_loras, given.max_lora_rank) == (True, 5, 32)


def test_a_function_without_adapters_names_none(started: Any) -> None:
    with pytest.raises(InputInvalid, match=r"no adapter 'formal' \(it has none\)"):
        started.deltas(prompt="a", adapter="formal")


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"peft_type": "LOHA", "r": 4}, "peft_type = 'LOHA'"),
        ({"peft_type": "LORA", "r": 1024}, "r = 1024"),
        ({"peft_type": "LORA"}, "no valid adapter_config.json"),
    ],
)
def test_an_adapter_that_vllm_does_not_take_is_refused(
    snapshot: Snapshot, tmp_path: Path, config: dict[str, Any], told: str
) -> None:
    found = adapters(tmp_path, other=1)
    (tmp_path / "other" / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(SnapshotError, match=told):
        VllmModel(snapshot, adapters=found)
