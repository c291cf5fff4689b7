"""Text from any Hugging Face causal language model, piece by piece as it is made.

The snapshot is the model's folder: config.json, tokenizer files, safetensors. The weights lie on a GPU if there is one,
and are mapped otherwise. The first piece is there before all weights are, because each layer waits for its own only.
"""

import os
from collections.abc import Iterator
from pathlib import Path

# The tokenizer's threads would not survive the fork.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pilotflame
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

# What a decoder writes for the first bytes of a character whose last bytes are still to come.
UNFINISHED = "\ufffd"


class Event(BaseModel):
    prompt: str = Field(min_length=1, max_length=100_000)
    max_tokens: int = Field(64, ge=1, le=4096)
    temperature: float = Field(0.0, ge=0, le=2, description="0 takes the likeliest token each time.")
    seed: int | None = Field(None, description="Makes the choice of a temperature above 0 repeatable.")


class Generator:
    """A tokenizer and its model. The model has no weights until `restore`."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_config(config).eval()
        self.most_tokens: int = getattr(config, "max_position_embeddings", 2048)
        ends = config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def tokens(self, event: Event) -> Iterator[int]:
        """Yield one token after the other. The keys and values of those before are kept for the next."""
        ids = self.tokenizer(event.prompt, return_tensors="pt").input_ids.to(self.model.device)
        if ids.shape[1] + event.max_tokens > self.most_tokens:
            raise ValueError(
                f"The prompt has {ids.shape[1]} tokens. With max_tokens, which is {event.max_tokens}, that is more than"
                f" the {self.most_tokens} of the model."
            )
        choice = torch.Generator(self.model.device)
        choice.seed() if event.seed is None else choice.manual_seed(event.seed)
        kept = None
        for _ in range(event.max_tokens):
            # Not around the loop: between two tokens, other code of this thread runs.
            with torch.inference_mode():
                found = self.model(input_ids=ids, past_key_values=kept, use_cache=True)
                kept = found.past_key_values
                ids = choose(found.logits[:, -1], event.temperature, choice)
                token = int(ids)
            if token in self.ends:
                return
            yield token

    def pieces(self, event: Event) -> Iterator[str]:
        """Yield the text of the tokens. A token may be a part of a character, or begin with a space that another lacks.

        So each is decoded together with those of the last piece, whose text is left out then.
        """
        last: list[int] = []
        new: list[int] = []
        for token in self.tokens(event):
            new.append(token)
            known, text = self.tokenizer.decode(last), self.tokenizer.decode(last + new)
            if text.endswith(UNFINISHED) or len(text) <= len(known):
                continue
            yield text[len(known) :]
            last, new = new, []


def choose(logits: Tensor, temperature: float, choice: torch.Generator) -> Tensor:
    if not temperature:
        return logits.argmax(-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits.float() / temperature, -1), 1, generator=choice)


def build(context: pilotflame.Context) -> Generator:
    """Runs once per revision: make everything but the weights, which each worker maps or copies when it starts."""
    with context.snapshot.skeleton():
        generator = Generator(context.snapshot.path)
    # "auto": on a GPU if there is one, otherwise mapped.
    context.snapshot.restore(generator.model, device="auto")
    return generator


def rehearse(context: pilotflame.Context) -> None:
    """Runs before the first request, in a worker that is still without weights: warm up the kernels."""
    # Several tokens, because a prompt of one token runs other kernels.
    list(context.state.pieces(Event(prompt="the first prompt of the day", max_tokens=2)))


def handler(event: Event, context: pilotflame.Context) -> Iterator[str]:
    for piece in context.state.pieces(event):
        # The caller has disconnected.
        if context.cancelled:
            return
        yield piece
