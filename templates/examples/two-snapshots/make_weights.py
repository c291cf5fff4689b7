"""Write encoder/ and head/, each a snapshot. Run it once: python make_weights.py"""

from pathlib import Path

import torch
from handler import modules
from safetensors.torch import save_file

if __name__ == "__main__":
    torch.manual_seed(0)
    for name, module in zip(("encoder", "head"), modules(), strict=True):
        folder = Path(__file__).parent / name
        folder.mkdir(exist_ok=True)
        save_file(module.state_dict(), folder / "model.safetensors")
