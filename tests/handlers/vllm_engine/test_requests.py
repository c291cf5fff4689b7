"""Each field of a request reaches vLLM, or is refused by name."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from pilotflame.errors import InputInvalid, OutputInvalid
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.handlers.sampling.sampling import Sampling
from pilotflame.handlers.vllm_engine.requests import FIELDS, REFUSED, sampling_params

VALUES: dict[str, Any] = {
    "temperature": 0.25, "top_p": 0.5, "top_k": 3, "min_p": 0.125, "presence_penalty": 1.5, "frequency_penalty": -1.5,
    "repetition_penalty": 2.0, "logit_bias": {5: -10.0}, "seed": 11, "top_logprobs": 4, "min_tokens": 2,
    "ignore_eos": True, "stop_token_ids": (7, 8), "allowed_token_ids": (1, 2, 7), "bad_words": ("war", "peace"),
}  # fmt: skip
# The other fields of a request, and where they go: into the prompt, the grammar, the answers, or arguments of `generate`.
ELSEWHERE = {
    "messages", "prompt", "chat_template_kwargs", "continue_final_message", "reasoning_effort", "tools", "tool_choice",
    "parallel_tool_calls", "output", "echo", "prompt_logprobs", "truncate_prompt_tokens", "truncation_side", "priority", "adapter", "add_special_tokens", "add_generation_prompt", "prompt_only",
}  # fmt: skip
PASSED = {"max_tokens", "n", "stop", "include_stop_str_in_output"}


def test_every_field_has_a_place() -> None:
    assert FIELDS.keys() == VALUES.keys() == Sampling.model_fields.keys()
    others = GenerationRequest.model_fields.keys() - Sampling.model_fields.keys()
    assert others == ELSEWHERE | PASSED | {*REFUSED}


def test_every_value_reaches_vllm(vllm: Any) -> None:
    from vllm.sampling_params import RequestOutputKind

    request = GenerationRequest(prompt="a", n=2, stop=["x"], include_stop_str_in_output=True, **VALUES)
    params = sampling_params(request, request.sampling, 9, 'start: "x"', marks=True)
    for ours, theirs in FIELDS.items():
        wanted = list(VALUES[ours]) if isinstance(VALUES[ours], tuple) else VALUES[ours]
        assert getattr(params, theirs) == wanted, ours
    assert (params.n, params.stop, params.max_tokens, params.include_stop_str_in_output) == (
        2,
        ["x"],
        9,
        True,
    )
    assert (params.output_kind, params.skip_special_tokens) == (RequestOutputKind.DELTA, False)
    assert params.structured_outputs.grammar == 'start: "x"'


def test_the_defaults_are_those_of_vllm_except_the_limit(vllm: Any) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    request = GenerationRequest(prompt="a")
    params = sampling_params(request, request.sampling, 9, None, marks=False)
    wanted = SamplingParams(max_tokens=9, stop=[], stop_token_ids=[], output_kind=RequestOutputKind.DELTA)
    assert params == wanted


@pytest.mark.parametrize("seed", [-1, -(1 << 63), (1 << 63) - 1])
def test_every_seed_is_one_for_vllm(vllm: Any, seed: int) -> None:
    request = GenerationRequest(prompt="a", seed=seed, n=128)
    params = sampling_params(request, request.sampling, 9, None, marks=False)
    # vLLM adds the number of the answer to the seed, and the sum must also fit.
    assert 0 <= params.seed < (1 << 63) - 128


@pytest.mark.parametrize("name", REFUSED)
def test_what_vllm_lacks_is_refused_by_name(started: Any, name: str) -> None:
    with pytest.raises(InputInvalid, match=f"{name} has no effect"):
        started.deltas(prompt="a", **{name: 1.0})


def test_the_models_defaults_and_the_priority_reach_vllm(started: Any) -> None:
    started.deltas(prompt="a", temperature=1.0, priority=3)
    params = started.params()
    assert (params.temperature, params.top_k) == (1.0, 7)
    assert started.engine.calls[-1][3] == 3


@pytest.mark.parametrize(
    ("output", "found"),
    [
        ({"choice": ["yes", "no"]}, 'start: answer\nanswer: "yes" | "no"'),
        ({"regex": "[0-9]+"}, "start: answer\nanswer: /[0-9]+/"),
        ({"grammar": 'start: "x"'}, 'start: "x"'),
    ],
)
def test_formats_are_grammars_of_vllm(started: Any, output: dict[str, Any], found: str) -> None:
    llguidance = pytest.importorskip("llguidance")
    # The double answers with another text than the grammar permits.
    with contextlib.suppress(OutputInvalid):
        started.deltas(prompt="a", output=output)
    grammar = started.params().structured_outputs.grammar
    assert grammar == found
    # vLLM checks the grammar in this way, without a tokenizer.
    assert llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("grammar", grammar), None) == ""


def test_a_required_call_is_a_grammar_with_the_models_marks(started: Any) -> None:
    llguidance = pytest.importorskip("llguidance")
    tool = {"function": {"name": "weather", "parameters": {"type": "object"}}}
    with pytest.raises(OutputInvalid, match="no call of a tool"):
        started.deltas(messages=[{"role": "user", "content": "Rain?"}], tools=[tool], tool_choice="required")
    grammar = started.params().structured_outputs.grammar
    assert "reasoning:" in grammar
    assert "<tool_call>" in grammar
    assert llguidance.LLMatcher.validate_grammar(llguidance.grammar_from("grammar", grammar), None) == ""


def test_several_greedy_answers_are_drawn_from_one_token(vllm: Any) -> None:
    """vLLM refuses n > 1 with a temperature of 0."""
    request = GenerationRequest(prompt="a", n=2, temperature=0.0, top_p=0.5, min_p=0.5)
    params = sampling_params(request, request.sampling, 9, None, marks=False)
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 1, 1.0, 0.0)
    alone = request.model_copy(update={"n": 1})
    assert sampling_params(alone, alone.sampling, 9, None, marks=False).temperature == 0.0
