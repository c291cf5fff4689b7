"""How well each document answers a query, from any Hugging Face cross-encoder (a reranker).

The snapshot is the model's folder: config.json with one label, tokenizer files, safetensors.
"""

import os
from pathlib import Path
from typing import Any

# The tokenizer's threads would not survive the fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pilotflame
import torch
from pilotflame import RerankRequest
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

# Pairs in one forward pass. More would take more memory, and no less time.
PASS_PAIRS = 32


class Reranker:
    """A tokenizer and its model. The model has no weights until `restore`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(folder)
        # As in transformers: the type that config.json names, else that of the weights.
        config.dtype = config.dtype or dtype
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.max_tokens = min(
            self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", 512)
        )
        self.model = AutoModelForSequenceClassification.from_config(config).eval()

    @torch.inference_mode()
    def scores(self, query: str, documents: list[str]) -> tuple[list[float], int]:
        """Return the score of each document, and how many tokens all pairs have."""
        found: list[float] = []
        count = 0
        for start in range(0, len(documents), PASS_PAIRS):
            part = documents[start : start + PASS_PAIRS]
            tokens = self.tokenizer(
                [query] * len(part), part, padding=True, truncation="only_second", max_length=self.max_tokens,
                return_tensors="pt",
            )  # fmt: skip
            logits = self.model(**tokens.to(self.model.device)).logits
            found += logits[:, 0].float().sigmoid().tolist()
            count += int(tokens["attention_mask"].sum())
        return found, count


def build(context: pilotflame.Context) -> Reranker:
    """Runs once per revision: make everything but the weights, which each worker maps when it starts."""
    with context.snapshot.skeleton():
        reranker = Reranker(context.snapshot.path, context.snapshot.dtype)
    # "auto": on a GPU if there is one, otherwise mapped. Some folders hold indexes that the model computes.
    context.snapshot.restore(reranker.model, ignore=[r"position_ids$"], cast=True, device="auto")
    # The first call loads files, so it is made here.
    reranker.tokenizer(["query"], ["document"])
    return reranker


def rehearse(context: pilotflame.Context) -> None:
    """Runs before the first request, in a worker that is still without weights: warm up the kernels."""
    context.state.scores("A query", ["A document of about the length that is usual."])


def handler(event: RerankRequest, context: pilotflame.Context) -> dict[str, Any]:
    """Return the index and the score (0 to 1) of each document, the best one first."""
    scores, tokens = context.state.scores(event.query, event.documents)
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return {"results": [{"index": index, "score": scores[index]} for index in order], "tokens": tokens}
