"""Failures of user code: described with the innermost file and line of the user's folder."""

import importlib.util
import json
import socket
import traceback
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from pilotflame.errors import HandlerFailed, HandlerImportError, PilotflameError, SnapshotMismatch
from pilotflame.handlers.codec import OutputCodec
from pilotflame.handlers.failure import MAX_TRACEBACK_CHARS, explain, is_out_of_memory, locate


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str], ModuleType]:
    """Return a function that makes a module in the user's folder from its text."""

    def from_text(text: str) -> ModuleType:
        path = tmp_path / "code" / "handler.py"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        spec = importlib.util.spec_from_file_location("handler", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return from_text


def caught(call: Callable[[], object]) -> BaseException:
    try:
        call()
    except BaseException as error:  # noqa: BLE001  any kind is what is tested
        return error
    raise AssertionError("nothing was raised")


def test_file_line_and_exception_are_named(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    module = load("def handler(event):\n    x = 1\n    return event['a']\n")
    error = caught(lambda: module.handler({}))
    described = explain(HandlerFailed, "The handler", error, tmp_path / "code", remedy="Mend it.")
    assert described.message == "The handler failed at handler.py, line 3: KeyError: 'a'"
    assert described.remedy == "Mend it."
    assert described.details["exception"] == "KeyError"
    assert (described.details["file"], described.details["line"]) == ("handler.py", 3)
    json.dumps(described.to_wire())


def test_the_traceback_has_the_users_frames_only(load: Callable[[str], ModuleType], tmp_path: Path) -> None:
    module = load("import json\ndef handler(event):\n    return json.loads(event)\n")

    error = caught(lambda: module.handler("{"))
    text = explain(HandlerFailed, "The handler", error, tmp_path / "code").trace
    assert "handler.py" in text
    assert "JSONDecodeError" in text
    # Only the files of the function have full paths.
    assert f'File "{tmp_path}/code/handler.py", line 3, in handler' in text
    assert 'File "json/decoder.py", line ' in text
    assert "self.scan_once(" in text
    error = caught(lambda: OutputCodec(None).encode(object()))
    text = explain(HandlerFailed, "The handler", error, tmp_path / "code").trace
    assert "codec.py" not in text


def test_the_innermost_frame_inside_the_folder_counts(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module = load("import json\ndef handler(event):\n\n    return json.loads(event)\n")
    assert locate(caught(lambda: module.handler("{")), tmp_path / "code") == ("handler.py", 4)
    assert locate(caught(lambda: module.handler("{")), tmp_path / "elsewhere") == ("", 0)


@pytest.mark.parametrize(
    "statement",
    [
        'exec("1 / 0")',
        'eval("1 +")',
        'import importlib; importlib.import_module("no_such_thing")',
        'import collections; collections.namedtuple("T", "a")()',
    ],
)
def test_code_without_a_file_is_not_taken_for_a_file_of_the_folder(
    load: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statement: str
) -> None:
    module = load(f"def handler(event):\n    {statement}\n")
    monkeypatch.chdir(tmp_path / "code")  # as in a zygote: a name like <string> would resolve to this folder
    assert locate(caught(lambda: module.handler(None)), tmp_path / "code") == ("handler.py", 2)


def test_a_syntax_error_has_the_place_in_the_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ny = = 2\n")
    error = caught(lambda: compile(path.read_text(), str(path), "exec"))
    assert locate(error, tmp_path) == ("broken.py", 2)
    assert (
        "broken.py, line 2: SyntaxError" in explain(HandlerImportError, "Importing", error, tmp_path).message
    )


def test_a_folder_named_through_a_link_is_the_same_folder(
    load: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    module = load("def handler(event):\n    raise ValueError('no')\n")
    (tmp_path / "link").symlink_to(tmp_path / "code")
    assert locate(caught(lambda: module.handler(None)), tmp_path / "link") == ("handler.py", 2)


def test_a_pilotflame_error_keeps_its_message_and_remedy(tmp_path: Path) -> None:
    described = explain(
        HandlerFailed, "build(context)", SnapshotMismatch("lacks w.", remedy="Add w."), tmp_path, remedy="no"
    )
    assert described.message == "build(context) failed: lacks w."
    assert described.remedy == "Add w."
    assert described.details["exception"] == "snapshot_mismatch"


def test_an_exception_that_cannot_be_printed_is_described(tmp_path: Path) -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    described = explain(HandlerFailed, "The handler", Mute(), tmp_path)
    assert "Mute" in described.message
    json.dumps(described.to_wire())


def test_an_endless_traceback_is_cut_to_its_end(tmp_path: Path) -> None:
    described = explain(HandlerFailed, "The handler", ValueError("x" * 100_000 + "the end"), tmp_path)
    assert len(described.trace) <= MAX_TRACEBACK_CHARS
    assert described.trace.rstrip().endswith("the end")


def test_a_cause_is_in_the_traceback(tmp_path: Path) -> None:
    def fail() -> None:
        try:
            (tmp_path / "missing").stat()
        except FileNotFoundError as error:
            raise PilotflameError("outer") from error

    text = explain(HandlerFailed, "The handler", caught(fail), tmp_path).trace
    assert "FileNotFoundError" in text
    assert text.index("FileNotFoundError") < text.index("outer")
    assert 'File "pathlib.py", line ' in text.replace("pathlib/_local.py", "pathlib.py")
    assert traceback.format_exc() == "NoneType: None\n"


# -- out of memory


class Silent(RuntimeError):
    def __str__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    ("interfaces", "told"),
    [([(1, "lo")], True), ([(1, "lo"), (2, "eth0")], False)],
    ids=["isolated", "connected"],
)
def test_a_name_that_does_not_resolve_without_a_network(
    interfaces: list[tuple[int, str]], told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "if_nameindex", lambda: interfaces)
    with pytest.raises(urllib.error.URLError) as caught:
        urllib.request.urlopen("http://weights.invalid/")
    error = explain(HandlerFailed, "The handler", caught.value, tmp_path)
    assert ("resources.network" in error.remedy) is told
    assert "resources.network" not in explain(HandlerFailed, "The handler", ValueError("no"), tmp_path).remedy


def of_torch() -> BaseException:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    return caught.value


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA ran full"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        of_torch(),
    ],
    ids=lambda error: str(error)[:24],
)
def test_out_of_memory_is_recognised(error: BaseException) -> None:
    assert is_out_of_memory(error)


class OutOfMemoryError(Exception):
    """An error of another library, with the name of torch's error."""


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), ValueError("out of memory"), OutOfMemoryError(), Silent()]
)
def test_other_errors_are_not_out_of_memory(error: BaseException) -> None:
    assert not is_out_of_memory(error)
