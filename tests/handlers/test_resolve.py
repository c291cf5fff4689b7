"""Resolving: from a user's file to a handler. An import changes the process, so the tests undo it."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pilotflame.errors import (
    BadInput,
    HandlerError,
    HandlerImportError,
    HandlerSignatureError,
    InputInvalid,
    OutputInvalid,
)
from pilotflame.handlers.contract import Context
from pilotflame.handlers.handler import HandlerKind
from pilotflame.handlers.resolve import Handler, resolve

Resolve = Callable[..., Handler]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Yield a function's folder. Afterwards undo what imports have changed in this process."""
    cwd, path, modules = Path.cwd(), list(sys.path), set(sys.modules)
    root = tmp_path / "tone"
    root.mkdir()
    yield root
    os.chdir(cwd)
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if name not in modules and str(getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def made(folder: Path) -> Resolve:
    """Return a function that resolves a handler from the texts of its file and of other files beside it."""

    def make(text: str, reference: str = "handler.py", **others: str) -> Handler:
        for name, content in {reference.partition(":")[0].removesuffix(".py"): text, **others}.items():
            path = folder / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(content))
        return resolve(folder, reference)

    return make


# -- kinds and arity

KINDS = [
    ("def handler(event): return event", HandlerKind.PLAIN),
    ("async def handler(event): return event", HandlerKind.ASYNC),
    ("def handler(event): yield event", HandlerKind.GENERATOR),
    ("async def handler(event): yield event", HandlerKind.ASYNC_GENERATOR),
    ("handler = lambda event: event", HandlerKind.PLAIN),
    ("class C:\n    def __call__(self, event): return 1\nhandler = C()", HandlerKind.PLAIN),
    ("class C:\n    async def __call__(self, event): return 1\nhandler = C()", HandlerKind.ASYNC),
    ("class C:\n    def __call__(self, event): yield 1\nhandler = C()", HandlerKind.GENERATOR),
    ("class C:\n    async def __call__(self, event): yield 1\nhandler = C()", HandlerKind.ASYNC_GENERATOR),
    ("class C:\n    async def m(self, event): return 1\nhandler = C().m", HandlerKind.ASYNC),
    ("class C:\n    @staticmethod\n    def m(event): yield 1\nhandler = C.m", HandlerKind.GENERATOR),
    ("import functools\nasync def f(a, event): return 1\nhandler = functools.partial(f, 1)", HandlerKind.ASYNC),
    ("import functools\ndef f(a, event): yield 1\nhandler = functools.partial(f, 1)", HandlerKind.GENERATOR),
    ("import functools\ndef d(f):\n    @functools.wraps(f)\n    def w(*a): return f(*a)\n    return w\n@d\nasync def handler(event): return 1", HandlerKind.ASYNC),
    ("import json\nhandler = json.dumps", HandlerKind.PLAIN),
]  # fmt: skip


@pytest.mark.parametrize(("text", "kind"), KINDS)
def test_the_kind_is_found_without_calling(made: Resolve, text: str, kind: HandlerKind) -> None:
    handler = made(text)
    assert handler.kind is kind
    assert not handler.takes_context
    assert handler.kind.streaming is ("generator" in kind.value)
    assert handler.kind.on_loop is ("async" in kind.value)
    assert handler.facts() == {
        "dialect": "pilotflame",
        "entry": "handler.py:handler",
        "kind": kind.value,
        "streaming": kind.streaming,
        "aggregate": True,
        "batch": None,
        "input_schema": {},
        "output_schema": {},
    }


@pytest.mark.parametrize(
    ("signature", "takes_context"),
    [
        ("event", False),
        ("event, context", True),
        ("*args", True),
        ("event, *rest", True),
        ("event, context=None", True),
        ("event, /", False),
        ("event, *, loud=False", False),
        ("event, context, third=3", True),
    ],
)
def test_the_arity_decides_whether_it_takes_the_context(
    made: Resolve, signature: str, takes_context: bool
) -> None:
    assert made(f"def handler({signature}): pass").takes_context is takes_context


@pytest.mark.parametrize("signature", ["", "a, b, c", "event, *, loud", "*, event", "**event"])
def test_another_arity_is_refused_with_the_signature(made: Resolve, signature: str) -> None:
    with pytest.raises(HandlerSignatureError) as caught:
        made(f"def handler({signature}): pass")
    assert f"is defined as ({signature})" in caught.value.message
    assert "handler in handler.py" in caught.value.message
    assert "(event) or (event, context)" in caught.value.remedy


def test_a_name_after_a_colon_and_a_file_in_a_subfolder(made: Resolve, folder: Path) -> None:
    handler = made(
        "import near\ndef predict(event): return near.X", "src/main.py:predict", **{"src/near": "X = 5"}
    )
    assert handler.call(None) == 5
    assert sys.path[0] == str(folder / "src")


