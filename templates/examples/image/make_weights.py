"""Train on shapes that are drawn here, and write weights/model.safetensors and circle.png: python make_weights.py"""

from pathlib import Path

import torch
from handler import LABELS, network, pixels
from PIL import Image, ImageDraw
from safetensors.torch import save_file

SIZE = 64


def between(low: int, high: int) -> int:
    return int(torch.randint(low, high, ()))


def draw(label: str) -> Image.Image:
    image = Image.new("L", (SIZE, SIZE), between(0, 60))
    pen, ink = ImageDraw.Draw(image), between(150, 256)
    x, y, side = between(0, 20), between(0, 20), between(24, 42)
    if label == "circle":
        pen.ellipse((x, y, x + side, y + side), fill=ink)
    elif label == "square":
        pen.rectangle((x, y, x + side, y + side), fill=ink)
    else:
        for left in range(x, SIZE, 12):
            pen.rectangle((left, 0, left + 5, SIZE), fill=ink)
    return image


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    targets = torch.arange(300) % len(LABELS)
    inputs = torch.stack([pixels(draw(LABELS[target])) for target in targets])
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    folder = Path(__file__).parent
    (folder / "weights").mkdir(exist_ok=True)
    save_file(model.state_dict(), folder / "weights" / "model.safetensors")
    draw("circle").save(folder / "circle.png")
