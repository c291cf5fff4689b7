"""Checkpoints with the names that a model's tensors had in earlier releases of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot


def test_names_of_earlier_releases_are_followed(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors import safe_open
    from tiny_models import write_vit

    folder = write_vit(tmp_path / "vit")
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    snapshot = Snapshot(folder, create(folder))
    with snapshot.skeleton():
        model = transformers.AutoModelForImageClassification.from_config(
            transformers.AutoConfig.from_pretrained(folder)
        )
    assert not {name for name, _ in model.named_parameters()} <= stored
    snapshot.restore(model.eval())
    snapshot.open()
    wanted = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    pixels = torch.rand(1, 3, 32, 32)
    with torch.inference_mode():
        assert torch.equal(model(pixels).logits, wanted(pixels).logits)