@pytest.mark.parametrize(
    ("text", "expected", "remedy"),
    [
        ("x = 1", "handler.py defines no `handler`", "def handler(event)"),
        ("handler = 5", "`handler` in handler.py is an int, not a function", "def handler"),
        ("class handler: pass", "`handler` in handler.py is a class", "def handler"),
        ("handler = None", "defines no `handler`", "def handler"),
        ("async def handler(scope, receive, send): ...", "is a web app", 'asgi = "handler:handler"'),
        ("def handler(environ, start_response): ...", "is a web app", 'wsgi = "handler:handler"'),
        ("class A:\n def __call__(self, env, start_response): ...\nhandler = A()", "is a web app", "wsgi"),
    ],
)
def test_what_is_no_handler_is_refused(made: Resolve, text: str, expected: str, remedy: str) -> None:
    with pytest.raises(HandlerSignatureError, match=expected) as caught:
        made(text)
    assert remedy in caught.value.remedy


# -- hooks


async def test_hooks_take_a_context_or_nothing(made: Resolve) -> None:
    handler = made("""
        def handler(event): pass
        def build(): return "built"
        async def setup(context): return context.function
        def teardown(context): return context.revision
    """)
    context = Context("tone", "r1")
    assert handler.build is not None
    assert handler.setup is not None
    assert handler.teardown is not None
    assert handler.build(context) == "built"
    assert await handler.setup(context) == "tone"
    assert handler.teardown(context) == "r1"


def test_without_hooks_there_are_none(made: Resolve) -> None:
    handler = made("def handler(event): pass")
    assert (handler.build, handler.setup, handler.teardown) == (None, None, None)


@pytest.mark.parametrize(
    ("hook", "expected"),
    [
        ("async def build(context): pass", "`build` in handler.py is async"),
        ("async def forked(context): pass", "`forked` in handler.py is async"),
        ("def build(context): yield", "`build` in handler.py is generator"),
        ("def setup(context): yield", "`setup` in handler.py is generator"),
        ("async def teardown(context): yield", "`teardown` in handler.py is async generator"),
        ("def setup(a, b): pass", r"`setup in handler.py` is defined as \(a, b\)"),
        ("setup = 5", "`setup` in handler.py is an int"),
    ],
)
def test_hooks_that_cannot_be_called_are_refused(made: Resolve, hook: str, expected: str) -> None:
    with pytest.raises(HandlerSignatureError, match=expected) as caught:
        made(f"def handler(event): pass\n{hook}")
    assert caught.value.remedy


# -- batch


def test_a_batch_handler_takes_one_event_of_its_list(made: Resolve) -> None:
    handler = made("""
        import pilotflame
        @pilotflame.batch(max_size=3)
        def handler(events: list[int]) -> list[str]: return [str(e) for e in events]
    """)
    assert handler.batch is not None
    assert handler.batch.max_size == 3
    assert handler.input.decode(b"5") == 5
    with pytest.raises(InputInvalid):
        handler.input.decode(b"[5]")
    assert handler.output.encode("a")[0] == b'"a"'
    facts = handler.facts()
    assert (facts["batch"], facts["input_schema"]["type"], facts["output_schema"]["type"]) == (
        3,
        "integer",
        "string",
    )


def test_arrays_may_be_announced_and_are_not_checked(made: Resolve) -> None:
    for annotation in (
        "np.ndarray",
        "npt.NDArray[np.float32]",
        "dict[str, np.ndarray]",
        "list[np.ndarray] | None",
    ):
        handler = made(
            f"import numpy as np, numpy.typing as npt\ndef handler(event) -> {annotation}:\n    return np.ones(1)"
        )
        assert handler.output.schema() == {}


def test_an_alias_of_arrays_may_be_announced(made: Resolve) -> None:
    handler = made(
        "import numpy as np\nfrom typing_extensions import TypeAliasType\n"
        "Image = TypeAliasType('Image', np.ndarray)\ndef handler(event) -> list[Image]:\n    return [np.ones(1)]"
    )
    assert handler.output.schema() == {}


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the statement `type` is new in Python 3.12")
def test_an_alias_that_contains_itself_may_be_announced(made: Resolve) -> None:
    handler = made("type Json = dict[str, Json] | int\ndef handler(event) -> Json:\n    return 1")
    assert handler.output.schema() != {}


@pytest.mark.parametrize("prefix", ["", "async "])
def test_streaming_a_batch_is_refused(made: Resolve, prefix: str) -> None:
    with pytest.raises(HandlerSignatureError, match="generator with @batch") as caught:
        made(f"import pilotflame\n@pilotflame.batch()\n{prefix}def handler(events): yield 1")
    assert "remove one" in caught.value.remedy


