"""Requests of chats and completions: values that ask for nothing, and the spellings of other servers."""

from __future__ import annotations

from typing import Any

import pytest
from pilotflame.errors import BadInput
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.sampling.grammar import OutputFormat
from pilotflame.runtime.front.http.requests import validate
from pilotflame.runtime.plugins.completions.requests import ChatRequest, CompletionRequest, supported

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "Hi"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "null"}}}
# The fields that vLLM's requests for chats and for completions share, with vLLM's defaults.
SHARED: dict[str, Any] = {
    "frequency_penalty": None, "logit_bias": None, "max_tokens": None, "n": 1, "presence_penalty": None, "seed": None, "stop": [],
    "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None, "use_beam_search": False, "top_k": None,
    "min_p": None, "repetition_penalty": None, "watermarking": None, "length_penalty": 1.0, "stop_token_ids": [],
    "include_stop_str_in_output": False, "ignore_eos": False, "min_tokens": 0, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "truncate_prompt_tokens": None, "truncation_side": None, "prompt_logprobs": None,
    "logprob_token_ids": None, "allowed_token_ids": None, "bad_words": [], "response_format": None, "structured_outputs": None, "priority": 0,
    "request_id": "r", "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None, "routed_experts_prompt_start": 0,
    "return_token_offsets": False, "return_mm_kwargs": True, "cache_salt": None, "kv_transfer_params": None, "ec_transfer_params": None,
    "vllm_xargs": None, "repetition_detection": None, "thinking_token_budget": None, "stream_interval": None, "echo": False,
}  # fmt: skip
OF_CHATS: dict[str, Any] = {
    "logprobs": False, "top_logprobs": 0, "max_completion_tokens": None, "tools": None, "tool_choice": "none", "reasoning_effort": None,
    "include_reasoning": True, "parallel_tool_calls": True, "add_generation_prompt": True, "continue_final_message": False,
    "add_special_tokens": False, "documents": None, "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None,
    "mm_processor_kwargs": None, "return_prompt_text": None, "audio": None, "functions": [], "modalities": ["text"], "prediction": None,
}  # fmt: skip
OF_COMPLETIONS: dict[str, Any] = {
    "logprobs": None,
    "suffix": None,
    "prompt_embeds": None,
    "add_special_tokens": True,
    "best_of": 1,
}


def chat(**fields: Any) -> GenerationRequest:
    asked = validate(ChatRequest, supported({**CHAT, **fields}), "")
    asked.check()
    return asked.events()[0]


def completion(**fields: Any) -> GenerationRequest:
    asked = validate(CompletionRequest, supported({**PROMPT, **fields}), "")
    asked.check()
    return asked.events()[0]


@pytest.mark.parametrize(("field", "value"), [*SHARED.items(), *OF_CHATS.items()])
def test_a_default_of_vllms_chats_is_as_absent(field: str, value: Any) -> None:
    for sent in (value, None):
        found, plain = chat(**{field: sent}), chat()
        assert found.model_copy(update={"add_special_tokens": None}) == plain


@pytest.mark.parametrize(("field", "value"), [*SHARED.items(), *OF_COMPLETIONS.items()])
def test_a_default_of_vllms_completions_is_as_absent(field: str, value: Any) -> None:
    for sent in (value, None):
        found, plain = completion(**{field: sent}), completion()
        assert found.model_copy(update={"add_special_tokens": None}) == plain


