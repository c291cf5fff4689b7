"""Sentence embeddings of any Hugging Face encoder: the mean of the token vectors (or the first), scaled to length 1.

The snapshot is the encoder's folder: config.json, tokenizer files, safetensors. This is what sentence-transformers does
with such a folder (all-MiniLM-L6-v2, e5, gte, ...), written out so that you can change it.
"""

import json
import os
from pathlib import Path
from typing import Any

# The tokenizer's threads would not survive the fork, and a batch does not need them.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pilotflame
import torch
from pilotflame import EmbeddingRequest
from torch.nn.functional import normalize
from transformers import AutoConfig, AutoModel, AutoTokenizer

# Texts in one forward pass. More would take more memory, and no less time.
PASS_TEXTS = 64
SAMPLE = "A sentence of about the length that is usual."
# Tensors in encoder folders that are not the encoder's weights: computed indexes, heads for other tasks.
NOT_NEEDED = (r"position_ids$", r"^pooler\.", r"^cls\.", r"^lm_head\.", r"^classifier\.")


class Encoder:
    """A tokenizer and its model. The model has no weights until `restore`."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        config = AutoConfig.from_pretrained(folder)
        # As in transformers: the type that config.json names, else that of the weights.
        config.dtype = config.dtype or dtype
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.max_tokens = min(
            _max_seq_length(folder),
            self.tokenizer.model_max_length,
            getattr(config, "max_position_embeddings", 512),
        )
        self.first_token = _pools_first_token(folder)
        self.model = AutoModel.from_config(config).eval()
        # The mean of the token vectors does not use this head.
        self.model.pooler = None

    def tokenize(self, texts: list[str]) -> Any:
        tokens = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt"
        )
        return tokens.to(self.model.device)

    @torch.inference_mode()
    def embed(self, texts: list[str]) -> list[tuple[list[float], int]]:
        """Return the vector of each text, and how many tokens it has."""
        tokens = self.tokenize(texts)
        vectors = self.model(**tokens).last_hidden_state
        mask = tokens["attention_mask"]
        if self.first_token:
            found = vectors[:, 0]
        else:
            weights = mask.unsqueeze(-1).to(vectors.dtype)
            found = (vectors * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
        return list(zip(normalize(found.float(), dim=1).tolist(), mask.sum(1).tolist(), strict=True))


def build(context: pilotflame.Context) -> Encoder:
    """Runs once per revision: make everything but the weights, which each worker maps when it starts."""
    with context.snapshot.skeleton():
        encoder = Encoder(context.snapshot.path, context.snapshot.dtype)
    names = [tensor.name for tensor in context.snapshot.manifest.tensors]
    # The names have this prefix if the encoder was saved with a head on top.
    prefix = f"{encoder.model.base_model_prefix}."
    prefix = prefix if any(name.startswith(prefix) for name in names) else ""
    # "auto": on a GPU if there is one, otherwise mapped.
    context.snapshot.restore(encoder.model, prefix=prefix, ignore=NOT_NEEDED, cast=True, device="auto")
    # The first call loads files, so it is made here.
    encoder.tokenizer([SAMPLE])
    return encoder


def rehearse(context: pilotflame.Context) -> None:
    """Runs before the first request, in a worker that is still without weights: warm up the kernels."""
    context.state.embed([SAMPLE])


@pilotflame.batch(max_size=32, example={"text": SAMPLE})
def handler(events: list[EmbeddingRequest], context: pilotflame.Context) -> list[dict[str, Any]]:
    """Return one embedding for a text, and a list of embeddings for a list of texts."""
    texts = [text for event in events for text in _texts(event)]
    # Texts of about the same length are computed together, because padding is wasted work.
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: list[tuple[list[float], int]] = [([], 0)] * len(texts)
    for start in range(0, len(order), PASS_TEXTS):
        part = order[start : start + PASS_TEXTS]
        for index, one in zip(part, context.state.embed([texts[i] for i in part]), strict=True):
            found[index] = one
    rest = iter(found)
    return [_answer(event, [next(rest) for _ in _texts(event)]) for event in events]


def _texts(event: EmbeddingRequest) -> list[str]:
    return [event.text] if isinstance(event.text, str) else event.text


def _answer(event: EmbeddingRequest, found: list[tuple[list[float], int]]) -> dict[str, Any]:
    vectors, tokens = zip(*found, strict=True)
    return {"embedding": vectors[0] if isinstance(event.text, str) else list(vectors), "tokens": sum(tokens)}


def _pools_first_token(folder: Path) -> bool:
    """Return whether sentence-transformers takes the first token's vector as that of the text, and not the mean."""
    file = folder / "1_Pooling" / "config.json"
    pooling = json.loads(file.read_text()) if file.is_file() else {}
    return bool(pooling.get("pooling_mode_cls_token")) or pooling.get("pooling_mode") == "cls"


def _max_seq_length(folder: Path) -> int:
    """Return the number of tokens at which sentence-transformers truncates, if the folder sets one."""
    file = folder / "sentence_bert_config.json"
    length = json.loads(file.read_text()).get("max_seq_length") if file.is_file() else None
    return length or 1_000_000
