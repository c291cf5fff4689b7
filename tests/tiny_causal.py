"""Tiny causal models with random weights, one for each kind of position and mask."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 97
_WIDTH: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip
_WIDE = {**_WIDTH, "intermediate_size": 48, "num_key_value_heads": 2}
KINDS: dict[str, dict[str, Any]] = {
    "llama": _WIDE,
    "mistral": {**_WIDE, "sliding_window": 8},
    "gemma2": {**_WIDE, "sliding_window": 8, "head_dim": 8},
    "bloom": {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4},
    "gpt2": {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 512},
    "qwen3_moe": {
        **_WIDE, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 8
    },
}  # fmt: skip


def tiny(kind: str, seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    config = AutoConfig.for_model(kind, **KINDS[kind])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    # Make the weights larger, because all logits are nearly equal with the usual weights.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6.0)
    return model


def generated(model: PreTrainedModel, prompt: list[int], new: int) -> list[int]:
    """Return what transformers generates for one prompt alone."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    answer: list[int] = found[0, len(prompt) :].tolist()
    return answer