def test_a_batch_size_that_cannot_be_is_an_import_failure_with_its_line(made: Resolve) -> None:
    with pytest.raises(HandlerImportError, match=r"handler\.py, line 2: .*max_size=0"):
        made("import pilotflame\n@pilotflame.batch(max_size=0)\ndef handler(events): pass")


# -- annotations

TAKES = [
    ("event: int", b"5", 5, b'"x"'),
    ("event: list[int]", b"[1]", [1], b'["x"]'),
    ("event: Optional[int]", b"null", None, b'"x"'),
    ("event: int | None = None", b"null", None, b'"x"'),
    ("event: Annotated[int, Field(gt=3)]", b"4", 4, b"3"),
    ("event: dict[str, list[float]]", b'{"a":[1]}', {"a": [1.0]}, b'{"a":1}'),
    ("event: 'int'", b"5", 5, b'"x"'),
    ("event: Literal['a']", b'"a"', "a", b'"b"'),
]
HEAD = """
from typing import Annotated, Any, Literal, Optional
from collections.abc import AsyncIterator, Generator, Iterator
from pydantic import BaseModel, Field
"""


@pytest.mark.parametrize("future", ["", "from __future__ import annotations\n"])
@pytest.mark.parametrize(("parameter", "body", "event", "wrong"), TAKES)
def test_annotated_input_is_validated(
    made: Resolve, future: str, parameter: str, body: bytes, event: Any, wrong: bytes
) -> None:
    handler = made(f"{future}{HEAD}def handler({parameter}): return event")
    assert handler.input.decode(body) == event
    with pytest.raises(InputInvalid):
        handler.input.decode(wrong)


def test_models_that_refer_forward_are_found(made: Resolve) -> None:
    handler = made("""
        from __future__ import annotations
        from pydantic import BaseModel

        def handler(event: Node, context: "Context") -> Node: return event

        class Node(BaseModel):
            name: str
            children: list[Node] = []

        from pilotflame import Context
    """)
    assert handler.takes_context
    with pytest.raises(InputInvalid) as caught:
        handler.input.decode(b'{"name":"a","children":[{"name":"b","children":[{}]}]}')
    assert caught.value.details["problems"][0]["path"] == "input.children[0].children[0].name"


def test_the_context_may_be_annotated_with_a_name_only_known_to_type_checkers(made: Resolve) -> None:
    handler = made("""
        from __future__ import annotations
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from pilotflame import Context
        def handler(event: int, context: Context) -> int: return event
    """)
    assert handler.takes_context
    assert handler.input.schema() == {"type": "integer"}


@pytest.mark.parametrize("annotation", ["Any", "object", "None"])
def test_annotations_that_say_nothing_check_nothing(made: Resolve, annotation: str) -> None:
    handler = made(f"{HEAD}def handler(event: {annotation}) -> {annotation}: return event")
    assert handler.input.decode(b'{"a":[1]}') == {"a": [1]}
    assert handler.output.encode({"a": [1]})[0] == b'{"a":[1]}'
    assert (handler.input.schema(), handler.output.schema()) == ({}, {})


def test_bytes_in_and_out(made: Resolve) -> None:
    handler = made("def handler(event: bytes) -> bytes: return event")
    assert handler.input.decode(b"{not json", "application/json") == b"{not json"
    assert handler.output.encode(b"\xff") == (b"\xff", "application/octet-stream")


STREAMS = [
    ("def", "Iterator[int]"),
    ("def", "Generator[int, None, None]"),
    ("def", "'Iterator[int]'"),
    ("async def", "AsyncIterator[int]"),
]


@pytest.mark.parametrize(("define", "annotation"), STREAMS)
def test_a_streams_pieces_are_annotated_not_the_stream(made: Resolve, define: str, annotation: str) -> None:
    handler = made(f"{HEAD}{define} handler(event) -> {annotation}: yield 1")
    assert handler.output.encode(1)[0] == b"1"
    with pytest.raises(OutputInvalid):
        handler.output.encode("x")


def test_a_callable_instance_and_a_partial_are_annotated_too(made: Resolve) -> None:
    text = "class C:\n    def __call__(self, event: int): return 1\nhandler = C()"
    assert made(text).input.schema() == {"type": "integer"}
    text = "import functools\ndef f(a: str, event: int): return 1\nhandler = functools.partial(f, 'x')"
    assert made(text).input.schema() == {"type": "integer"}


@pytest.mark.parametrize("annotation", ["'Missing'", "'list[Missing]'", "Lock", "'1 +'"])
def test_annotations_that_cannot_be_used_are_named(made: Resolve, annotation: str) -> None:
    with pytest.raises(
        HandlerSignatureError, match=r"annotations of `handler in handler\.py` cannot be used"
    ):
        made(f"class Lock: pass\ndef handler(event: {annotation}): pass")


