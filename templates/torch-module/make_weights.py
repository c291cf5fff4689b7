"""Train the module and write weights/model.safetensors. Run it once: python make_weights.py"""

import math
from pathlib import Path

import torch
from handler import Wave
from safetensors.torch import save_file
from torch.nn.functional import mse_loss

STEPS = 1000


def train() -> Wave:
    torch.manual_seed(0)
    # More threads would slow down a module this small.
    torch.set_num_threads(1)
    model = Wave()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    x = torch.linspace(-math.pi, math.pi, 256).unsqueeze(1)
    y = torch.sin(x)
    for _ in range(STEPS):
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        print(f"largest error after {STEPS} steps: {(model(x) - y).abs().max():.4f}")
    return model


if __name__ == "__main__":
    folder = Path(__file__).parent / "weights"
    folder.mkdir(exist_ok=True)
    save_file(train().state_dict(), folder / "model.safetensors")
    print(f"wrote {folder / 'model.safetensors'}")
