"""Requests, their answers and the life of the engine, with the double of vLLM."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
import sys
from dataclasses import fields, is_dataclass
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pilotflame.errors import HandlerFailed, InputInvalid, Overloaded, SnapshotChanged, SnapshotError
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.vllm_engine.model import VllmModel, configured
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import NeededPart
from pilotflame.snapshot.handle import Snapshot

CHAT = [{"role": "user", "content": "Rain?"}]
TOOL = {"function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'


# Classes that the double defines in other modules than vLLM. Both also offer them in the modules on the
# right.
OFFERED = {
    "vllm.config.device": "vllm.config",
    "vllm.config.load": "vllm.config",
    "vllm.config.parallel": "vllm.config",
    "vllm.config.vllm": "vllm.config",
    "vllm.platforms.interface": "vllm.platforms",
    "vllm.utils.system_utils": "vllm.v1.engine.utils",
    "vllm.v1.executor.abstract": "vllm.v1.executor",
    "vllm.config.structured_outputs": "vllm.config",
    "vllm.model_executor.model_loader.base_loader": "vllm.model_executor.model_loader",
}


def recorded() -> dict[str, list[str]]:
    """Return vLLM's parameters and fields by MODULE:NAME. AsyncEngineArgs has the fields of its base, too."""
    names: dict[str, list[str]] = json.loads((Path(__file__).parent / "signatures.json").read_text())["names"]
    base = names.pop("vllm.engine.arg_utils:EngineArgs")
    names["vllm.engine.arg_utils:AsyncEngineArgs"] += base
    return names


def doubled(name: str) -> Any:
    """Return a class, a method or a function of the double by its name in `recorded`."""
    module, _, inner = name.partition(":")
    return reduce(getattr, inner.split("."), import_module(OFFERED.get(module, module)))


@pytest.mark.parametrize("name", recorded())
def test_the_double_has_only_names_of_vllm(vllm: Any, name: str) -> None:
    found, real = doubled(name), recorded()[name]
    if is_dataclass(found):
        assert {field.name for field in fields(found)} <= {*real}
    elif not inspect.isclass(found):
        parameters = inspect.signature(found).parameters.values()
        shown = [
            one.name
            for one in parameters
            if one.kind is not one.VAR_KEYWORD and one.kind is not one.VAR_POSITIONAL
        ]
        # Parameters that are left out may be passed by name only, so the order of the others must be the same.
        assert [one for one in real if one in shown] == shown
        if "*" in real:
            by_name = real[real.index("*") :]
            assert all(one.kind is one.KEYWORD_ONLY for one in parameters if one.name in by_name)


def test_the_engine_gets_the_snapshot_and_the_arguments(vllm: Any, snapshot: Snapshot, started: Any) -> None:
    given = started.engine.vllm_config.engine_args
    assert (given.model, given.load_format) == (str(snapshot.path), "pilotflame")
    assert (given.enable_sleep_mode, given.scheduling_policy) == (True, "priority")
    assert given.structured_outputs_config.backend == "guidance"
    assert given.enable_prefix_caching is False
    assert not given.enable_lora
    assert [name for name, *_ in started.engine.core.loaded] == [
        one.name for one in snapshot.manifest.tensors
    ]
    assert os.environ["VLLM_NO_USAGE_STATS"] == "1"


