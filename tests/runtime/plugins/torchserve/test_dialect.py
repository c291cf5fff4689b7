"""TorchServe's dialect keeps the contract of dialects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from pilotflame.handlers.recognise import Dialects
from pilotflame.runtime.plugins.torchserve.dialect import DIALECT
from pilotflame.runtime.testing.dialect import DialectTests

FUNCTION = "def handle(data, context):\n    return [1 for _ in data or ()]\n"


class TestTorchServeDialect(DialectTests):
    dialect = DIALECT
    file = "model_handler.py"
    source = """
from ts.torch_handler.base_handler import BaseHandler

class Greeter(BaseHandler):
    def initialize(self, context):
        self.word = "hello " + context.system_properties["server_name"]

    def preprocess(self, data):
        return [one["body"]["name"] for one in data]

    def inference(self, data):
        return [f"{self.word} {name}" for name in data]

    def postprocess(self, data):
        return [{"said": one} for one in data]
"""
    handler = "Greeter"
    event: ClassVar = {"name": "Ada"}
    output: ClassVar = {"said": "hello MMS Ada"}


class TestTorchServeFunction(DialectTests):
    dialect = DIALECT
    file = "custom_handler.py"
    source = FUNCTION
    handler = "handle"
    event = 1
    output = 1


def test_the_manifest_of_an_unpacked_archive_names_the_handler(tmp_path: Path) -> None:
    (tmp_path / "MAR-INF").mkdir()
    (tmp_path / "my.py").write_text("def run(data, context): ...\n")
    (tmp_path / "greeter.py").write_text(TestTorchServeDialect.source)
    manifest = tmp_path / "MAR-INF" / "MANIFEST.json"
    for name, found in (
        ("my.py:run", ("torchserve", "my.py", "run")),
        ("my", ("torchserve", "my.py", "handle")),
        ("greeter.py", ("torchserve", "greeter.py", "Greeter")),
    ):
        manifest.write_text(json.dumps({"model": {"handler": name}}))
        assert Dialects([DIALECT]).recognise(tmp_path, "handler.py") == found
    for text in (
        '{"model": {"handler": "../x.py"}}',
        '{"model": {"handler": "image_classifier"}}',
        "[",
        "[]",
    ):
        manifest.write_text(text)
        assert DIALECT.configured(tmp_path) is None
