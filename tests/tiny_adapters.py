"""Tiny adapters (LoRA) with random weights, in the form in which peft saves them."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D


def write_adapter(module: PreTrainedModel, folder: Path, seed: int, targets: Sequence[str] = ()) -> None:
    """Write an adapter for the layers `targets` of a model. Its weights are so large that answers with it differ."""
    kind = module.config.model_type
    torch.manual_seed(seed)
    made = get_peft_model(
        copy.deepcopy(module),
        LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=[*(targets or targets_of(module))],
            fan_in_fan_out=kind == "gpt2",
        ),
    )
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    made.save_pretrained(str(folder), save_embedding_layers=False)


def targets_of(module: PreTrainedModel) -> list[str]:
    """Return the names of the layers that an adapter changes."""
    layers = {
        name: name.rpartition(".")[2]
        for name, layer in module.named_modules()
        if isinstance(layer, (nn.Linear, Conv1D)) and "expert" not in name
    }
    left_out = {"lm_head", "embed_out"}
    if any("expert" in name for name, _ in module.named_modules()):
        # Leave out layers whose weights are parts of one tensor.
        left_out |= {"gate", "router", "gate_proj", "up_proj", "down_proj"}
    if module.config.model_type == "opt":
        # OPT joins the rows before these layers, and peft needs separate rows.
        left_out |= {"fc1", "fc2"}
    return sorted({*layers.values()} - left_out)


def with_adapter(module: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """Return the model with an adapter, as peft loads it."""
    return PeftModel.from_pretrained(copy.deepcopy(module), str(folder)).eval()  # type: ignore[return-value]
