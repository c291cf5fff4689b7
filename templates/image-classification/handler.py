"""The labels of an image, each with its probability, from any Hugging Face image classifier.

The snapshot is the model's folder: config.json with `id2label`, preprocessor_config.json, safetensors. An event is
the bytes of an image (JPEG, PNG, WebP, ...), or JSON with the same bytes in base64.
"""

import base64
import io
from pathlib import Path
from typing import Any

import pilotflame
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

# The most labels that an answer has.
LABELS = 5


class Classifier:
    """An image processor and its model. The model has no weights until `restore`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(folder)
        # As in transformers: the type that config.json names, else that of the weights.
        config.dtype = config.dtype or dtype
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.model = AutoModelForImageClassification.from_config(config).eval()
        self.labels = [config.id2label[number] for number in range(config.num_labels)]

    @torch.inference_mode()
    def probabilities(self, images: list[Image.Image]) -> Tensor:
        pixels = self.processor(images=images, return_tensors="pt")["pixel_values"]
        return (
            self.model(pixel_values=pixels.to(self.model.device, self.model.dtype)).logits.float().softmax(-1)
        )


def build(context: pilotflame.Context) -> Classifier:
    """Runs once per revision: make everything but the weights, which each worker maps when it starts."""
    with context.snapshot.skeleton():
        classifier = Classifier(context.snapshot.path, context.snapshot.dtype)
    # "auto": on a GPU if there is one, otherwise mapped.
    context.snapshot.restore(classifier.model, cast=True, device="auto")
    return classifier


def rehearse(context: pilotflame.Context) -> None:
    """Runs before the first request, in a worker that is still without weights: warm up the kernels."""
    context.state.probabilities([Image.new("RGB", (224, 224))])


@pilotflame.batch(max_size=16)
def handler(events: list[Any], context: pilotflame.Context) -> list[dict[str, Any]]:
    """Return the likeliest labels of each image."""
    found = context.state.probabilities([decode(event) for event in events]).tolist()
    return [{"labels": ranked(context.state.labels, scores)[:LABELS]} for scores in found]


def decode(event: Any) -> Image.Image:
    """Return the image of an event. Raise TypeError, ValueError, or OSError if it is no image."""
    if not isinstance(event, bytes):
        if not isinstance(event, dict) or not isinstance(event.get("image"), str):
            raise TypeError('Send the bytes of an image, or {"image": "<the bytes in base64>"}.')
        event = base64.b64decode(event["image"], validate=True)
    return Image.open(io.BytesIO(event)).convert("RGB")


def ranked(labels: list[str], scores: list[float]) -> list[dict[str, Any]]:
    pairs = sorted(zip(labels, scores, strict=True), key=lambda pair: -pair[1])
    return [{"label": label, "score": score} for label, score in pairs]
