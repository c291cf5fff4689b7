"""An image in, a label out: the body of the request is a PNG or JPEG. Weights: python make_weights.py"""

import io

import pilotflame
import torch
from PIL import Image
from torch import Tensor, nn

LABELS = ("circle", "square", "stripes")
SIDE = 32


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(), nn.Flatten(),
        nn.Linear(16 * 5 * 5, len(LABELS)),
    )  # fmt: skip


def pixels(image: Image.Image) -> Tensor:
    """Return the image as 1 x SIDE x SIDE floats between 0 and 1."""
    grey = image.convert("L").resize((SIDE, SIDE))
    return torch.frombuffer(bytearray(grey.tobytes()), dtype=torch.uint8).reshape(1, SIDE, SIDE) / 255


def build(context: pilotflame.Context) -> nn.Module:
    with context.snapshot.skeleton():
        model = network()
    context.snapshot.restore(model)
    return model


@torch.inference_mode()
def rehearse(context: pilotflame.Context) -> None:
    context.state(torch.zeros(1, 1, SIDE, SIDE))


@torch.inference_mode()
def handler(event: bytes, context: pilotflame.Context) -> dict[str, float]:
    shares = context.state(pixels(Image.open(io.BytesIO(event))).unsqueeze(0)).softmax(1)[0]
    return dict(zip(LABELS, shares.tolist(), strict=True))
