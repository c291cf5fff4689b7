"""A language model with random weights, and its first token: from zero through a gateway, and in a fresh process."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import tokenizers
import torch
import transformers
from control import Control, gateway
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from servers import HERE, Server

TEMPLATE = HERE.parents[1] / "templates" / "text-generation"
EVENT = {"prompt": "w1 w2 w3 w4", "max_tokens": 4, "temperature": 0}
WORDS = 32_000
_HEAD = 128
"""The width of an attention head."""
# What a user's script does without a snapshot.
_FRESH = """
import importlib.util, sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, device, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder)
# With the package accelerate, transformers loads straight to the device.
where = {"device_map": device} if importlib.util.find_spec("accelerate") else {}
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **where).eval().to(device)
with torch.inference_mode():
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    print(int(model(input_ids=ids, use_cache=True).logits[:, -1].argmax(-1)), flush=True)
"""


def write_model(folder: Path, size_bytes: float, device: str) -> None:
    """Write a model of about `size_bytes` with the proportions of Llama, and a manifest."""
    layers = 32 if size_bytes > 1e9 else 2
    # Each layer has about 13 width² parameters of two bytes. The two tables of words are not counted.
    width = max(_HEAD, int((size_bytes / 2 / layers / 13) ** 0.5) // _HEAD * _HEAD)
    config = transformers.LlamaConfig(
        hidden_size=width, num_hidden_layers=layers, num_attention_heads=width // _HEAD,
        num_key_value_heads=max(1, width // _HEAD // 4), intermediate_size=width * 7 // 2, vocab_size=WORDS,
        max_position_embeddings=4096, dtype="bfloat16",
    )  # fmt: skip
    with torch.device(device):
        model = transformers.LlamaForCausalLM(config)
    model.bfloat16().save_pretrained(folder)
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({f"w{number}": number for number in range(WORDS)}, "w0")
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0")  # type: ignore[no-untyped-call]
    made.save_pretrained(folder)
    create(folder).write(folder / MANIFEST_NAME)


def fresh_s(folder: Path, device: str) -> float:
    """Return how long a new process takes to print its first token, from its start to its end."""
    command = [sys.executable, "-c", _FRESH, str(folder), device, str(EVENT["prompt"])]
    started_s = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return time.perf_counter() - started_s


class FirstTokens:
    """Times the first token of a function's stream."""

    def __init__(self, server: Server, control: Control, name: str) -> None:
        self.server, self.control, self._name = server, control, name
        self._address = urlsplit(control.url).netloc

    def ms(self) -> tuple[float, bool]:
        """Call the function. Return the time until its first token, and whether a worker had to start."""
        connection = http.client.HTTPConnection(self._address, timeout=600)
        started_s = time.perf_counter()
        connection.request(
            "POST", f"/invoke/{self._name}", json.dumps(EVENT), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        first = answer.read1(4096)
        took_ms = (time.perf_counter() - started_s) * 1e3
        rest = answer.read()
        connection.close()
        if answer.status != 200 or b"event: error" in first + rest:
            raise RuntimeError(f"{answer.status} {(first + rest)[:500]!r}")
        return took_ms, answer.headers["X-Cold-Start"] == "true"


@contextmanager
def deployed(folder: Path, name: str, **settings: float) -> Iterator[FirstTokens]:
    """Run a gateway with the template text-generation and the model in `folder`."""
    with gateway() as (server, control):
        control.deploy(str(TEMPLATE), name=name, snapshot=str(folder), **settings)
        yield FirstTokens(server, control, name)
