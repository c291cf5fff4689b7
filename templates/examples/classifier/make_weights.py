"""Train on a few sentences and write weights/model.safetensors. Run it once: python make_weights.py"""

from pathlib import Path

import torch
from handler import LABELS, WORDS, features
from safetensors.torch import save_file

SENTENCES = {
    "billing": [
        "my invoice is wrong",
        "you charged my card twice",
        "refund the payment",
        "the price on the bill",
    ],
    "delivery": [
        "where is my parcel",
        "the package came late",
        "track my shipment",
        "delivery to a new address",
    ],
    "praise": ["thank you so much", "great service", "I love it", "works very well, thanks"],
}

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs = torch.stack([features(text) for texts in SENTENCES.values() for text in texts])
    targets = torch.tensor([LABELS.index(label) for label, texts in SENTENCES.items() for _ in texts])
    model = torch.nn.Linear(WORDS, len(LABELS))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    folder = Path(__file__).parent / "weights"
    folder.mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "model.safetensors")
