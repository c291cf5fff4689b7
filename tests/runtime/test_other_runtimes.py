"""The templates for ONNX Runtime and OpenVINO on a real gateway: weights from a folder, and from a server."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_server import FaultServer
from pilotflame.errors import PilotflameError
from pilotflame.runtime.command.client.client import Client
from pilotflame.runtime.command.client.function_template import copy_template
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME


def answer(client: Client, name: str, event: object) -> Any:
    """Invoke a function, and return its whole answer."""
    with client.call(name, json.dumps(event).encode()) as reply:
        return reply.value()


@pytest.mark.parametrize(
    ("template", "packages"), [("onnx", ("onnxruntime", "onnxscript")), ("openvino", ("openvino",))]
)
def test_a_template(served: str, tmp_path: Path, template: str, packages: tuple[str, ...]) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install {package}")
    folder = tmp_path / template
    copy_template(template, folder)
    subprocess.run([sys.executable, "make_weights.py"], cwd=folder, check=True, capture_output=True)
    with Client(served) as client:
        name = client.deploy(folder, overrides={})["name"]
        for x in (-3.0, -1.0, 0.0, 0.5, math.pi / 2):
            assert answer(client, name, {"x": x})["y"] == pytest.approx(math.sin(x), abs=0.03)
        with pytest.raises(PilotflameError, match="less than or equal to"):
            answer(client, name, {"x": 4.0})
        # Fetch the weights from a server. The function answers when they have arrived.
        create(folder / "weights").write(folder / "weights" / MANIFEST_NAME)
        with FaultServer(folder / "weights") as server:
            client.deploy(folder, overrides={"snapshot": server.url})
            assert answer(client, name, {"x": 0.5})["y"] == pytest.approx(math.sin(0.5), abs=0.03)
        client.delete("v1", "functions", name)
