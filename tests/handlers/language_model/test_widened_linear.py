"""Linear layers with 16-bit weights give what a float32 layer gives, and keep no copy of the weights."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch
from pilotflame.handlers.language_model import widened_linear as module
from pilotflame.handlers.language_model.causal_model import CausalModel
from pilotflame.handlers.language_model.widened_linear import LEAST_TOKENS, WidenedLinear, widen
from tiny_causal import tiny
from torch import Tensor, nn

SIXTEEN = frozenset({torch.bfloat16, torch.float16})


@pytest.fixture(autouse=True)
def slow(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """Treat the processor as one without a fast product of 16 bits. Return the recorded calls of torch's own
    product.
    """
    monkeypatch.setattr(module, "SLOW", SIXTEEN)
    noted = Mock(side_effect=nn.Linear.forward)

    def forward(layer: nn.Linear, given: Tensor) -> object:
        return noted(layer, given)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    return noted


def layer(dtype: torch.dtype, *, bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(24, 50, bias=bias, dtype=dtype))
    widen(made)
    found = made[0]
    assert isinstance(found, WidenedLinear)
    return found


@pytest.mark.parametrize("dtype", sorted(SIXTEEN, key=str))
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("numbers", [10, 24 * 7, 1 << 19], ids=["rows", "unequal slices", "one slice"])
def test_a_layer_gives_what_float32_gives(
    dtype: torch.dtype, bias: bool, numbers: int, slow: Mock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLICE", numbers)
    made = layer(dtype, bias=bias)
    given = torch.randn(2, 5, 24, dtype=dtype)
    with torch.inference_mode():
        found = made(given)
        slow.assert_not_called()
        wide = nn.functional.linear(
            given.float(), made.weight.float(), made.bias.float() if made.bias is not None else None
        )
    assert (found.dtype, found.shape, found.is_contiguous()) == (dtype, (2, 5, 50), True)
    torch.testing.assert_close(found, wide.to(dtype))


def test_torch_computes_what_is_not_faster(slow: Mock) -> None:
    half, single = layer(torch.bfloat16), layer(torch.float32)
    few, many = torch.randn(1, LEAST_TOKENS - 1, 24), torch.randn(1, LEAST_TOKENS, 24)
    with torch.inference_mode():
        half(few.bfloat16())
        single(many)
        assert slow.call_count == 2
        half(many.bfloat16())
        assert slow.call_count == 2
    half(many.bfloat16()).sum().backward()
    assert slow.call_count == 3


def test_only_plain_layers_of_a_slow_processor_are_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(nn.Linear):
        """A layer with a product of its own."""

    own, plain = Own(2, 2), nn.Linear(2, 2)
    widen(nn.ModuleList([own, plain]))
    assert (type(own), type(plain)) == (Own, WidenedLinear)
    monkeypatch.setattr(module, "SLOW", frozenset())
    other = nn.Linear(2, 2)
    widen(other)
    assert type(other) is nn.Linear


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_a_model_of_16_bits_computes_the_same_logits(kind: str, slow: Mock) -> None:
    ids = [[5, 6, 7, 8, 9, 10, 11, 12]]
    plain = tiny(kind).bfloat16()
    with torch.inference_mode():
        wanted = plain(input_ids=torch.tensor(ids)).logits[:, -1]
    slow.reset_mock()
    found = CausalModel(plain, plain.config)
    weights = {parameter.data_ptr() for parameter in plain.parameters()}
    rows = found.new_rows(8)
    rows.lengths = [0]
    logits = found.forward(rows, ids)
    # The head gets one token, for which torch's own product is faster.
    assert slow.call_count == 1
    assert weights == {parameter.data_ptr() for parameter in plain.parameters()}
    torch.testing.assert_close(logits, wanted, atol=0.05 * wanted.abs().max().item(), rtol=0)
