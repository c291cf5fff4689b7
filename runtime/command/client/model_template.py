"""Makes a function's folder for a model without code from the template for its task: `pilotflame deploy --model`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from ....errors import CodeError, SnapshotError, SourceMissing
from ....snapshot.format.layout import SUFFIX
from ....snapshot.sources.locate import is_remote, open_source
from ....snapshot.sources.location import shown
from ....snapshot.sources.source import Listing, Source
from ...ground.settings.function_settings import SETTINGS_FILE, slug
from ...node.launching import gpus
from . import display
from .function_template import README_FILE, copy_template

# The templates by the ending of the class name in config.json.
TEMPLATES = {
    "ForCausalLM": "text-generation",
    "LMHeadModel": "text-generation",
    "ForSequenceClassification": "text-classification",
    "ForImageClassification": "image-classification",
    "ForCTC": "speech-recognition",
    "WhisperForConditionalGeneration": "speech-recognition",
    "ForSpeechSeq2Seq": "speech-recognition",
    "Model": "text-embedding",
}
# The template text-embedding can compute these modules of sentence-transformers.
_MODULES = ("Transformer", "Pooling", "Normalize")
_MAX_CONFIG_BYTES = 4 << 20
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# A model for one of these templates needs a tokenizer: one of the files in _TOKENIZERS, or a file with an ending in
# _SENTENCEPIECE, with the vocabulary.
_OF_TEXT = ("text-generation", "text-classification", "reranking", "text-embedding")
_TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model")
_SENTENCEPIECE = (".spm", ".bpe.model", ".tiktoken", "tokenizer.model")
_README = """# {name}

Made from the template {template} for the model {model}, whose weights stay where they are: `snapshot` in pilotflame.toml.
`handler.py` is yours to change.

