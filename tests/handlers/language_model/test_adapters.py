"""Each row of a batch uses its own adapter. Models, adapters and mappings are real, and peft's own model is the reference."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from pilotflame.errors import SnapshotError, SnapshotMismatch
from pilotflame.handlers.language_model.adapters import CONFIG, ModelAdapters
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.prefixes import Prefix, Prefixes, write
from pilotflame.handlers.language_model.schedule import ChunkTimes
from pilotflame.handlers.sampling.sampler import Sampler
from pilotflame.snapshot.adapters import Adapters
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import ADAPTERS, Snapshot
from tiny_adapters import with_adapter, write_adapter
from tiny_causal import KINDS, generated, tiny
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from .test_engine import GREEDY, prompts

NAMES = ("red", "green", "blue")


def written(folder: Path, kind: str = "llama") -> Adapters:
    """Return three adapters for a model of this kind."""
    for seed, name in enumerate(NAMES):
        write_adapter(tiny(kind), folder / name, seed)
    return opened(folder)


def opened(folder: Path) -> Adapters:
    places = ((name, folder / name) for name in NAMES)
    return Adapters(Snapshot(place, create(place), name=f"{ADAPTERS}{name}") for name, place in places)


def model_of(
    folder: Path, kind: str = "llama", most: int = 8, pinned: tuple[str, ...] = ()
) -> tuple[CausalModel, ModelAdapters]:
    module = tiny(kind)
    adapters = ModelAdapters(module, written(folder, kind), most, pinned)
    return CausalModel(module, module.config, adapters), adapters


async def tokens(
    engine: Engine, adapters: ModelAdapters, name: str, prompt: list[int], new: int
) -> list[int]:
    if name:
        await adapters.arrive(name)
    sampler = Sampler(GREEDY, prompt, ())
    return [token.id async for token in engine.generate(prompt, sampler, (), new, adapter=name)]


def wanted(kind: str, folder: Path, name: str) -> PreTrainedModel:
    return with_adapter(tiny(kind), folder / name) if name else tiny(kind)


@pytest.mark.parametrize("kind", KINDS)
async def test_the_rows_of_a_batch_have_their_own_adapters(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 7)
    # The model keeps fewer adapters (`most`) than the callers use.
    model, adapters = model_of(tmp_path, kind, most=1)
    write(model, [Prefix("all", tuple(range(3, 43)))], {}, tmp_path / "prefixes")
    stored = Prefixes(Snapshot(tmp_path / "prefixes", create(tmp_path / "prefixes")))
    stored.read({})
    stored.snapshot.open()
    engine = Engine(model, 4, 4000, stored)
    drawn = random.Random(5)
    # Half of the prompts begin with the stored prefix. It has the keys and values of the model without an adapter, so rows with an
    # adapter must not use it.
    given = [[*range(3, 43), *one] if number % 2 else one for number, one in enumerate(prompts(9, 30))]
    names = [drawn.choice(("", *NAMES)) for _ in given]
    found = await asyncio.gather(
        *(tokens(engine, adapters, name, one, 12) for name, one in zip(names, given, strict=True))
    )
    modules = {name: wanted(kind, tmp_path, name) for name in {*names}}
    assert found == [generated(modules[name], one, 12) for name, one in zip(names, given, strict=True)]
    assert len({*names}) > 2


async def test_the_least_recently_used_adapter_leaves(tmp_path: Path) -> None:
    model, adapters = model_of(tmp_path, most=2, pinned=("red",))
    engine = Engine(model, 2, 4000)
    seen = []
    for name in ("red", "green", "blue", "blue", "green"):
        await tokens(engine, adapters, name, [5, 6], 3)
        seen.append(adapters.loaded)
    assert seen == [["red"], ["red", "green"], ["red", "blue"], ["red", "blue"], ["red", "green"]]


async def test_an_adapter_that_rows_use_stays(tmp_path: Path) -> None:
    model, adapters = model_of(tmp_path, most=1)
    engine = Engine(model, 4, 4000)
    found = await asyncio.gather(*(tokens(engine, adapters, name, [5, 6], 40) for name in NAMES))
    assert found == [generated(wanted("llama", tmp_path, name), [5, 6], 40) for name in NAMES]
    await tokens(engine, adapters, "red", [5, 6], 3)
    assert adapters.loaded == ["red"]


@pytest.mark.parametrize("first", ["red", "green"])
async def test_an_adapter_that_does_not_fit_fails_alone(tmp_path: Path, first: str) -> None:
    written(tmp_path)
    file = tmp_path / "red" / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | {"r": 8}))
    module = tiny("llama")
    adapters = ModelAdapters(module, opened(tmp_path), 8)
    engine = Engine(CausalModel(module, module.config, adapters), 4, 4000)
    if first == "green":
        await tokens(engine, adapters, "green", [5, 6], 3)
    for _ in range(2):
        with pytest.raises(SnapshotError, match="red does not fit"):
            await tokens(engine, adapters, "red", [5, 6], 8)
    for name in ("", "green"):
        found = await tokens(engine, adapters, name, [5, 6], 8)
        assert found == generated(wanted("llama", tmp_path, name), [5, 6], 8)
    assert adapters.loaded == ["green"]


async def test_an_adapter_of_a_layer_without_rows_fails_alone(tmp_path: Path) -> None:
    # OPT joins the rows before this layer.
    module: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("opt", vocab_size=97, hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4)
    ).eval()  # fmt: skip
    write_adapter(module, tmp_path / "red", 1, ["fc1"])
    snapshot = Snapshot(tmp_path / "red", create(tmp_path / "red"), name=f"{ADAPTERS}red")
    adapters = ModelAdapters(module, Adapters([snapshot]), 8)
    engine = Engine(CausalModel(module, module.config, adapters), 4, 4000)
    plain, error = await asyncio.gather(
        tokens(engine, adapters, "", [5, 6], 20),
        tokens(engine, adapters, "red", [5, 6, 7], 20),
        return_exceptions=True,
    )
    assert isinstance(error, SnapshotMismatch)
    assert "red does not fit" in error.message
    assert plain == generated(module, [5, 6], 20)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"use_dora": True}, "use_dora = True"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias = 'all'"),
        ({"peft_type": "IA3"}, "peft_type = 'IA3'"),
        ({"r": None, "peft_type": None}, "peft_type = None"),
        ({"target_parameters": ["gate_up_proj"]}, "target_parameters"),
        (None, "no valid adapter_config.json"),
    ],
)  # fmt: skip
def test_adapters_that_cannot_share_a_batch_are_refused(
    tmp_path: Path, change: dict[str, object] | None, told: str
) -> None:
    written(tmp_path)
    file = tmp_path / "green" / CONFIG
    file.write_text("{" if change is None else json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SnapshotError, match=told):
        ModelAdapters(tiny("llama"), opened(tmp_path), 8)


def test_a_pinned_adapter_that_there_is_not(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="no adapter 'grey'"):
        ModelAdapters(tiny("llama"), written(tmp_path), 8, ["grey"])


@pytest.mark.parametrize("name", ["0", "q_proj", "weight", "default", "lora_A"])
async def test_names_that_are_also_parts_of_tensors_names(tmp_path: Path, name: str) -> None:
    write_adapter(tiny("llama"), tmp_path / "one", 1)
    snapshot = Snapshot(tmp_path / "one", create(tmp_path / "one"), name=f"{ADAPTERS}{name}")
    module = tiny("llama")
    adapters = ModelAdapters(module, Adapters([snapshot]), 8)
    engine = Engine(CausalModel(module, module.config, adapters), 4, 4000)
    found = await tokens(engine, adapters, name, [5, 6], 8)
    assert found == generated(wanted("llama", tmp_path, "one"), [5, 6], 8)
