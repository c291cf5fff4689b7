"""The labels of a text, each with its probability, from any Hugging Face text classifier.

The snapshot is the model's folder: config.json with `id2label`, tokenizer files, safetensors.
"""

import os
from pathlib import Path
from typing import Any

# The tokenizer's threads would not survive the fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pilotflame
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

SAMPLE = "A sentence of about the length that is usual."


class Event(BaseModel):
    text: str = Field(max_length=100_000)


class Classifier:
    """A tokenizer and its model. The model has no weights until `restore`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self.config = AutoConfig.from_pretrained(folder)
        # As in transformers: the type that config.json names, else that of the weights.
        self.config.dtype = self.config.dtype or dtype
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.max_tokens = min(
            self.tokenizer.model_max_length, getattr(self.config, "max_position_embeddings", 512)
        )
        self.model = AutoModelForSequenceClassification.from_config(self.config).eval()
        self.labels = [self.config.id2label[number] for number in range(self.config.num_labels)]

    @torch.inference_mode()
    def probabilities(self, texts: list[str]) -> Tensor:
        tokens = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        logits = self.model(**tokens.to(self.model.device)).logits.float()
        independent = self.config.problem_type == "multi_label_classification" or len(self.labels) == 1
        return logits.sigmoid() if independent else logits.softmax(-1)


def build(context: pilotflame.Context) -> Classifier:
    """Runs once per revision: make everything but the weights, which each worker maps when it starts."""
    with context.snapshot.skeleton():
        classifier = Classifier(context.snapshot.path, context.snapshot.dtype)
    # "auto": on a GPU if there is one, otherwise mapped. Some folders hold indexes that the model computes.
    context.snapshot.restore(classifier.model, ignore=[r"position_ids$"], cast=True, device="auto")
    # The first call loads files, so it is made here.
    classifier.tokenizer([SAMPLE])
    return classifier


def rehearse(context: pilotflame.Context) -> None:
    """Runs before the first request, in a worker that is still without weights: warm up the kernels."""
    context.state.probabilities([SAMPLE])


@pilotflame.batch(max_size=32, example={"text": SAMPLE})
def handler(events: list[Event], context: pilotflame.Context) -> list[dict[str, Any]]:
    """Return all labels of each text, the likeliest first."""
    found = context.state.probabilities([event.text for event in events]).tolist()
    return [{"labels": ranked(context.state.labels, scores)} for scores in found]


def ranked(labels: list[str], scores: list[float]) -> list[dict[str, Any]]:
    pairs = sorted(zip(labels, scores, strict=True), key=lambda pair: -pair[1])
    return [{"label": label, "score": score} for label, score in pairs]
