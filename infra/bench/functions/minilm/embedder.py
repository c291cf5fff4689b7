"""Sentence embeddings of all-MiniLM-L6-v2, the same code for every contestant of `make bench-warm`: tokens, one forward
pass, the mean of the token vectors, scaled to length 1."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer


class Embedder:
    """A tokenizer and its model. Without `weights`, the model's weights are not loaded."""

    def __init__(self, folder: str | Path, *, weights: bool = True, threads: int | None = None) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model: Any
        if weights:
            self.model = AutoModel.from_pretrained(folder).eval()
        else:
            make: Any = AutoModel.from_config
            self.model = make(AutoConfig.from_pretrained(folder)).eval()
        self.model.pooler = None  # a head that the mean of the token vectors does not use

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> list[list[float]]:
        """One vector of 384 numbers for each text."""
        tokens = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt")
        vectors = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"].unsqueeze(-1).to(vectors.dtype)
        means = (vectors * mask).sum(1) / mask.sum(1).clamp(min=1e-9)
        found: list[list[float]] = torch.nn.functional.normalize(means, dim=1).tolist()
        return found