def test_without_the_executor_of_one_process_vllm_chooses_one(
    vllm: Any, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.executor import uniproc_executor

    monkeypatch.delattr(uniproc_executor, "UniProcExecutor")
    assert configured(str(snapshot.path), {}).parallel_config.distributed_executor_backend is None
    monkeypatch.setitem(sys.modules, uniproc_executor.__name__, None)
    assert VllmModel(snapshot)._lack() == (
        "this version of vLLM has no vllm.v1.executor.uniproc_executor:UniProcExecutor as expected"
    )


def test_arguments_that_follow_from_the_snapshot_are_refused(snapshot: Snapshot) -> None:
    with pytest.raises(TypeError, match="load_format itself"):
        VllmModel(snapshot, load_format="auto")


def test_an_answer_comes_piece_by_piece(started: Any) -> None:
    deltas = started.deltas(prompt="Flä")
    assert "".join(delta.text for delta in deltas) == "Flä"
    assert [len(delta.tokens) for delta in deltas] == [1] * 5
    first, last = deltas[0], deltas[-1]
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (4, 1)
    assert last.usage is not None
    assert last.usage.completion_tokens == 5
    assert (last.finish_reason, last.stop_reason) == ("stop", None)
    assert {delta.finish_reason for delta in deltas[:-1]} == {None}
    assert "abort" not in started.engine.calls


def test_several_tokens_may_come_at_once(started: Any, monkeypatch: pytest.MonkeyPatch, vllm: Any) -> None:
    monkeypatch.setattr(vllm, "tokens_at_once", 3)
    monkeypatch.setattr(vllm, "cached", 2)
    deltas = started.deltas(prompt="abcde", top_logprobs=2)
    assert [delta.text for delta in deltas] == ["abc", "de"]
    assert [len(delta.tokens) for delta in deltas] == [3, 3]
    assert [len(delta.logprobs or []) for delta in deltas] == [3, 3]
    assert deltas[-1].usage is not None
    assert deltas[-1].usage.cached_tokens == 2


def test_logprobs_have_the_likeliest_tokens(started: Any) -> None:
    (first, *_) = started.deltas(prompt="a", top_logprobs=3)
    assert first.logprobs is not None
    (found,) = first.logprobs
    assert (found.token, found.logprob) == ("a", -0.5)
    assert [value for *_, value in found.top] == [-0.5, -2.0, -3.0]
    (chosen, *_) = started.deltas(prompt="a", top_logprobs=0)
    assert chosen.logprobs is not None
    assert chosen.logprobs[0].top == []
    assert started.deltas(prompt="a")[0].logprobs is None


def test_the_tokens_of_a_prompt_need_no_engine(started: Any) -> None:
    before = list(started.engine.calls)
    (found,) = started.deltas(prompt="ab", prompt_only=True)
    assert (found.finish_reason, found.text, len(found.prompt.ids)) == ("length", "", 2)
    assert started.engine.calls == before


def test_several_answers_and_the_prompt_before_them(started: Any) -> None:
    deltas = started.deltas(prompt="ab", n=3, echo=True)
    for index in range(3):
        mine = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in mine) == "abab"
        assert mine[-1].finish_reason == "stop"
    assert deltas[-1].usage is not None
    assert (deltas[-1].usage.prompt_tokens, deltas[-1].usage.completion_tokens) == (2, 9)


@pytest.mark.parametrize("echo", [False, True])
def test_each_answer_has_the_logprobs_of_its_prompt(started: Any, echo: bool) -> None:
    deltas = started.deltas(prompt="abc", n=2, echo=echo, prompt_logprobs=1)
    for index in range(2):
        first, *others = [delta for delta in deltas if delta.index == index]
        assert [(one.token, one.logprob, one.rank) for one in first.prompt_logprobs or ()] == [
            ("a", 0.0, None), ("b", -0.25, 2), ("c", -0.25, 2),
        ]  # fmt: skip
        assert first.text == ("abc" if echo else "")
        assert all(delta.prompt_logprobs is None for delta in others)
    assert not any(delta.prompt_logprobs for delta in started.deltas(prompt="abc"))


@pytest.mark.parametrize(
    ("fields", "text", "finish", "stop"),
    [
        ({"stop": ["cd"]}, "ab", "stop", "cd"),
        ({"stop": ["cd"], "include_stop_str_in_output": True}, "abcd", "stop", "cd"),
        ({"max_tokens": 3}, "abc", "length", None),
    ],
)
def test_why_an_answer_ends(started: Any, fields: dict[str, Any], text: str, finish: str, stop: Any) -> None:
    deltas = started.deltas(prompt="abcdef", **fields)
    assert "".join(delta.text for delta in deltas) == text
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == (finish, stop)