def test_json_that_is_broken_and_json_that_does_not_fit_differ(made: Resolve) -> None:
    handler = made("def handler(event: int): pass")
    with pytest.raises(BadInput):
        handler.input.decode(b"{")
    with pytest.raises(InputInvalid):
        handler.input.decode(b"{}")


# -- imports that fail


def test_a_missing_file_is_reported_with_the_files_that_exist(folder: Path) -> None:
    (folder / "main.py").touch()
    with pytest.raises(HandlerImportError, match=r"handler\.py is not in .*\(there: main\.py\)") as caught:
        resolve(folder)
    assert "Create it" in caught.value.remedy
    with pytest.raises(HandlerImportError, match="there: nothing"):
        resolve(folder / "missing")


def test_a_file_that_is_not_python_is_refused(folder: Path) -> None:
    (folder / "handler.txt").touch()
    with pytest.raises(HandlerImportError, match=r"handler\.txt is not a Python file"):
        resolve(folder, "handler.txt")


FAILS = [
    ("def handler(event):\n    return (", "SyntaxError", 2),
    ("x = 1\nimport no_such_module", "ModuleNotFoundError", 2),
    ("x = 1\n\nraise SystemExit(3)", "SystemExit: 3", 3),
    ("import sys\nsys.exit('bye')", "SystemExit: bye", 2),
    ("open('/no/such/file')", "FileNotFoundError", 1),
    ("from json import nothing_like_it", "ImportError", 1),
    ("import importlib\nimportlib.import_module('no_such_module')", "ModuleNotFoundError", 2),
    ("exec('1/0')", "ZeroDivisionError", 1),
    ("\n\neval('1 +')", "SyntaxError", 3),
    ("x = '\x00'", "null bytes", 0),
]


@pytest.mark.parametrize(("text", "exception", "line"), FAILS)
def test_an_import_that_fails_names_line_and_exception(
    made: Resolve, text: str, exception: str, line: int
) -> None:
    with pytest.raises(HandlerImportError, match=r"Importing handler\.py failed") as caught:
        made(text)
    assert exception in caught.value.message
    if line:
        assert f"at handler.py, line {line}: " in caught.value.message
        assert (caught.value.details["file"], caught.value.details["line"]) == ("handler.py", line)


def test_a_missing_package_has_the_remedy(made: Resolve) -> None:
    with pytest.raises(HandlerImportError) as caught:
        made("import no_such_module")
    assert "`no_such_module` to requirements.txt" in caught.value.remedy
    assert "--install" in caught.value.remedy


@pytest.mark.parametrize(
    ("inner", "place"),
    [
        ("def go():\n    return 1 / 0\ngo()", "deep/inner.py, line 2"),
        ("x = (", "deep/inner.py, line 1"),
        ("import json\njson.loads('{')", "deep/inner.py, line 2"),
    ],
)
def test_the_innermost_line_of_the_users_own_code_is_named(made: Resolve, inner: str, place: str) -> None:
    with pytest.raises(HandlerImportError) as caught:
        made(
            "import near\ndef handler(event): pass",
            **{"near": "from deep import inner", "deep/__init__": "", "deep/inner": inner},
        )
    assert f"Importing handler.py failed at {place}: " in caught.value.message
    traceback = caught.value.trace
    assert "near.py" in traceback
    assert "resolve.py" not in traceback


def test_every_refusal_is_one_paragraph_over_the_wire(made: Resolve) -> None:
    with pytest.raises(HandlerError) as caught:
        made("import no_such_module")
    wire = caught.value.to_wire()
    assert "\n" not in wire["message"]
    assert json.loads(json.dumps(wire)) == wire


def test_in_a_fresh_process_the_folder_comes_first_and_dataclasses_work(folder: Path) -> None:
    """Needs a process of its own: this process has already loaded modules with these names."""
    (folder / "handlers").mkdir()
    (folder / "handlers" / "__init__.py").write_text("MINE = True")
    (folder / "runtime.py").write_text("MINE = True")
    (folder / "handler.py").write_text(
        "from __future__ import annotations\n"
        "import dataclasses, handlers, runtime, pilotflame\n"
        "@dataclasses.dataclass\nclass D:\n    x: int\n"
        "assert handlers.MINE and runtime.MINE\n"
        "def handler(event: D): return [event.x, __name__]\n"
    )
    program = (
        "import sys, json, pathlib\nfrom pilotflame.handlers.resolve import resolve\n"
        "h = resolve(pathlib.Path(sys.argv[1]))\nprint(json.dumps(h.call(h.input.decode(b'{\"x\":1}'))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [1, "handler"]
