"""Rows of different length attend to their own columns only, with the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pilotflame.handlers.language_model import ragged_attention as module
from pilotflame.handlers.language_model.ragged_attention import LEAST_MASKED, ragged_attention
from tiny_causal import KINDS, generated, tiny
from torch import Tensor, nn
from transformers import AttentionInterface

from .test_engine import engine_of, prompts, tokens

SDPA = {"llama", "mistral", "gpt2", "qwen3_moe"}
"""The kinds whose attention is `sdpa` with a mask of booleans."""
WIDTH = 4 * LEAST_MASKED
Attend = Callable[..., tuple[Tensor, Tensor | None]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of rows of each call of transformers' own function."""
    with ragged_attention():
        ours: Any = AttentionInterface()["sdpa"]
    found: list[int] = []
    former = ours._former

    def noted(layer: nn.Module, query: Tensor, *arguments: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        found.append(query.shape[0])
        return former(layer, query, *arguments, **named)  # type: ignore[no-any-return]

    monkeypatch.setattr(ours, "_former", noted)
    return found


def attend(lengths: list[int], tokens: int = 1, **named: Any) -> Tensor:
    """Call the function `sdpa` with rows of these lengths, and return the result for the new tokens."""
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, tokens, 8), torch.randn(2, 2, WIDTH, 8), torch.randn(2, 2, WIDTH, 8)
    starts = torch.tensor([WIDTH - length for length in lengths])
    mask = (torch.arange(WIDTH) >= starts[:, None])[:, None, None].expand(-1, 1, tokens, -1)
    layer = nn.Module()
    layer.num_key_value_groups = 2
    attention: Attend = AttentionInterface()["sdpa"]
    return attention(layer, query, key, value, mask, scaling=0.3, **named)[0]


@pytest.mark.parametrize("kind", KINDS)
async def test_the_tokens_of_rows_of_different_length_are_as_if_alone(
    kind: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LEAST_MASKED", 0)
    engine, model = engine_of(kind, rows=8)
    given = prompts(8, 90, seed=5)
    found = await asyncio.gather(*(tokens(engine, one, 20) for one in given))
    assert found == [generated(model, one, 20) for one in given]  # type: ignore[arg-type]
    assert set(calls) == ({1} if kind in SDPA else set())


@pytest.mark.parametrize("lengths", [(WIDTH, 3), (3, WIDTH), (1, 1)])
def test_each_row_attends_to_its_own_columns(lengths: tuple[int, int], calls: list[int]) -> None:
    whole = attend([*lengths])
    assert calls == [2]
    with ragged_attention():
        rows = attend([*lengths])
    assert calls == [2, 1, 1]
    assert torch.allclose(rows, whole, atol=1e-6)


@pytest.mark.parametrize(
    "call",
    [
        lambda: attend([WIDTH, WIDTH - LEAST_MASKED]),
        lambda: attend([WIDTH, 3], tokens=2),
        lambda: attend([WIDTH, 3], position_bias=torch.ones(2, 4, 1, WIDTH)),
    ],
    ids=["rows of similar length", "several tokens", "a bias"],
)
def test_all_rows_are_one_call_where_that_is_right_or_faster(
    call: Callable[[], Tensor], calls: list[int]
) -> None:
    with ragged_attention():
        call()
    assert calls == [2]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_heads_of_a_group_share_the_keys_without_a_mask(rows: int, calls: list[int]) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(rows, 4, 1, 8), torch.randn(rows, 2, 30, 8), torch.randn(rows, 2, 30, 6)
    layer = nn.Module()
    layer.num_key_value_groups = 2
    attention: Attend = AttentionInterface()["sdpa"]
    wanted = attention(layer, query, key, value, None, scaling=0.3)[0]
    assert calls == [rows]
    with ragged_attention():
        found = attention(layer, query, key, value, None, scaling=0.3)[0]
        assert calls == [rows]
        attention(layer, query, key, value, None, scaling=0.3, position_bias=torch.zeros(rows, 4, 1, 30))
    assert calls == [rows, rows]
    assert found.shape == wanted.shape
    assert torch.allclose(found, wanted, atol=1e-6)


def test_a_pass_elsewhere_in_the_process_is_not_affected(calls: list[int]) -> None:
    model = tiny("llama")
    mask = torch.ones(2, LEAST_MASKED * 3, dtype=torch.long)
    mask[0, :-2] = 0
    ids = torch.full(mask.shape, 5)
    with ragged_attention():
        pass
    cache = model(input_ids=ids[:, :-1], attention_mask=mask[:, :-1]).past_key_values
    calls.clear()
    model(input_ids=ids[:, -1:], attention_mask=mask, past_key_values=cache)
    assert calls == [2, 2, 2]


def test_a_compiler_can_trace_models_after_its_use(calls: list[int]) -> None:
    model = tiny("llama")
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    traced = torch.compile(lambda given: model(input_ids=given).logits, backend="eager", fullgraph=True)
    with torch.inference_mode():
        assert torch.equal(traced(ids), model(input_ids=ids).logits)
    assert calls