def test_a_stop_token_is_told(started: Any) -> None:
    (token,) = started.model.tokenizer.encode("c")
    last = started.deltas(prompt="abcd", stop_token_ids=[token])[-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", token)


def test_reasoning_and_calls_are_parts_of_their_own(started: Any) -> None:
    # The double writes the prompt again, so the prompt is the answer.
    chat = [{"role": "user", "content": f"Hm.</think>I ask. {CALL}"}]
    fields = {"chat_template_kwargs": {"enable_thinking": True}, "tools": [TOOL]}
    deltas = started.deltas(messages=chat, **fields, include_stop_str_in_output=True, stop=["never"])
    (call,) = [call for delta in deltas for call in delta.tool_calls]
    arguments = call.arguments + "".join(delta.arguments for delta in deltas)
    assert (call.name, json.loads(arguments)) == ("weather", {"city": "Ulm"})
    assert deltas[-1].finish_reason == "tool_calls"
    assert "".join(delta.reasoning for delta in deltas).endswith("Hm.")
    assert "<end>" not in "".join(delta.text for delta in deltas)
    assert not started.params().skip_special_tokens


def test_closing_the_iterator_aborts_the_request(started: Any) -> None:
    async def leave() -> None:
        found = started.model.generate(GenerationRequest(prompt="wait"))
        async for _ in found:
            break
        await found.aclose()

    asyncio.run(leave())
    assert started.engine.calls[-1] == "abort"


def test_a_cancelled_call_aborts_the_request(started: Any) -> None:
    async def leave() -> None:
        begun = asyncio.Event()

        async def run() -> None:
            async for _ in started.model.generate(GenerationRequest(prompt="wait")):
                begun.set()

        task = asyncio.create_task(run())
        await asyncio.wait_for(begun.wait(), 10)
        task.cancel()
        await asyncio.wait([task])

    asyncio.run(leave())
    assert started.engine.calls[-1] == "abort"


def test_a_prompt_that_is_too_long_is_refused(started: Any) -> None:
    with pytest.raises(
        InputInvalid,
        match=r"maximum context length is 512 tokens: the prompt is too long, with .* and max_tokens 510",
    ):
        started.deltas(prompt="0123456789", max_tokens=510)
    started.deltas(prompt="0123456789")
    assert started.params().max_tokens == 502


def test_a_request_that_vllm_refuses_is_invalid(started: Any) -> None:
    with pytest.raises(InputInvalid, match="vLLM refuses the request: min_tokens"):
        started.deltas(prompt="a", min_tokens=5, max_tokens=2)


def test_a_failed_request_and_a_full_queue_have_types(
    started: Any, monkeypatch: pytest.MonkeyPatch, vllm: Any
) -> None:
    from vllm.exceptions import QueueOverflowError

    monkeypatch.setattr(vllm, "failure", ValueError("a fault inside"))
    with pytest.raises(HandlerFailed, match="a fault inside"):
        started.deltas(prompt="a")
    monkeypatch.setattr(vllm, "failure", QueueOverflowError())
    with pytest.raises(Overloaded, match="currently busy"):
        started.deltas(prompt="a")
    assert started.retired == 0


def test_an_answer_that_the_engine_aborts_is_an_error(started: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = started.engine._outputs

    async def aborted(*given: Any) -> Any:
        async for output in real(*given):
            output.outputs[0].finish_reason = "abort"
            yield output

    monkeypatch.setattr(started.engine, "_outputs", aborted)
    with pytest.raises(HandlerFailed, match=r"before its end \(abort\)"):
        started.deltas(prompt="a")


def test_if_the_engine_dies_the_worker_retires(
    vllm: Any, start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm, "separate", True)
    started = start()
    os.kill(started.engine.core.process.pid, signal.SIGKILL)
    started.engine.core.process.join(10)
    with pytest.raises(HandlerFailed, match="engine has ended") as caught:
        started.deltas(prompt="a")
    assert caught.value.details == {"cause": "engine_dead"}
    assert started.retired == 1
    from vllm.v1.engine.exceptions import EngineDeadError

    with pytest.raises(EngineDeadError):
        asyncio.run(started.model.wake())
    started.model.teardown()


def test_it_sleeps_and_wakes_and_ends(started: Any) -> None:
    asyncio.run(started.model.sleep())
    asyncio.run(started.model.wake())
    assert started.text(prompt="ab") == "ab"
    asyncio.run(started.model.sleep())
    started.model.teardown()
    assert started.engine.calls[:2] == [("sleep", 1), "wake_up"]
    assert started.engine.calls[-1] == "shutdown"
    assert not started.engine.core.alive
    with pytest.raises(HandlerFailed, match="does not run"):
        started.deltas(prompt="a")


def test_weights_that_have_changed_are_an_error_of_the_start(vllm: Any, folder: Path, tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    snapshot = Snapshot(tmp_path, create(tmp_path))
    weights.write_bytes(weights.read_bytes()[:-1])
    model = VllmModel(snapshot)
    with pytest.raises(SnapshotChanged, match="has 1871 bytes"):
        asyncio.run(model.setup(SimpleNamespace(retire=print)))


def test_a_part_of_a_snapshot_is_refused(folder: Path) -> None:
    manifest = create(folder).model_copy(update={"part": NeededPart.model_construct()})
    with pytest.raises(SnapshotError, match="whole snapshot"):
        VllmModel(Snapshot(folder, manifest))