```sh
pilotflame test .
pilotflame deploy .
pilotflame invoke {name} @test_input.json --timing
```
"""
_SNAPSHOT_LINE = re.compile(r"^(# )?snapshot = .*$", re.MULTILINE)


def write_function(model: str, folder: Path | None, name: str = "") -> Path:
    """Write the template for the task of `model` into a new folder, and return the folder.

    `model` is a folder or the URL of a folder. Without `folder`, the new folder is in the working directory, and is
    named `name` or like the model. A folder that an earlier call has made for the model is returned as it is. If the model's own folder has this path, the name gets the suffix `-function`. Raise
    SnapshotError if no template fits, CodeError if the folder is not empty, and the errors of the model's source.
    """
    where = model if is_remote(model) else str(Path(model).expanduser().resolve())
    template = find_template(where)
    if template == "text-generation" and gpus.exist():
        display.say(
            "this machine has a GPU, on which vLLM's engine makes more tokens a second: pilotflame init NAME --template vllm"
        )
    made = folder or _new_folder(name or slug(_last_part(where)) or template, where)
    settings = made / SETTINGS_FILE
    # A JSON string is also a valid basic string in TOML.
    line = f"snapshot = {json.dumps(where, ensure_ascii=False)}"
    if made.is_dir() and any(made.iterdir()):
        if settings.is_file() and line in settings.read_text(encoding="utf-8").splitlines():
            return made
        raise CodeError(
            f"{made} already exists and is not empty.", remedy="Name another folder with --output."
        )
    given = copy_template(template, made)
    readme = _README.format(name=given, template=template, model=shown(where))
    (made / README_FILE).write_text(readme, encoding="utf-8")
    # This script makes the weights of the template's own model, which this function does not use.
    (made / "make_weights.py").unlink(missing_ok=True)
    text = _SNAPSHOT_LINE.sub(lambda _: line, settings.read_text(encoding="utf-8"), count=1)
    settings.write_text(text, encoding="utf-8")
    return made


def _new_folder(name: str, where: str) -> Path:
    folder = Path(name)
    is_model = not is_remote(where) and folder.resolve() == Path(where)
    return Path(f"{name}-function") if is_model else folder


def find_template(where: str) -> str:
    """Return the template for the task of the model at `where`, a URL or a path.

    Raise SnapshotError if no template fits, and the errors of the model's source.
    """
    if not is_remote(where) and not Path(where).is_dir():
        remedy = "Give a folder with config.json and safetensors, or a URL: hf://ORGANISATION/NAME, s3://BUCKET/PREFIX."
        raise SnapshotError(f"{where} is not a folder.", remedy=remedy)
    source = open_source(where)
    # Check the format first, because this check lists the files. The list fails only if the whole repository is missing. So
    # the user reads that the repository is missing, and not that config.json is.
    _check_format(source, where)
    config = _read_object(source, "config.json")
    if config is None:
        remedy = "Give the folder of a Hugging Face model, or write a handler: pilotflame init NAME."
        raise SnapshotError(f"{shown(where)} has no config.json, so its task is not known.", remedy=remedy)
    modules = _read_json(source, "modules.json")
    if isinstance(modules, list):
        _check_modules(source, modules, where)
    template = "text-embedding" if isinstance(modules, list) else _template_of(config, where)
    if template in _OF_TEXT:
        _check_tokenizer(source, where)
    return template


def _template_of(config: Mapping[str, Any], where: str) -> str:
    named = config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    found = next((template for end, template in TEMPLATES.items() if architecture.endswith(end)), None)
    labels = config.get("id2label")
    if found == "text-classification" and isinstance(labels, dict) and len(labels) == 1:
        return "reranking"
    if found == "text-embedding" and "vocab_size" not in config:
        # This is a model of images or sound without a head. No template fits such a model.
        found = None
    if found is None:
        what = f"is a {architecture}" if architecture else "names no architecture in config.json"
        tasks = ", ".join(sorted({*TEMPLATES.values(), "reranking"}))
        remedy = f"There are templates for {tasks}. For another task write a handler: pilotflame init NAME -t torch-module."
        raise SnapshotError(f"{shown(where)} {what}, for which there is no template.", remedy=remedy)
    return found


def _check_format(source: Source, where: str) -> None:
    """Raise SnapshotError if the weights are only pickles. Unpickling can run any code, so workers do not unpickle."""
    names = source.names() if isinstance(source, Listing) else []
    if any(name.endswith(SUFFIX) for name in names) or not any(name.endswith(_PICKLES) for name in names):
        return
    here = where if not is_remote(where) else "FOLDER"
    fetch = "" if not is_remote(where) else "Fetch it into FOLDER. Then: "
    remedy = f"{fetch}pilotflame snapshot convert {here} converted && pilotflame deploy --model converted"
    raise SnapshotError(
        f"{shown(where)} has weights as pickles (.bin, .pt) and no safetensors.", remedy=remedy
    )


def _check_tokenizer(source: Source, where: str) -> None:
    """Raise SnapshotError if the source has no tokenizer. Transformers would make an empty tokenizer and answer wrongly."""
    names = source.names() if isinstance(source, Listing) else list(_TOKENIZERS)
    if not any(name in _TOKENIZERS or name.endswith(_SENTENCEPIECE) for name in names):
        remedy = f"Save the tokenizer there too, as tokenizer.save_pretrained does: one of {', '.join(_TOKENIZERS)}."
        raise SnapshotError(f"{shown(where)} has no files of a tokenizer.", remedy=remedy)


def _check_modules(source: Source, modules: list[Any], where: str) -> None:
    """Raise SnapshotError if the template text-embedding does not compute these modules of sentence-transformers."""
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
    strange = [kind for kind in kinds if kind not in _MODULES]
    pooling = _read_object(source, "1_Pooling/config.json") or {}
    modes = [key for key, value in pooling.items() if key.startswith("pooling_mode_") and value is True]
    modes += [f"pooling_mode = {pooling['pooling_mode']}"] if "pooling_mode" in pooling else []
    strange += [mode for mode in modes if not mode.endswith(("mean_tokens", "cls_token", "= mean", "= cls"))]
    if strange:
        remedy = "Write a handler from the template: pilotflame init NAME -t text-embedding, and change its Encoder."
        fault = (
            f"{shown(where)} has {', '.join(strange)}, which the template text-embedding does not compute."
        )
        raise SnapshotError(fault, remedy=remedy)


def _read_object(source: Source, name: str) -> dict[str, Any] | None:
    found = _read_json(source, name)
    if found is not None and not isinstance(found, dict):
        raise SnapshotError(f"{name} in {source.url} is not a JSON object.", remedy="Fetch it again.")
    return found


def _read_json(source: Source, name: str) -> Any:
    """Return the JSON in an object of a source, or None if there is no such object. Raise SnapshotError if it is too large or is not JSON."""
    try:
        size_bytes = source.stat(name).size_bytes
    except SourceMissing:
        return None
    if size_bytes > _MAX_CONFIG_BYTES:
        fault = f"{name} in {source.url} has {size_bytes} bytes, more than a configuration has."
        raise SnapshotError(fault, remedy="Check that it is the folder of a model.")
    content = bytearray(size_bytes)
    source.read_into(name, 0, memoryview(content))
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError as error:
        raise SnapshotError(
            f"{name} in {source.url} is not JSON: {error}.", remedy="Fetch it again."
        ) from None


def _last_part(where: str) -> str:
    """Return the name of a model, for example `name` for `hf://org/name@revision`."""
    return where.partition("?")[0].rstrip("/").rpartition("/")[2].partition("@")[0]
