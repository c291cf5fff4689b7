"""A language model in this process: what the engine gets for a request."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import torch
from live import gateway_here
from pilotflame.errors import InputInvalid, OutputInvalid
from pilotflame.handlers.caller import CallOrigin, origin
from pilotflame.handlers.language_model.admission import NO_TARGETS
from pilotflame.handlers.language_model.answer_form import AnswerForms
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.language_model.engine import Engine
from pilotflame.handlers.language_model.engine_steps import Token
from pilotflame.handlers.language_model.model import LanguageModel
from pilotflame.handlers.sampling.prompt_logprobs import PromptLogprobs
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot
from shared_memory import copies_kb
from tiny_causal import tiny
from tiny_models import STORED_TYPES, retype
from tiny_tokenizer import byte_tokenizer
from transformers import AutoModelForCausalLM, GPT2PreTrainedModel

from .test_declared_prefixes import HANDLER, write_model


def small_model(folder: Path) -> LanguageModel:
    write_model(folder)
    snapshot = Snapshot(folder, create(folder))
    model = LanguageModel(snapshot, rows=2, window=500)
    snapshot.open()
    return model


async def test_the_first_of_several_answers_decides_whether_a_request_is_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(tmp_path)
    targets: list[Any] = []
    others = set[tuple[int, str]]()
    generate = Engine.generate

    def noted(self: Engine, *arguments: Any) -> AsyncGenerator[Token]:
        targets.append(arguments[5])
        others.add((arguments[4], arguments[7]))
        return generate(self, *arguments)

    monkeypatch.setattr(Engine, "generate", noted)
    request = GenerationRequest(prompt="Go", n=3, max_tokens=4, first_token_by=time.time() + 60, token_ms=6e4)
    origin.set(CallOrigin("a1", 1))
    ended = {delta.index async for delta in model.generate(request) if delta.finish_reason}
    assert ended == {0, 1, 2}
    assert [one != NO_TARGETS for one in targets] == [True, False, False]
    # The tenant and the priority of the call reach each of its sequences.
    assert others == {(-10, "a1")}


async def test_the_logprobs_of_a_prompt_are_not_kept_and_have_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(tmp_path)
    made: list[PromptLogprobs] = []

    class Noted(PromptLogprobs):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr("pilotflame.handlers.language_model.model.PromptLogprobs", Noted)
    request = GenerationRequest(prompt="Go on", max_tokens=3, prompt_logprobs=1)
    async for delta in model.generate(request):
        assert (delta.prompt_logprobs is None) == bool(delta.tokens)
        assert [one.found for one in made] == [[]]
    with pytest.raises(InputInvalid, match="n 1 only"):
        await anext(model.generate(request.model_copy(update={"n": 2})))


async def test_an_answer_that_a_stop_has_cut_is_checked_in_a_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = small_model(tmp_path)
    seen: list[Any] = []
    check = AnswerForms.check

    def noted(self: AnswerForms, *arguments: Any, **named: Any) -> None:
        seen.append((threading.current_thread().name.partition("_")[0], named["cut"]))
        check(self, *arguments, **named)

    monkeypatch.setattr(AnswerForms, "check", noted)
    [first, second] = model.tokenizer.encode("ab", add_special_tokens=False)
    asked: dict[str, Any] = {"prompt": "Go", "output": {"regex": "ab"}, "stop": ["zz"]}
    texts = [delta.text async for delta in model.generate(GenerationRequest(**asked))]
    assert "".join(texts) == "ab"
    with pytest.raises(OutputInvalid):
        _ = [one async for one in model.generate(GenerationRequest(**asked, stop_token_ids=[second]))]
    assert seen == [("planner", None), ("planner", [first])]


MIXES = [
    *(
        ("llama", said, stored)
        for said in (None, "float32", "bfloat16", "float16")
        for stored in STORED_TYPES
    ),
    *((kind, said, STORED_TYPES[3]) for kind in ("gemma2", "gpt2") for said in (None, "bfloat16", "float16")),
]


def written(folder: Path, kind: str, said: str | None, stored: str) -> tuple[Any, LanguageModel]:
    """Write a model, and return it as transformers and as the engine load it. `said` is the type in config.json."""
    tiny(kind).save_pretrained(folder)
    byte_tokenizer("").save_pretrained(folder)
    retype(folder, said, stored)
    snapshot = Snapshot(folder, create(folder))
    model = LanguageModel(snapshot, rows=2, window=500)
    snapshot.open()
    return AutoModelForCausalLM.from_pretrained(folder).eval(), model


def compare_weights(right: Any, model: LanguageModel) -> None:
    weights = dict(model.causal.module.state_dict())
    for name, tensor in right.state_dict().items():
        assert weights[name].dtype == tensor.dtype, name
        assert torch.equal(weights[name], tensor), name


@pytest.mark.parametrize(("kind", "said", "stored"), MIXES)
def test_weights_of_another_type_than_the_config_says(
    tmp_path: Path, kind: str, said: str | None, stored: str
) -> None:
    """transformers uses the type in config.json or, if there is none, the type in the file."""
    right, model = written(tmp_path, kind, said, stored)
    compare_weights(right, model)
    rows, ids = model.causal.new_rows(8), [[5, 17, 60, 3]]
    rows.lengths = [0]
    with torch.inference_mode():
        wanted = right(torch.tensor(ids)).logits[:, -1]
    # The engine adds a mask, so the last bits may differ.
    torch.testing.assert_close(model.causal.forward(rows, ids), wanted)


@pytest.mark.parametrize("said", ["float16", "bfloat16", "float32"])
def test_what_a_class_keeps_in_float32_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    monkeypatch.setattr(GPT2PreTrainedModel, "_keep_in_fp32_modules", ["ln_1", "mlp.c_fc.weight"])
    monkeypatch.setattr(GPT2PreTrainedModel, "_keep_in_fp32_modules_strict", ["ln_f"])
    right, model = written(tmp_path, "gpt2", said, "bfloat16")
    compare_weights(right, model)
    assert right.transformer.ln_f.weight.dtype == torch.float32


async def test_workers_share_what_was_converted(tmp_path: Path) -> None:
    written(tmp_path / "weights", "llama", "float32", "float16")
    async with gateway_here(tmp_path / "state", drain_s=1.0) as gateway:
        given = {"snapshot": str(tmp_path / "weights"), "concurrency": 4, "scale.min": 2}
        function = await gateway.deploy(HANDLER, given, name="llm")
        # A warning says that the type differs. The workers are forked and share the converted weights; a
        # spawned worker would have its own copy.
        [warning] = function.described["warnings"]
        assert warning.startswith("Most weights do not have config.json's torch.float32.")
        await function.settled(ready=2)
        pids = await function.pids("worker")
        assert [copies_kb(pid) for pid in pids] == [0, 0]
