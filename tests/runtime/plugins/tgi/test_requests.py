"""The events that requests in TGI's form become."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput
from pilotflame.handlers.language_model.contract import GenerationRequest
from pilotflame.runtime.plugins.tgi.requests import GenerateRequest, supported

SEEDS = st.integers(0, (1 << 64) - 1)


def event(stream: bool = False, **parameters: Any) -> GenerationRequest:
    asked = GenerateRequest.model_validate(supported({"inputs": "Hi", "parameters": parameters}))
    return asked.event(asked.new_seed(), stream=stream)


def test_without_parameters_each_token_is_the_likeliest() -> None:
    assert event() == GenerationRequest(prompt="Hi", temperature=0)
    assert event().greedy
    # A seed alone does not turn on sampling, nor do temperature and top_p at 1, their default.
    assert event(seed=3, temperature=1.0, top_p=1.0).seed is None


@pytest.mark.parametrize("asked", [{"do_sample": True}, {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}])
def test_tokens_are_drawn(asked: dict[str, Any]) -> None:
    found = event(**asked)
    assert found.seed is not None
    assert found.temperature == asked.get("temperature", 1)
    # All these fields are set, so that the model's own defaults for sampling do not apply.
    assert {"temperature", "top_k", "top_p", "repetition_penalty"} <= found.model_fields_set


@given(st.lists(SEEDS, min_size=2, max_size=2, unique=True))
def test_each_seed_is_another_one_of_the_event(seeds: list[int]) -> None:
    one, other = (event(do_sample=True, seed=seed).seed for seed in seeds)
    assert one != other


def test_the_last_tokens_of_a_prompt_may_be_kept() -> None:
    found = event(truncate=3)
    assert (found.truncate_prompt_tokens, found.truncation_side) == (3, "left")


def test_tokens_are_reported_if_the_answer_shows_them() -> None:
    assert event().top_logprobs is None
    assert event(stream=True).top_logprobs == 0
    assert event(details=True, top_n_tokens=3).top_logprobs == 3


@given(
    st.recursive(
        st.none() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_any_json_is_a_body_or_refused_by_name(body: Any) -> None:
    supported(body)
    for name in ("best_of", "typical_p", "watermark"):
        if isinstance(body, dict) and body:
            with pytest.raises(BadInput, match=f"parameters.{name}"):
                supported({"inputs": "Hi", "parameters": {name: body}})


def test_the_parameters_of_an_answer_reach_the_function() -> None:
    found = event(
        max_new_tokens=7, repetition_penalty=1.5, frequency_penalty=0.5, stop=["."], adapter_id="formal"
    )
    assert (found.max_tokens, found.repetition_penalty, found.frequency_penalty) == (7, 1.5, 0.5)
    assert (found.stop, found.include_stop_str_in_output, found.adapter) == (["."], True, "formal")
    assert not event().include_stop_str_in_output
    drawn = event(do_sample=True, top_k=3, top_p=0.5, temperature=0.7, seed=5)
    assert (drawn.top_k, drawn.top_p, drawn.temperature, drawn.seed) == (3, 0.5, 0.7, 5)
    assert event(do_sample=True, seed=(1 << 64) - 1).seed == -1
    assert event(do_sample=True, seed=(1 << 63) - 1).seed == (1 << 63) - 1
    assert event(do_sample=True).seed != event(do_sample=True).seed


def test_parameters_that_ask_for_nothing_are_left_out() -> None:
    asked = {
        "best_of": 1,
        "typical_p": 1.0,
        "watermark": False,
        "decoder_input_details": False,
        "top_k": None,
    }
    assert supported({"inputs": "Hi", "stream": None, "parameters": asked}) == {
        "inputs": "Hi",
        "parameters": {},
    }
    assert supported({"inputs": "Hi", "parameters": None}) == {"inputs": "Hi"}
    with pytest.raises(BadInput) as refused:
        supported({"inputs": "Hi", "parameters": {"best_of": 2}})
    assert (refused.value.details, bool(refused.value.remedy)) == ({"field": "parameters.best_of"}, True)
