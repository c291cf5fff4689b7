"""The hint for handlers that load weights at import: it names the class that the code used, and its code runs unchanged.

Also settings that reach the snapshots of a worker, the event loop of hooks, and the level of logging.
"""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pilotflame.runtime.calls.link.frames import FrameKind
from pilotflame.runtime.calls.link.worker_spec import Weights, WorkerSpec
from pilotflame.runtime.calls.worker import function_setup
from pilotflame.runtime.calls.worker.function_setup import call_hook, run_without_loop, weights_hint
from pilotflame.runtime.ground.settings.resources import Resources
from pilotflame.snapshot.format.create import create
from pilotflame.snapshot.format.manifest import MANIFEST_NAME
from pilotflame.snapshot.handle import Snapshot
from safetensors.torch import save_file
from simulated_device import ADDED
from worker_process import WorkerProcess

CONFIG = "AutoConfig.from_pretrained(context.snapshot.path)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    from tiny_models import write_bert

    # Make the weights large enough for a hint.
    sizes = {"hidden_size": 256, "vocab_size": 9000}
    return write_bert(tmp_path_factory.mktemp("bert"), "BertForSequenceClassification", **sizes)


def hinted(source: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines of code in the hint for a handler with this source."""
    module = types.ModuleType("hinted_handler")
    module.__file__ = str(folder / "code" / "handler.py")
    exec(source.format(path=str(folder)), vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    hint = weights_hint(folder / "code")
    assert re.search(r" in handler\.py holds \d\d MiB of weights, which were loaded at import", hint)
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
    # On a machine with a GPU, the pipeline of the handler uses the GPU, and the hint has a `setup`.
    if setup := code.get("setup"):
        setup(types.SimpleNamespace(state=pipe))  # type: ignore[operator]
    [found] = pipe("the sea is calm")
    [wanted] = vars(sys.modules["hinted_handler"])["pipe"]("the sea is calm")
    assert found["label"] == wanted["label"]
    assert found["score"] == pytest.approx(wanted["score"], abs=1e-5)


# -- settings that reach the snapshots of a worker

ON_DEVICE = (
    ADDED
    + """
import ctypes
from torch import nn

# Copies that take longer than the start of a worker.
simulated_device.SimulatedDevice.__init__.__defaults__ = (0, 0.2)

def build(context):
    with context.snapshot.skeleton():
        net = nn.Linear(8, 8)
    context.snapshot.restore(net, device=DEVICE)
    return net

def handler(event, context):
    if event == "checksums":
        context.snapshot.wait()
        return sum(len(upload.copies.sums) for upload in context.snapshot.modules.uploads)
    # As an extension reads that gets the address past the dispatcher.
    return list(ctypes.string_at(context.state.weight.untyped_storage().data_ptr(), 8))
"""
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., WorkerProcess]]:
    root, started = tmp_path / "weights", list[WorkerProcess]()
    root.mkdir()
    save_file({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, root / "model.safetensors")
    create(root).write(root / MANIFEST_NAME)
    weights = Weights(name="", root=root, manifest=root / MANIFEST_NAME)

    def start(device: str, **spec: Any) -> WorkerProcess:
        started.append(
            WorkerProcess(tmp_path, ON_DEVICE.replace("DEVICE", repr(device)), weights=(weights,), **spec)
        )
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_auto_is_an_error_in_a_function_with_gpus(start: Callable[..., WorkerProcess]) -> None:
    worker = start("auto", resources=Resources(gpus=1))
    worker.send(FrameKind.ACTIVATE, 0, {"env": {"CUDA_VISIBLE_DEVICES": ""}})
    assert 'resources.gpus is 1, but torch finds no CUDA device for "auto"' in str(
        worker.expect(FrameKind.FAILED).json()
    )


def test_a_worker_waits_for_all_weights_if_the_function_says_so(start: Callable[..., WorkerProcess]) -> None:
    worker = start("simulated", wait_for_weights=True)
    worker.ready()
    assert worker.ask(1) == [0, 0, 128, 63, 0, 0, 128, 63]


@pytest.mark.parametrize("parks", [True, False])
def test_checksums_are_made_where_a_function_parks(start: Callable[..., WorkerProcess], parks: bool) -> None:
    worker = start("simulated", parks=parks)
    worker.ready()
    assert worker.ask(1, "checksums") == parks


def test_a_plugin_that_an_environment_lacks_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """An observer that cannot be imported is left out and logged, so that the function works without it."""
    places = ("no_such_plugin.worker:observe", "json:no_such_name")
    spec = WorkerSpec(function="f", revision="r1", code=Path("/code"), observers=places)
    assert list(function_setup._observers(spec)) == []
    first, second = capsys.readouterr().err.splitlines()
    assert (
        first == "calls are not observed by no_such_plugin.worker:observe: No module named 'no_such_plugin'"
    )
    assert second.startswith("calls are not observed by json:no_such_name: ")


# -- hooks and logging


def kind(*, on_loop: bool) -> Any:
    return types.SimpleNamespace(kind=types.SimpleNamespace(on_loop=on_loop))


async def suspended(context: Any) -> asyncio.AbstractEventLoop:
    await asyncio.sleep(0)
    return asyncio.get_running_loop()


async def test_a_hook_of_an_async_handler_runs_on_the_loop_of_its_worker() -> None:
    context: Any = None
    assert await call_hook(kind(on_loop=True), suspended, context) is asyncio.get_running_loop()
    assert await call_hook(kind(on_loop=True), lambda context: 1, context) == 1
    assert await call_hook(kind(on_loop=True), None, context) is None


def test_an_async_hook_of_a_plain_handler_gets_a_loop_of_its_own() -> None:
    context: Any = None
    assert run_without_loop(call_hook(kind(on_loop=False), suspended, context)).is_closed()
    with pytest.raises(RuntimeError, match="was suspended"):
        run_without_loop(call_hook(kind(on_loop=True), suspended, context))


@pytest.mark.parametrize(
    ("set_level", "handlers", "level"),
    [
        (None, [], logging.INFO),
        (logging.WARNING, [], logging.WARNING),
        (logging.DEBUG, [], logging.DEBUG),
        (None, [logging.NullHandler()], logging.WARNING),
    ],
)
def test_lines_from_info_on_are_logged_unless_the_code_decides(
    set_level: int | None, handlers: list[logging.Handler], level: int
) -> None:
    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(root, "handlers", handlers)
        patch.setattr(root, "level", logging.WARNING)
        patch.setattr(logging, "lastResort", None)
        function_setup.begin_logging()
        if set_level is not None:
            root.setLevel(set_level)
        function_setup.default_level()
        assert root.level == level
        assert logging.lastResort is not None
