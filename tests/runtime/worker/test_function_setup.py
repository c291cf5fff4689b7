"""The hint for handlers that load weights at import: it has the class that the code used, and works as it stands."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from pilotflame.runtime.worker.function_setup import weights_hint
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.handle import Snapshot

CONFIG = "AutoConfig.from_pretrained(context.snapshot.path)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from tiny_models import write_bert

    # Large enough for a hint.
    sizes = {"hidden_size": 256, "vocab_size": 9000}
    return write_bert(tmp_path_factory.mktemp("bert"), "BertForSequenceClassification", **sizes)


def hinted(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of code in the hint for a handler with this source."""
    module = types.ModuleType("hinted_handler")
    module.__file__ = str(folder / "code" / "handler.py")
    exec(source.format(path=str(folder)), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    hint = weights_hint(folder / "code")
    assert "were loaded at import" in hint
    return [line.removeprefix("    ") for line in hint.splitlines() if line.startswith("    ")]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("AutoModelForSequenceClassification", f"AutoModelForSequenceClassification.from_config({CONFIG})"),
        ("BertForSequenceClassification", f"BertForSequenceClassification({CONFIG})"),
    ],
)
def test_a_model_keeps_its_head(name: str, made: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = f"from transformers import AutoModel, {name}\nmodel = {name}.from_pretrained({{path!r}})"
    lines = hinted(source, folder, monkeypatch)
    assert f"        model = {made}.eval()" in lines
    assert lines[-1] == "    return model"


def test_the_hint_for_a_pipeline_is_code_that_works(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'from transformers import pipeline\npipe = pipeline("text-classification", model={path!r})'
    lines = hinted(source, folder, monkeypatch)
    code: dict[str, object] = {}
    exec("from transformers import AutoConfig, BertForSequenceClassification, pipeline", code)
    exec("\n".join(lines), code)
    build = code["build"]
    snapshot = Snapshot(folder, create(folder))
    pipe = build(types.SimpleNamespace(snapshot=snapshot))  # type: ignore[operator]
    snapshot.open()
    [found] = pipe("the sea is calm")
    [wanted] = vars(sys.modules["hinted_handler"])["pipe"]("the sea is calm")
    assert found["label"] == wanted["label"]
    assert found["score"] == pytest.approx(wanted["score"], abs=1e-5)
