"""A llama of bare modules whose parameters are named as the checkpoint names them; it runs, and is made on any device.

The forward pass is the usual one (RMS norm, grouped attention without positions, gated MLP): enough for weights to be
touched in the order and at the pace of a real one.
"""

from __future__ import annotations

import torch
from checkpoint import Shape
from torch import Tensor, nn
from torch.nn import functional

_HEADS = 16
_DTYPE = torch.bfloat16


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=_DTYPE))

    def forward(self, states: Tensor) -> Tensor:
        return functional.rms_norm(states, states.shape[-1:], self.weight, 1e-5)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        wide, narrow = shape.hidden, shape.hidden // shape.kv_share
        self.q_proj, self.k_proj = _linear(wide, wide), _linear(wide, narrow)
        self.v_proj, self.o_proj = _linear(wide, narrow), _linear(wide, wide)

    def forward(self, states: Tensor) -> Tensor:
        query, key, value = (
            projection(states).unflatten(-1, (-1, states.shape[-1] // _HEADS)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


class Gated(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = _linear(shape.hidden, shape.intermediate)
        self.up_proj = _linear(shape.hidden, shape.intermediate)
        self.down_proj = _linear(shape.intermediate, shape.hidden)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(states)) * self.up_proj(states))
        return out


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = Norm(shape.hidden), Attention(shape)
        self.post_attention_layernorm, self.mlp = Norm(shape.hidden), Gated(shape)

    def forward(self, states: Tensor) -> Tensor:
        states = states + self.self_attn(self.input_layernorm(states))
        out: Tensor = states + self.mlp(self.post_attention_layernorm(states))
        return out


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocabulary, shape.hidden, dtype=_DTYPE)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden)

    def forward(self, tokens: Tensor) -> Tensor:
        states = self.embed_tokens(tokens)
        for layer in self.layers:
            states = layer(states)
        out: Tensor = self.norm(states)
        return out


class Llama(nn.Module):
    """`model.…` and `lm_head.weight`, as in the file."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Body(shape)
        self.lm_head = _linear(shape.hidden, shape.vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the last token, (batch, vocabulary)."""
        out: Tensor = self.lm_head(self.model(tokens)[:, -1])
        return out


def skeleton(shape: Shape) -> Llama:
    """On the meta device: no memory."""
    with torch.device("meta"):
        return Llama(shape).requires_grad_(False)


@torch.inference_mode()
def next_token(model: nn.Module, token: int) -> int:
    """Return the token that a llama finds most likely after one other."""
    tokens = torch.tensor([[token]], device=next(model.parameters()).device)
    return int(model(tokens)[0].argmax())


def _linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, dtype=_DTYPE)
