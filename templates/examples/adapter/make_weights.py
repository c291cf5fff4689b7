"""Write base/ and style/, each a snapshot. Run it once: python make_weights.py"""

from pathlib import Path

import torch
from handler import network
from safetensors.torch import save_file

if __name__ == "__main__":
    torch.manual_seed(0)
    tensors = network().state_dict()
    parts = {
        "base": {name: tensor for name, tensor in tensors.items() if "lora_" not in name},
        "style": {f"base_model.model.{name}": tensor for name, tensor in tensors.items() if "lora_" in name},
    }
    for name, part in parts.items():
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        save_file(part, folder / "model.safetensors")
