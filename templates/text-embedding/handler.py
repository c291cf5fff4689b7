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
from pilotflame import TokenEmbeddingRequest
from pilotflame.errors import InputInvalid
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

    def tokenize(self, inputs: list[str | list[int]]) -> Any:
        limits = {"truncation": True, "max_length": self.max_tokens}
        if all(isinstance(one, str) for one in inputs):
            tokens = self.tokenizer(inputs, padding=True, return_tensors="pt", **limits)
        else:
            ids = [self.tokenizer(one, **limits).input_ids if isinstance(one, str) else one for one in inputs]
            tokens = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        return tokens.to(self.model.device)

    def check(self, tokens: list[int]) -> None:
        """Raise InputInvalid if there are too many tokens, or if they show that another tokenizer made them."""
        special = self.tokenizer("").input_ids
        if len(tokens) > self.max_tokens:
            message = f"This model's maximum context length is {self.max_tokens} tokens, and an input has {len(tokens)}."
            raise InputInvalid(
                message, remedy="Send shorter inputs.", details={"reason": "context_length_exceeded"}
            )
        if max(tokens) >= len(self.tokenizer):
            message = f"The token {max(tokens)} is none of the model's {len(self.tokenizer)}."
            raise InputInvalid(message, remedy="Send texts, or tokens of the model's own tokenizer.")
        if special and tokens[0] != special[0] and tokens[-1] != special[-1]:
            message = f"The tokens neither begin with {special[0]} nor end with {special[-1]}, as those of the model's tokenizer do."
            raise InputInvalid(message, remedy="Send texts, or tokens of the model's own tokenizer.")

    @torch.inference_mode()
    def embed(self, inputs: list[str | list[int]]) -> list[tuple[list[float], int]]:
        """Return the vector of each text or list of tokens, and how many tokens it has."""
        tokens = self.tokenize(inputs)
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
def handler(events: list[TokenEmbeddingRequest], context: pilotflame.Context) -> list[dict[str, Any]]:
    """Return one embedding for a text, and a list of embeddings for a list of texts, or of lists of tokens."""
    for tokens in (tokens for event in events for tokens in event.tokens or []):
        context.state.check(tokens)
    inputs = [one for event in events for one in _inputs(event)]
    # Inputs of about the same length are computed together, because padding is wasted work.
    order = sorted(range(len(inputs)), key=lambda index: len(inputs[index]))
    found: list[tuple[list[float], int]] = [([], 0)] * len(inputs)
    for start in range(0, len(order), PASS_TEXTS):
        part = order[start : start + PASS_TEXTS]
        for index, one in zip(part, context.state.embed([inputs[i] for i in part]), strict=True):
            found[index] = one
    rest = iter(found)
    return [_answer(event, [next(rest) for _ in _inputs(event)]) for event in events]


def _inputs(event: TokenEmbeddingRequest) -> list[str | list[int]]:
    if event.tokens is not None:
        return [*event.tokens]
    return [event.text] if isinstance(event.text, str) else [*event.text]


def _answer(event: TokenEmbeddingRequest, found: list[tuple[list[float], int]]) -> dict[str, Any]:
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
