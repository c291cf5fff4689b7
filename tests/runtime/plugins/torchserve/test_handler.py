"""What TorchServe's handlers get and what their answers become, without a gateway."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pilotflame.errors import BadInput, HandlerFailed, HandlerSignatureError, OutputInvalid
from pilotflame.handlers.contract import Context
from pilotflame.handlers.dialect import Entry
from pilotflame.runtime.plugins.torchserve.handler import TorchServeOutput, fields_of, resolve_torchserve

ENTRY = Entry("torchserve", "my_ts_handler.py", "")


@pytest.fixture(autouse=True)
def _modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name == "ts" or name.startswith(("ts.", "my_ts_handler", "model")):
            del sys.modules[name]


def answers(tmp_path: Path, source: str, name: str, *events: Any, **about: Any) -> list[Any]:
    """Return the answers to one call with these events."""
    (tmp_path / ENTRY.file).write_text(source)
    handler = resolve_torchserve(tmp_path, ENTRY._replace(name=name), "noop")
    assert handler.setup is not None
    state = handler.setup(Context("noop", "r1"))
    items = [
        Context("noop", "r1", invocation_id=f"i{number}", state=state, extra={"torchserve": about})
        for number in range(len(events))
    ]
    found: list[Any] = handler.call(list(events), Context.of_batch(items))
    return found


FACTS = """
class Facts:
    def initialize(self, context):
        self.properties = context.system_properties
        self.manifest = context.manifest
        self.config = context.model_yaml_config

    def handle(self, data, context):
        context.metrics.add_time("t", 1.0, None, "ms")
        return [
            {"id": context.get_request_id(n), "kind": context.get_request_header(n, "X-Kind"), "batch": len(data),
             "size": self.properties["batch_size"], "gpu": self.properties["gpu_id"], "config": self.config,
             "model": self.manifest["model"]["modelName"]}
            for n, _ in enumerate(data)
        ]
"""


def test_a_class_gets_the_requests_of_a_batch(tmp_path: Path) -> None:
    (tmp_path / "model-config.yaml").write_text("batchSize: 4\nmine: 1\n")
    found = answers(tmp_path, FACTS, "Facts", 1, 2, headers={"x-kind": "k"})
    shared = {
        "kind": "k", "batch": 2, "size": 4, "gpu": None, "config": {"batchSize": 4, "mine": 1}, "model": "noop",
    }  # fmt: skip
    assert found == [{"id": "i0", **shared}, {"id": "i1", **shared}]


def test_a_function_is_called_once_without_data(tmp_path: Path) -> None:
    source = "model = None\ndef handle(data, context):\n    global model\n    if data is None:\n        model = 'loaded'\n        return\n    return [[model, one['body']] for one in data]\n"
    assert answers(tmp_path, source, "handle", 5) == [["loaded", 5]]


STATUS = """
from ts.utils.util import PredictionException

def handle(data, context):
    if data is None:
        return
    if data[0]["body"] == "raise":
        raise PredictionException("too warm", 418)
    context.set_response_content_type(0, "image/png")
    context.set_response_status(404, "no such cat", 1)
    return [b"png", "x"]
