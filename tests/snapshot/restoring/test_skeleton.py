"""Skeletons: their weights are on the meta device, and computed buffers are real. Restored ones answer as from_pretrained does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.restoring.mapping import Mapping
from pilotflame.snapshot.restoring.plan import make_plan, restore
from pilotflame.snapshot.restoring.skeleton import skeleton
from safetensors.torch import save_file
from torch import nn
from transformers import AutoConfig, AutoModel, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

SMALL = {"vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
LLAMA = LlamaConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    **SMALL,
)
GPT2 = GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **SMALL)


def test_what_has_no_value_goes_to_meta_and_the_rest_is_real() -> None:
    real = torch.ones(2)
    with skeleton():
        valueless = [
            torch.empty(2),
            torch.empty((2, 3), dtype=torch.half, device="cpu"),
            torch.empty_like(torch.empty(3)),
            torch.rand(2),
            torch.randn(2),
            torch.empty(3).new_empty(3),
        ]
        valued = [
            torch.arange(3),
            torch.zeros(2),
            torch.ones(2),
            torch.full((2,), 1.0),
            torch.tensor([1.0]),
            real.new_empty(3),
            torch.rand_like(real),
        ]
        seeded = torch.rand(2, generator=torch.Generator().manual_seed(0))
    assert all(tensor.is_meta for tensor in valueless)
    assert not any(tensor.is_meta for tensor in [*valued, seeded])
    assert not torch.empty(1).is_meta


@pytest.mark.parametrize(
    "init",
    [
        *("uniform_", "normal_", "trunc_normal_", "ones_", "zeros_", "eye_", "orthogonal_"),
        *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
    ],
)
def test_initialising_meta_does_nothing_and_real_as_ever(init: str) -> None:
    function = getattr(nn.init, init)
    with skeleton():
        tensor = torch.empty(4, 4)
        assert function(tensor) is tensor
        real = torch.full((4, 4), 7.0)
        function(real)
    assert tensor.is_meta
    assert not (real == 7).any()


@pytest.mark.parametrize("std", [0.5, 1.0, 5.0])
def test_truncated_normals_of_real_tensors_are_drawn(std: float) -> None:
    # `trunc_normal_` draws values outside the bounds again, in its own scratch tensors. For a real tensor, these must be real.
    with skeleton():
        position = nn.Parameter(torch.zeros(1000))
        nn.init.trunc_normal_(position, std=std, a=-1, b=1)
    assert 0 < position.abs().max() <= 1


def test_filling_meta_from_real_values_does_nothing() -> None:
    with skeleton(), torch.no_grad():
        tensor = nn.Parameter(torch.empty(4, 4))
        tensor.copy_(torch.ones(4, 4)).mul_(torch.ones(4)).add_(torch.ones(4))
        tensor[:, 0::2] = torch.ones(4, 2)
        tensor[torch.tensor([1])] = 0
        tensor[0].zero_()
        tensor.data.normal_()
    assert tensor.is_meta


def test_a_skeleton_of_bert_computes_its_buffers(minilm: Path) -> None:
    with skeleton():
        model = AutoModel.from_config(AutoConfig.from_pretrained(minilm))
    assert model.embeddings.position_ids.tolist() == [list(range(512))]
    assert not model.embeddings.token_type_ids.any()
    assert model.embeddings.word_embeddings.weight.is_meta


@pytest.mark.parametrize(
    ("cls", "config"),
    [
        (LlamaForCausalLM, LLAMA),
        (LlamaForCausalLM, LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": True})),
        (GPT2LMHeadModel, GPT2),
    ],
)
def test_restored_language_models_answer_as_loaded_ones(cls: type, config: object, tmp_path: Path) -> None:
    cls(config).save_pretrained(tmp_path)
    loaded = cls.from_pretrained(tmp_path).eval()  # type: ignore[attr-defined]
    with skeleton():
        model = cls(config).eval()
    manifest = create(tmp_path)
    restore(make_plan(model, manifest), Mapping(tmp_path, manifest))
    tokens = torch.arange(20).reshape(2, 10)
    with torch.inference_mode():
        assert torch.equal(model(tokens).logits, loaded(tokens).logits)
    tied = config.tie_word_embeddings  # type: ignore[attr-defined]
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


def test_a_rotary_embedding_keeps_its_frequencies() -> None:
    with skeleton():
        model = LlamaForCausalLM(LLAMA)
    reference = LlamaForCausalLM(LLAMA)
    assert torch.equal(model.model.rotary_emb.inv_freq, reference.model.rotary_emb.inv_freq)


class Mixed(nn.Module):
    """Has parameters made in every common way, batch statistics, and layers that make their parameters in other ways."""

    def __init__(self) -> None:
        super().__init__()
        self.zeros = nn.Parameter(torch.zeros(3))
        self.random = nn.Parameter(torch.randn(3) * 0.02)
        self.legacy = nn.Parameter(torch.Tensor(3))
        self.convolution = nn.Conv1d(3, 3, 1)
        self.norm = nn.BatchNorm1d(3)
        self.recurrent = nn.LSTM(3, 3, batch_first=True)
        self.attention = nn.MultiheadAttention(3, 1, batch_first=True)
        nn.init.zeros_(self.legacy)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.recurrent(self.norm(self.convolution(x)) + self.zeros + self.random + self.legacy)
        return self.attention(y, y, y)[0]


def test_plain_torch_modules_are_restored(tmp_path: Path) -> None:
    reference = Mixed().eval()
    save_file(reference.state_dict(), tmp_path / "model.safetensors")
    with skeleton():
        model = Mixed().eval()
    manifest = create(tmp_path)
    restore(make_plan(model, manifest), Mapping(tmp_path, manifest))
    x = torch.rand(2, 3, 3)
    assert torch.equal(model(x), reference(x))


def test_meta_tensors_are_moved_nowhere_and_converted() -> None:
    with skeleton():
        made = nn.Linear(2, 2)
        assert made.to("cpu").to(torch.device("cpu"), torch.bfloat16, non_blocking=True) is made
        assert made.weight.cpu().is_meta
    assert made.weight.is_meta
    assert made.weight.dtype is torch.bfloat16
