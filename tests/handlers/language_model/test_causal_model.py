"""The models whose sequences run one at a time, with the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pilotflame.handlers.language_model.causal_model import CausalModel, why_alone
from pilotflame.handlers.language_model.rows import Alone, Rows
from tiny_causal import KINDS, tiny
from transformers import AutoConfig

TAKES = frozenset({"input_ids", "past_key_values"})
ROPE = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("kind", "fields", "takes", "why"),
    [
        ("llama", {}, TAKES, ""),
        ("mistral", {"sliding_window": 8}, TAKES, ""),
        ("llama", {"rope_parameters": ROPE}, TAKES, "positions of type dynamic"),
        ("llama", {}, frozenset({"input_ids"}), "takes no cache"),
        ("llama", {}, frozenset({"input_ids", "cache_params"}), "a cache of its own kind"),
        ("qwen3_next", {}, TAKES, "layers of type linear_attention keep a state"),
    ],
)
def test_why_sequences_do_not_share_a_pass(
    kind: str, fields: dict[str, Any], takes: frozenset[str], why: str
) -> None:
    found = why_alone(AutoConfig.for_model(kind, **fields), takes)
    assert why in found
    assert bool(found) == bool(why)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_shares_its_passes_and_tells_its_limit(kind: str) -> None:
    model = tiny(kind)
    found = CausalModel(model, model.config)
    assert (found.why_alone, type(found.new_rows())) == ("", Rows)
    assert found.most_tokens == (1 << 20 if kind == "bloom" else 512)


def test_the_logits_of_a_pass_are_those_of_the_last_tokens() -> None:
    model = tiny("llama")
    found = CausalModel(model, model.config)
    for rows in (found.new_rows(8), Alone(model.config)):
        rows.lengths = [0]
        logits = found.forward(rows, [[5, 6, 7]])
        with torch.inference_mode():
            wanted = model(input_ids=torch.tensor([[5, 6, 7]])).logits[:, -1]
        assert torch.allclose(logits, wanted, atol=1e-5)
        assert rows.lengths == [3]