"""


def test_statuses_and_content_types(tmp_path: Path) -> None:
    typed, failed = answers(tmp_path, STATUS, "handle", 1, 2)
    assert TorchServeOutput(None).encode(typed) == (b"png", "image/png")
    assert isinstance(failed, HandlerFailed)
    assert (failed.message, failed.details) == ("no such cat", {"status": 404})
    with pytest.raises(HandlerFailed, match="too warm") as raised:
        answers(tmp_path, STATUS, "handle", "raise", 2)
    assert raised.value.details == {"status": 418}


def test_what_is_not_sent_is_refused(tmp_path: Path) -> None:
    for call, fault in (
        ("set_response_header(0, 'X-A', 'b')", "X-A"),
        ("set_response_status(201)", "201"),
    ):
        source = f"def handle(data, context):\n    if data:\n        context.{call}\n"
        with pytest.raises(HandlerFailed, match=fault):
            answers(tmp_path, source, "handle", 1)
    with pytest.raises(OutputInvalid, match="returned int"):
        answers(tmp_path, "def handle(data, context):\n    return 3\n", "handle", 1)
    with pytest.raises(HandlerSignatureError, match="has no handler 'Nothing'"):
        answers(tmp_path, "x = 1\n", "Nothing", 1)


@pytest.mark.parametrize("script", [False, True], ids=["state dict", "TorchScript"])
def test_the_base_handler_runs_a_model(tmp_path: Path, script: bool) -> None:
    torch = pytest.importorskip("torch")
    source = "from ts.torch_handler.base_handler import BaseHandler\nclass Mine(BaseHandler):\n    def preprocess(self, data):\n        return super().preprocess([one['body'] for one in data])\n"
    layer = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.ones_(layer.weight)
    if script:
        torch.jit.trace(layer, torch.zeros(1, 2)).save(str(tmp_path / "weights.pt"))
    else:
        (tmp_path / "model.py").write_text(
            "import torch\nclass Model(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(2, 1, bias=False)\n"
        )
        torch.save(layer.state_dict(), tmp_path / "weights.pth")
    assert answers(tmp_path, source, "Mine", [1.0, 2.0], [3.0, 4.0]) == [[3.0], [7.0]]


def multipart(fields: dict[str, tuple[str, bytes]]) -> bytes:
    parts = [
        b'--xyz\r\nContent-Disposition: form-data; name="%s"; filename="f"\r\nContent-Type: %s\r\n\r\n%s\r\n'
        % (name.encode(), kind.encode(), value)
        for name, (kind, value) in fields.items()
    ]
    return b"".join(parts) + b"--xyz--\r\n"


@given(st.binary().filter(lambda value: b"--xyz" not in value))
def test_files_of_a_form_keep_every_byte(value: bytes) -> None:
    body = multipart({"data": ("image/jpeg", value), "note": ("application/json", b"[1]")})
    about = {"content_type": "multipart/form-data; boundary=xyz", "query": {"k": "v"}}
    assert fields_of(body, about) == {"k": "v", "data": bytearray(value), "note": [1]}


MULTIPART = {"content_type": "multipart/form-data; boundary=xyz"}


def test_a_field_of_any_type_keeps_its_bytes() -> None:
    for kind in ("message/rfc822", "multipart/mixed", "application/octet-stream"):
        assert fields_of(multipart({"data": (kind, b"a: b\r\n\r\nc")}), MULTIPART) == {
            "data": bytearray(b"a: b\r\n\r\nc")
        }


@pytest.mark.parametrize("quoting", ['name="caf\u00e9"', "name*=utf-8''caf%C3%A9", "name=caf\u00e9"])
def test_names_of_fields_may_have_any_characters(quoting: str) -> None:
    body = f"--xyz \r\nContent-Disposition: form-data; {quoting}\r\n\r\n1\r\n--xyz--".encode()
    assert fields_of(body, MULTIPART) == {"caf\u00e9": bytearray(b"1")}


def test_the_time_for_a_form_is_linear_in_its_size() -> None:
    lines = b"\r\n" * (10 << 20)
    begun_s = time.process_time()
    assert len(fields_of(multipart({"data": ("text/csv", lines)}), MULTIPART)["data"]) == len(lines)
    with pytest.raises(BadInput, match="malformed"):
        fields_of(b"--xyz" + lines, MULTIPART)
    with pytest.raises(BadInput, match="malformed"):
        fields_of(lines, MULTIPART)
    with pytest.raises(BadInput, match="more than 1000 fields"):
        fields_of(b"--xyz\r\n\r\n\r\n" * 100_000, MULTIPART)
    # Headers that would take long to parse are refused early.
    head = b"\r\nContent-Disposition: " + b';"' * 1000 + b"\r\n\r\n\r\n"
    with pytest.raises(BadInput, match="malformed"):
        fields_of(b"--xyz" + b"--xyz".join([head] * 1000) + b"--xyz--", MULTIPART)
    assert time.process_time() - begun_s < 2.0


def test_json_with_the_type_that_curl_sends_by_default_is_the_body() -> None:
    about = {"content_type": "application/x-www-form-urlencoded"}
    assert fields_of(b'{"a": 1}', about) == {"body": {"a": 1}}
    assert fields_of(b"a=1", about) == {"a": "1"}
    with pytest.raises(BadInput, match="more than 1000 fields"):
        fields_of(b"a=1&" * 2000, about)


def test_other_bodies() -> None:
    assert fields_of(b"a=1&b=x+y", {"content_type": "application/x-www-form-urlencoded"}) == {
        "a": "1",
        "b": "x y",
    }
    assert fields_of(b"\x00", {}) == {"body": bytearray(b"\x00")}
    assert fields_of({"x": 1}, {}) == {"body": {"x": 1}}
    with pytest.raises(BadInput):
        fields_of(b"no form", {"content_type": "multipart/form-data; boundary=xyz"})
    with pytest.raises(BadInput):
        fields_of(
            multipart({"n": ("application/json", b"{")}),
            {"content_type": "multipart/form-data; boundary=xyz"},
        )
    assert json.loads(TorchServeOutput(None).encode("text")[0]) == "text"
