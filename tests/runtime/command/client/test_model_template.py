"""`deploy --model`: the template for a model's task, found in its files, and deployed with its weights where they are."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from hub_server import HubServer
from moto_server import moto_server
from pilotflame.errors import CodeError, PilotflameError, SnapshotError
from pilotflame.runtime.command.client.client import Client
from pilotflame.runtime.command.client.model_template import find_template, write_function
from pilotflame.runtime.node.launching import gpus

Answer = Callable[[object], Any]
Deploy = Callable[..., Answer]


def write(folder: Path, config: object, *names: str, **files: object) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in names:
        (folder / name).write_bytes(b"")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("config", "template"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "text-generation"),
        ({"architectures": ["GPT2LMHeadModel"]}, "text-generation"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "a", "1": "b"}}, "text-classification"),
        ({"architectures": ["BertForSequenceClassification"]}, "text-classification"),
        ({"architectures": ["BertForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, "reranking"),
        ({"architectures": ["ViTForImageClassification"]}, "image-classification"),
        ({"architectures": ["WhisperForConditionalGeneration"]}, "speech-recognition"),
        ({"architectures": ["Wav2Vec2ForCTC"]}, "speech-recognition"),
        ({"architectures": ["BertModel"], "vocab_size": 9}, "text-embedding"),
    ],
)  # fmt: skip
def test_config_json_tells_the_template(tmp_path: Path, config: dict[str, Any], template: str) -> None:
    folder = write(tmp_path / "m", config, "model.safetensors", "tokenizer.json")
    assert find_template(str(folder)) == template


def test_a_model_of_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "m", {"architectures": ["BertForSequenceClassification"]}, "model.safetensors")
    with pytest.raises(SnapshotError, match="no files of a tokenizer"):
        find_template(str(folder))


def test_the_new_folder_has_the_name_given_and_is_never_the_models_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"architectures": ["BertForSequenceClassification"]}
    write(tmp_path / "clf", config, "model.safetensors", "tokenizer.json")
    assert write_function("clf", None) == Path("clf-function")
    assert write_function("clf", None, "sentiment") == Path("sentiment")
    readme = Path("sentiment/README.md").read_text()
    assert readme.startswith("# sentiment\n")
    assert str(tmp_path / "clf") in readme
    assert "hf://" not in readme
    assert "--snapshot" not in readme


def test_vllm_is_proposed_on_a_machine_with_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    folder = write(
        tmp_path / "m", {"architectures": ["LlamaForCausalLM"]}, "model.safetensors", "tokenizer.json"
    )
    write_function(str(folder), tmp_path / "plain")
    assert "vllm" not in capsys.readouterr().err
    monkeypatch.setattr(gpus, "NVIDIA_MODULE", tmp_path)
    write_function(str(folder), tmp_path / "with-gpu")
    assert "--template vllm" in capsys.readouterr().err


def test_a_folder_is_made_once_for_a_model_and_never_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"architectures": ["BertForSequenceClassification"]}
    for name in ("clf", "other"):
        write(tmp_path / name, config, "model.safetensors", "tokenizer.json")
    made = write_function("clf", None)
    (made / "handler.py").write_text("# changed\n")
    # A deploy that is repeated after a failure uses the files as they are.
    assert write_function("clf", None) == made
    assert (made / "handler.py").read_text() == "# changed\n"
    with pytest.raises(CodeError, match="already exists") as caught:
        write_function("other", made)
    assert "--output" in caught.value.remedy


POOLING = {"type": "sentence_transformers.models.Pooling"}
DENSE = {"type": "sentence_transformers.models.Dense"}


@pytest.mark.parametrize(
    ("made", "says", "advises"),
    [
        (lambda path: path, "is not a folder", "hf://ORGANISATION/NAME"),
        (lambda path: path.mkdir() or path, "has no config.json", "pilotflame init"),
        (lambda path: write(path, {"architectures": ["T5ForConditionalGeneration"]}), "is a T5For", "templates for"),
        (lambda path: write(path, {"architectures": ["ViTModel"]}), "is a ViTModel", "templates for"),
        (lambda path: write(path, {}), "names no architecture", "templates for"),
        (lambda path: write(path, []), "config.json in .* is not a JSON object", "Fetch it again"),
        (lambda path: write(path, {"architectures": ["BertModel"], "vocab_size": 9}, "pytorch_model.bin"),
         "pickles", "pilotflame snapshot convert .* --model converted"),
        (lambda path: write(path, {"architectures": ["BertModel"]}, modules=[POOLING, DENSE]), "has Dense", "Encoder"),
    ],
)  # fmt: skip
def test_what_no_template_fits_is_told_with_a_remedy(
    tmp_path: Path, made: Callable[[Path], Path], says: str, advises: str
) -> None:
    path = made(tmp_path / "model")
    with pytest.raises(SnapshotError, match=says) as caught:
        write_function(str(path), tmp_path / "made")
    assert not (tmp_path / "made").exists()
    assert re.search(advises, caught.value.remedy)


def test_a_model_of_the_hub_is_named_and_referred_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.dumps({"architectures": ["BertModel"], "vocab_size": 9}).encode()
    monkeypatch.chdir(tmp_path)
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        hub.add("org/Tiny-BERT", {"config.json": config, "model.safetensors": b"", "vocab.txt": b""})
        assert write_function("hf://org/Tiny-BERT@main", None) == Path("tiny-bert")
        text = (tmp_path / "tiny-bert" / "pilotflame.toml").read_text()
        assert 'name = "tiny-bert"' in text
        assert '\nsnapshot = "hf://org/Tiny-BERT@main"\n' in text
        assert write_function("hf://org/Tiny-BERT@main", None) == Path("tiny-bert")
        with pytest.raises(PilotflameError, match="org/None"):
            write_function("hf://org/None", None)


def test_a_model_in_s3_is_named_and_referred_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.dumps({"architectures": ["BertModel"], "vocab_size": 9}).encode()
    monkeypatch.chdir(tmp_path)
    with moto_server() as endpoint:
        for name, value in {
            "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": endpoint,
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        s3 = boto3.client("s3")
        s3.create_bucket(Bucket="models")
        for name, body in (("config.json", config), ("model.safetensors", b""), ("vocab.txt", b"")):
            s3.put_object(Bucket="models", Key=f"bert/tiny/{name}", Body=body)
        assert write_function("s3://models/bert/tiny", None) == Path("tiny")
        assert '\nsnapshot = "s3://models/bert/tiny"\n' in Path("tiny/pilotflame.toml").read_text()
        assert "s3://models/bert/tiny" in Path("tiny/README.md").read_text()
        with pytest.raises(SnapshotError, match="has no config"):
            write_function("s3://models/bert", None)
        s3.close()


def caller(client: Client, name: str) -> Answer:
    def answer(event: object) -> Any:
        raw = isinstance(event, bytes)
        body = event if isinstance(event, bytes) else json.dumps(event).encode()
        kind = "application/octet-stream" if raw else "application/json"
        with client.call(name, body, content_type=kind) as reply:
            return reply.value()

    return answer


@pytest.fixture(scope="module")
def deploy(served: str) -> Iterator[Deploy]:
    """Deploys a model without code, and returns a function that calls it. All models stay until the last test: they share a base."""
    names: list[str] = []
    with Client(served) as client:

        def deployed(model: Path) -> Answer:
            folder = write_function(str(model), model.with_name(f"{model.name}-function"))
            names.append(client.deploy(folder, {})["name"])
            answer = caller(client, names[-1])
            # The template's example fits each model of its task.
            answer(json.loads((folder / "test_input.json").read_text()))
            return answer

        yield deployed
        for name in names:
            client.delete("v1", "functions", name)


def test_a_classifier_and_a_reranker(deploy: Deploy, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tiny_models import labels, write_bert

    kind = "BertForSequenceClassification"
    folder = write_bert(tmp_path / "classifier", kind, **labels("calm", "hot", "wet"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    text = "a pilot flame burns"
    with torch.inference_mode():
        wanted = model(**tokenizer(text, return_tensors="pt")).logits.softmax(-1)[0].tolist()
    found = deploy(folder)({"text": text})["labels"]
    assert {one["label"]: one["score"] for one in found} == pytest.approx(
        dict(zip(("calm", "hot", "wet"), wanted, strict=True)), abs=1e-5
    )
    assert found == sorted(found, key=lambda one: -one["score"])

    folder = write_bert(tmp_path / "reranker", kind, **labels("LABEL_0"))
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    documents = ["the sea is calm", "a flame"]
    with torch.inference_mode():
        tokens = tokenizer([text] * 2, documents, padding=True, return_tensors="pt")
        wanted = model(**tokens).logits[:, 0].sigmoid().tolist()
    found = deploy(folder)({"query": text, "documents": documents})["results"]
    assert {one["index"]: one["score"] for one in found} == pytest.approx(dict(enumerate(wanted)), abs=1e-5)
    assert found == sorted(found, key=lambda one: -one["score"])


@pytest.mark.parametrize("pooling", ["mean_tokens", "cls_token"])
def test_an_embedder_of_sentence_transformers(deploy: Deploy, tmp_path: Path, pooling: str) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from tiny_models import write_sentence_transformer

    folder = write_sentence_transformer(tmp_path / pooling.replace("_", "-"), pooling)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        vectors = model(**tokenizer("the sea is calm", return_tensors="pt")).last_hidden_state[0]
    wanted = vectors[0] if pooling == "cls_token" else vectors.mean(0)
    found = deploy(folder)({"text": "the sea is calm"})["embedding"]
    assert found == pytest.approx((wanted / wanted.norm()).tolist(), abs=1e-5)


def test_an_image_classifier(deploy: Deploy, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    image = pytest.importorskip("PIL.Image")
    from tiny_models import write_vit

    folder = write_vit(tmp_path / "vit")
    file = tmp_path / "image.png"
    image.effect_mandelbrot((40, 50), (-2, -1, 1, 1), 20).convert("RGB").save(file)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    model = transformers.ViTForImageClassification.from_pretrained(folder).eval()
    with torch.inference_mode():
        pixels = processor(images=[image.open(file)], return_tensors="pt")
        wanted = model(**pixels).logits.softmax(-1)[0].tolist()
    answer = deploy(folder)
    found = answer(file.read_bytes())["labels"]
    assert {one["label"]: one["score"] for one in found} == pytest.approx(
        dict(zip(("cat", "dog", "owl"), wanted, strict=True)), abs=1e-5
    )
    assert answer({"image": base64.b64encode(file.read_bytes()).decode()})["labels"] == found
    with pytest.raises(PilotflameError, match="bytes of an image"):
        answer({})


@pytest.mark.parametrize("kind", ["wav2vec", "whisper"])
def test_speech(deploy: Deploy, tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    import tiny_models

    folder = getattr(tiny_models, f"write_{kind}")(tmp_path / kind)
    assert isinstance(deploy(folder)({"audio": sound()})["text"], str)


def sound() -> str:
    """Return the recording of the template, in base64."""
    from pilotflame.runtime.command.client.function_template import TEMPLATES

    return str(json.loads((TEMPLATES / "speech-recognition" / "test_input.json").read_text())["audio"])


def test_the_command_writes_and_deploys_a_language_model(run: Any, served: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from pilotflame.runtime.command.client.function_template import TEMPLATES

    script = tmp_path / "make_weights.py"
    text = (TEMPLATES / "text-generation" / "make_weights.py").read_text()
    script.write_text(text.replace("STEPS = 150", "STEPS = 1"))
    subprocess.run([sys.executable, str(script)], check=True, capture_output=True)
    model, made = tmp_path / "weights", tmp_path / "tiny-llama"
    done = run("deploy", "--model", model, "--output", made, "--json", PILOTFLAME_URL=served)
    assert done.returncode == 0, done.stderr
    assert not (made / "make_weights.py").exists()
    with Client(served) as client:
        assert caller(client, json.loads(done.stdout)["name"])({"prompt": "A", "max_tokens": 3}) is not None
        assert client.get("v1", "functions", "tiny-llama")["settings"]["snapshot"] == str(model)
        client.delete("v1", "functions", "tiny-llama")
    done = run("deploy", "--output", made, PILOTFLAME_URL=served)
    assert "--output needs --model" in done.stderr