@pytest.mark.parametrize(
    "fields",
    [
        {"stop": ""}, {"stop": [""]}, {"logit_bias": {}}, {"stream_options": {}}, {"response_format": {}}, {"structured_outputs": {}},
        {"structured_outputs": {"json": None, "json_object": False, "regex": None, "whitespace_pattern": None, "disable_any_whitespace": False}},
        {"response_format": {"type": "text", "json_schema": None, "schema": None, "value": None}}, {"chat_template_kwargs": {}},
        {"stream_options": {"include_usage": None, "continuous_usage_stats": None}, "stream": True}, {"bad_words": None, "documents": []},
        {"tools": [], "tool_choice": "auto"}, {"tools": None, "tool_choice": None}, {"mm_processor_kwargs": {}, "vllm_xargs": {}},
    ],
)  # fmt: skip
def test_empty_options_ask_for_nothing(fields: dict[str, Any]) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("use_beam_search", True), ("skip_special_tokens", False),
        ("include_reasoning", False), ("web_search_options", {}), ("return_token_ids", True),
    ],
)  # fmt: skip
def test_a_value_that_asks_for_something_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(BadInput) as caught:
        chat(**{field: value})
    assert caught.value.details["field"] == field


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [
        ({"type": "regex", "value": "a+"}, {"regex": "a+"}),
        ({"type": "json", "value": SCHEMA}, {"json_schema": SCHEMA}),
        ({"type": "json", "value": '{"type": "null"}'}, {"json_schema": {"type": "null"}}),
        ({"type": "json_object", "value": SCHEMA}, {"json_schema": SCHEMA}),
        ({"type": "json_schema", "value": {"name": "a", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"type": "json_object", "schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"type": "json_schema", "schema": SCHEMA}, {"json_schema": SCHEMA}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}, {"json_schema": SCHEMA}),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {}}}, {"json_schema": {}}),
        (
            {"type": "json_schema", "json_schema": {"name": "a", "schema": None}},
            {"json_schema": {"type": "object"}},
        ),
        ({"type": "json_object", "schema": None}, {"json_schema": {"type": "object"}}),
    ],
)
def test_formats_in_the_spellings_of_tgi_and_llama_cpp(asked: dict[str, Any], wanted: dict[str, Any]) -> None:
    for event in (chat(response_format=asked), completion(response_format=asked)):
        assert event.output == OutputFormat(**wanted)


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "regex"}, {"type": "regex", "value": {}}, {"type": "json"}, {"type": "json_schema"}, {"type": "text", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA, "value": SCHEMA}, {"type": "json", "value": "{"},
    ],
)  # fmt: skip
def test_a_format_without_its_value_is_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match="response_format"):
        chat(response_format=asked)


def test_what_prompts_share_counts_for_each_of_them() -> None:
    with pytest.raises(BadInput, match="too long for that many prompts"):
        completion(prompt=["a"] * 128, stop=["x" * (1 << 18)])
    assert completion(prompt=["a" * (1 << 18)] * 128, stop=["x"]).prompt == "a" * (1 << 18)


def test_logprobs_and_parts_of_prompts_reach_the_model() -> None:
    assert (completion(echo=True, logprobs=2).prompt_logprobs, completion(logprobs=2).prompt_logprobs) == (
        2,
        None,
    )
    assert completion(echo=True, logprobs=2, prompt_logprobs=5).prompt_logprobs == 5
    assert (chat(prompt_logprobs=0).prompt_logprobs, completion(echo=True).prompt_logprobs) == (0, None)
    found = chat(truncate_prompt_tokens=3, truncation_side="right")
    assert (found.truncate_prompt_tokens, found.truncation_side) == (3, "right")
    for wrong in (
        {"prompt_logprobs": 1, "stream": True},
        {"prompt_logprobs": -1},
        {"truncate_prompt_tokens": -2},
    ):
        with pytest.raises(BadInput) as caught:
            chat(**wrong)
        assert caught.value.details["field"] == next(iter(wrong))


def test_which_tokens_and_words_may_be_made_reaches_the_model() -> None:
    for found in (
        chat(allowed_token_ids=[1, 2], bad_words=["a"]),
        completion(allowed_token_ids=[1, 2], bad_words=["a"]),
    ):
        assert (found.allowed_token_ids, found.bad_words) == ((1, 2), ("a",))
    assert chat(allowed_token_ids=[], bad_words=[]) == chat()


def test_allowed_tools_are_the_only_ones() -> None:
    tools = [{"type": "function", "function": {"name": name}} for name in ("one", "two", "three")]
    allowed = {"mode": "required", "tools": [tools[2], tools[0]]}
    found = chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert ([tool.function.name for tool in found.tools], found.tool_choice) == (["one", "three"], "required")
    for wrong in (
        {"mode": "auto", "tools": [{"type": "function", "function": {"name": "four"}}]},
        {"mode": "auto", "tools": []},
    ):
        with pytest.raises(BadInput, match="tool_choice"):
            chat(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": wrong})
