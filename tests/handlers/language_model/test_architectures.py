"""The engine makes the tokens of `generate` for 32 architectures of transformers. `make architectures` runs this with three versions."""

from __future__ import annotations

import asyncio
import copy
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from pilotflame.handlers.language_model import ragged_attention
from pilotflame.handlers.language_model.adapters import ModelAdapters
from pilotflame.handlers.language_model.admission import Admission
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.pass_slices import PassSlices
from pilotflame.handlers.language_model.prefixes import Prefix, Prefixes, write
from pilotflame.handlers.language_model.schedule import ChunkTimes
from pilotflame.snapshot.adapters import Adapters
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import ADAPTERS, Snapshot
from tiny_adapters import with_adapter, write_adapter
from tiny_causal import VOCABULARY, generated
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from .test_adapters import tokens
from .test_engine import prompts
from .test_engine import tokens as plain_tokens

pytestmark = pytest.mark.slow
NEW = 12
# If the two best logits lie closer, either token is right: one pass for many rows rounds in another way.
TIE = 1e-4
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
HEADS = {**GROUPED, "head_dim": 8}
EXPERTS = {
    **HEADS,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
OLD = {
    "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", GROUPED),
    "qwen2": ("qwen2", GROUPED),
    "qwen3": ("qwen3", HEADS),
    "mistral": ("mistral", {**GROUPED, "sliding_window": None}),
    "mistral, window": ("mistral", {**GROUPED, "sliding_window": 8}),
    "gemma": ("gemma", HEADS),
    "gemma2": ("gemma2", {**HEADS, "sliding_window": 8}),
    "gemma3": ("gemma3_text", {**HEADS, "sliding_window": 8}),
    "phi": ("phi", SIZES),
    "phi3": ("phi3", GROUPED),
    "gpt2": ("gpt2", OLD),
    "gpt_neox": ("gpt_neox", SIZES),
    "opt": ("opt", {**SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32}),
    "falcon": ("falcon", {**SIZES, "alibi": False, "new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, ALiBi": ("falcon", {**SIZES, "alibi": True, "multi_query": False}),
    "bloom": ("bloom", {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "mpt": ("mpt", {"vocab_size": VOCABULARY, "d_model": 32, "n_layers": 3, "n_heads": 4, "max_seq_len": 512}),
    "gpt_neo": ("gpt_neo", {
        "vocab_size": VOCABULARY, "hidden_size": 32, "num_layers": 4, "num_heads": 4, "max_position_embeddings": 512,
        "attention_types": [[["global", "local"], 2]], "window_size": 8, "bos_token_id": 1, "eos_token_id": 2,
    }),
    "gptj": ("gptj", {**OLD, "rotary_dim": 4}),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "gpt_oss": ("gpt_oss", {**EXPERTS, "sliding_window": 8}),
    "deepseek_v3": ("deepseek_v3", {
        **SIZES, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
        "moe_intermediate_size": 16, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
        "v_head_dim": 8, "first_k_dense_replace": 1,
    }),
    "cohere": ("cohere", GROUPED),
    "cohere2": ("cohere2", {**HEADS, "sliding_window": 8}),
    "olmo2": ("olmo2", GROUPED),
    "granite": ("granite", GROUPED),
    "smollm3": ("smollm3", GROUPED),
    "stablelm": ("stablelm", GROUPED),
    "starcoder2": ("starcoder2", GROUPED),
    "llama4": ("llama4_text", {**EXPERTS, "attention_chunk_size": 16, "intermediate_size_mlp": 48}),
    "lfm2": ("lfm2", {**GROUPED, "layer_types": ["conv", "full_attention", "conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
}  # fmt: skip
# Version 4.57 runs these, and later versions run all.
TRIED_ON_4 = {
    "llama", "qwen2", "qwen3", "mistral, window", "gemma2", "gemma3", "phi3", "gpt2", "bloom", "mixtral", "falcon", "gpt_oss"
}  # fmt: skip


def made(kind: str, fields: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **fields)
    model = AutoModelForCausalLM.from_config(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_the_tokens_are_those_of_generate(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if Version(transformers.__version__) < Version("5") and name not in TRIED_ON_4:
        pytest.skip("not tried with this version of transformers")
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 7)
    module = made(*ARCHITECTURES[name])
    for seed, adapter in enumerate(("red", "green")):
        write_adapter(module, tmp_path / adapter, seed)
    places = [(adapter, tmp_path / adapter) for adapter in ("red", "green")]
    snapshots = [Snapshot(place, create(place), name=f"{ADAPTERS}{adapter}") for adapter, place in places]
    adapters = ModelAdapters(module, Adapters(snapshots), 1)
    model = CausalModel(module, module.config, adapters)
    prefixes = None
    beginning = Prefix("all", tuple(range(3, 23)))
    if not model.why_alone:
        write(model, [beginning], {}, tmp_path / "prefixes")
        prefixes = Prefixes(Snapshot(tmp_path / "prefixes", create(tmp_path / "prefixes")))
        prefixes.read({})
        prefixes.snapshot.open()
    given = [[*beginning.ids, *one] if number % 3 == 0 else one for number, one in enumerate(prompts(21, 60))]
    # Every second sequence has an adapter.
    asked = [(("", "red", "", "green")[number % 4], prompt) for number, prompt in enumerate(given)]
    references = {"": copy.deepcopy(module)}
    references |= {name: with_adapter(module, tmp_path / name) for name in ("red", "green")}
    ties = 0
    for rows, some in ((1, asked[:2]), (4, asked[2:8]), (16, asked)):
        engine = Engine(model, rows, 4000, prefixes)
        found = await asyncio.gather(*(tokens(engine, adapters, name, one, NEW) for name, one in some))
        for (name, prompt), own in zip(some, found, strict=True):
            ties += same_until_a_tie(references[name], prompt, own)
    with capsys.disabled():
        why = f", alone: {model.why_alone}" if model.why_alone else ""
        print(f"{name}: {ties} of 29 sequences end in a tie{why}")
    assert ties <= 1


@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_layers_one_at_a_time_and_attention_row_by_row_have_the_same_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if Version(transformers.__version__) < Version("5") and name not in TRIED_ON_4:
        pytest.skip("not tried with this version of transformers")
    monkeypatch.setattr(ChunkTimes, "tokens_within", lambda *_: 9)
    monkeypatch.setattr(Admission, "chunk_s", lambda _, load: 1e-9 if load.rows else 0.0)
    monkeypatch.setattr(ragged_attention, "LEAST_MASKED", 0)
    advance, paused = PassSlices.advance, list[bool]()

    def noted(self: PassSlices, seconds: float) -> Tensor | None:
        paused.append(True)
        return advance(self, seconds)

    monkeypatch.setattr(PassSlices, "advance", noted)
    module = made(*ARCHITECTURES[name])
    model = CausalModel(module, module.config)
    engine, given = Engine(model, 4, 4000), prompts(8, 60)
    found = await asyncio.gather(*(plain_tokens(engine, one, NEW) for one in given))
    assert sum(same_until_a_tie(module, one, own) for one, own in zip(given, found, strict=True)) <= 1
    assert bool(paused) is not bool(model.why_alone)


def same_until_a_tie(module: Any, prompt: list[int], own: list[int]) -> bool:
    """Return True if a sequence differs from `generate` at a tie, and False if it is the same. Fail if it differs elsewhere."""
    wanted = generated(module, prompt, NEW)
    if own == wanted:
        return False
    at = next(index for index, (one, other) in enumerate(zip(own, wanted, strict=True)) if one != other)
    with torch.inference_mode():
        logits = module(torch.tensor([[*prompt, *wanted[:at]]])).logits[0, -1]
    best = sorted((float(logits[own[at]]), float(logits[wanted[at]])))
    assert all(later - earlier <= TIE for earlier, later in pairwise(best)), (at, best)
    return True
