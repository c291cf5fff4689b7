"""Train a module and convert it for OpenVINO: model.xml has the graph, weights/model.safetensors the weights.

Run it once: python make_weights.py
"""

import math
import tempfile
from pathlib import Path

import numpy as np
import openvino
import torch
from safetensors.numpy import save_file
from torch import nn
from torch.nn.functional import mse_loss

STEPS = 1000


def train() -> nn.Module:
    """Return a small network that has learned sin(x) for x from -3.14 to 3.14."""
    torch.manual_seed(0)
    # More threads would slow down a module this small.
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    x = torch.linspace(-math.pi, math.pi, 256).unsqueeze(1)
    y = torch.sin(x)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


def export(model: nn.Module, width: int) -> openvino.Model:
    """Convert a module that takes and returns one tensor of shape [batch, width]."""
    return openvino.convert_model(model, example_input=torch.zeros(2, width), input=[-1, width])


def split(model: openvino.Model, folder: Path) -> None:
    """Write the weights of any OpenVINO model to weights/model.safetensors, and the graph to model.xml."""
    (folder / "weights").mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as written:
        openvino.save_model(model, f"{written}/model.xml", compress_to_fp16=False)
        weights = np.fromfile(f"{written}/model.bin", np.uint8)
        save_file({"weights": weights}, folder / "weights" / "model.safetensors")
        (folder / "model.xml").write_bytes(Path(written, "model.xml").read_bytes())


if __name__ == "__main__":
    here = Path(__file__).parent
    split(export(train(), 1), here)
    print(f"wrote {here / 'model.xml'} and {here / 'weights' / 'model.safetensors'}")
