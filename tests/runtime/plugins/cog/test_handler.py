"""Cog's predictors, unchanged, deployed to a real gateway: typed inputs, files in both directions, iterators."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live import LIMIT_S, Gate, Gateway
from pilotflame.errors import InputInvalid
from pilotflame.runtime.calls.serving.invocation import Invocation

pytestmark = pytest.mark.asyncio(loop_scope="module")

PICTURE = "data:image/png;base64," + base64.b64encode(b"picture").decode()


def pieces(text: str) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]


HERE = {"env.PILOTFLAME_INPUT_NETWORKS": "127.0.0.0/8"}
"""Lets the function fetch input files from this machine."""


async def problems(function: Any, event: Any) -> dict[str, str]:
    """Return the problems of an input, by the path of each field."""
    error = await function.error(event)
    assert (error["status"], error["type"]) == (422, "input_invalid"), error
    return {problem["path"]: problem["problem"] for problem in error["details"]["problems"]}


@pytest_asyncio.fixture(loop_scope="module")
async def file_server() -> AsyncIterator[str]:
    """Serve five bytes as /cat.png, and 404 for all other paths."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1]
        found = path.startswith(b"/cat.png")
        status, body = (b"200 OK", b"bytes") if found else (b"404 Not Found", b"")
        writer.write(
            b"HTTP/1.1 %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s" % (status, len(body), body)
        )
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


# -- the examples


async def test_typed_inputs(deploy_folder: Callable[..., Any], file_server: str) -> None:
    function = await deploy_folder("cog-inputs", **HERE)
    assert (function.described["dialect"], function.described["entry"]) == ("cog", "predict.py:Predictor")
    schema = function.described["input_schema"]
    assert schema["required"] == ["image"]
    assert schema["properties"]["image"] == {
        "description": "Image to caption", "format": "uri", "title": "Image", "type": "string", "x-order": 0,
    }  # fmt: skip
    assert schema["properties"]["style"]["enum"] == ["plain", "poetic"]
    length = schema["properties"]["length"]
    assert (length["type"], length["minimum"], length["maximum"], length["default"]) == ("integer", 1, 10, 3)
    assert function.described["output_schema"]["properties"]["caption"]["type"] == "string"

    answer = await function.answer({"input": {"image": PICTURE}})
    assert answer == {
        "caption": "a picture plain None open",
        "size": 7,
        "scores": [0.7] * 3,
        "thumbnail": None,
    }
    given = {
        "image": f"{file_server}/cat.png?x=1", "style": "poetic", "length": 1, "temperature": 2, "prefix": "so",
        "seed": 7, "token": "secret", "thumbnail": True, "tags": ["t"],
    }  # fmt: skip
    assert await function.answer(given) == {
        "caption": "so poetic 7 t secret", "size": 5, "scores": [2.0],
        "thumbnail": "data:text/plain;base64," + base64.b64encode(b"byte").decode(),
    }  # fmt: skip


async def test_inputs_that_do_not_fit_are_named(deploy_folder: Callable[..., Any], file_server: str) -> None:
    function = await deploy_folder("cog-inputs", **HERE)
    wrong = {
        "image": PICTURE, "style": "loud", "length": 11, "temperature": "hot", "prefix": "bad start", "seed": "x",
        "thumbnail": 7, "tags": [1],
    }  # fmt: skip
    found = await problems(function, {"input": wrong})
    assert set(found) == {f"input.{name}" for name in (*wrong, "tags[0]")} - {"input.image", "input.tags"}
    assert "'plain', 'poetic'" in found["input.style"]
    assert set(await problems(function, {})) == {"input.image"}
    for address, why in [
        (f"{file_server}/gone.png", "404"),
        ("http://127.0.0.1:1/x", "cannot be fetched"),
        ("file:///etc/passwd", "not the address of a file"),
        ("/etc/passwd", "not the address of a file"),
        ("data:nonsense", "cannot be fetched"),
        (5, "must be text"),
    ]:
        assert why in (await problems(function, {"image": address}))["input.image"]


async def test_our_own_network_is_not_fetched_from(
    deploy_folder: Callable[..., Any], file_server: str
) -> None:
    function = await deploy_folder("cog-inputs")
    found = await problems(function, {"image": f"{file_server}/cat.png"})
    assert "its address is not allowed: loopback" in found["input.image"]


async def test_an_iterator_streams(deploy_folder: Callable[..., Any]) -> None:
    function = await deploy_folder("cog-iterator")
    assert function.described["streaming"]
    assert function.described["output_schema"] == {"type": "string", "x-cog-array-display": "concatenate"}
    # The predictor has an input named `input`, which works bare and in the envelope.
    for event in ({"input": "hi", "count": 1}, {"input": {"input": "hi", "count": 1}}):
        assert pieces((await function.call(event)).text) == ["hi", " once", {}]
    assert pieces((await function.call({"input": "so"})).text) == ["so", " once", " upon", " a", " time", {}]
    assert set(await problems(function, {"count": 1})) == {"input.input"}
    assert set(await problems(function, {"input": "x", "count": 5})) == {"input.count"}


# -- what the examples do not show


async def test_fetched_files_are_gone_afterwards(
    deploy: Callable[..., Any], gateway: Gateway, file_server: str
) -> None:
    source = """
from cog import BasePredictor, File, Path
class Predictor(BasePredictor):
    def predict(self, path: Path, file: File, fail: bool = False) -> list:
        if fail:
            raise ValueError(str(path))
        return [str(path), file.name, path.suffix, file.read().decode(), type(path) is Path]
"""
    function = await deploy(None, dict(HERE), files={"predict.py": source})
    path, opened, suffix, content, same = await function.answer(
        {"path": f"{file_server}/cat.png", "file": PICTURE}
    )
    assert (suffix, content, same) == (".png", "picture", True)
    assert not Path(path).exists()
    assert not Path(opened).exists()
    error = await function.error({"path": f"{file_server}/cat.png", "file": PICTURE, "fail": True})
    assert not Path(error["message"].rpartition(" ")[2]).exists()


async def test_async_predictors_run_side_by_side(deploy: Callable[..., Any], gate: Gate) -> None:
    source = """
import gate
from cog import BasePredictor, Path, concurrent, current_scope
class Predictor(BasePredictor):
    async def setup(self):
        self.ready = True
    @concurrent(max=2)
    async def predict(self, n: int, path: Path = None) -> dict:
        current_scope().record_metric("n", n)
        self.record_metric("n", n)
        await gate.wait_async(str(n))
        return {"n": n, "ready": self.ready, "path": path and path.read_text()}
"""
    function = await deploy(None, {"scale.max": 1}, files={"predict.py": source}, gate=gate)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(function.answer({"n": n, "path": PICTURE})) for n in range(2)]
        assert {(await gate.next()).pid, (await gate.next()).pid} == {gate.arrived[0].pid}
        gate.open()
    assert [task.result() for task in asked] == [{"n": n, "ready": True, "path": "picture"} for n in range(2)]


async def test_cog_yaml_says_how_many_run_at_once(deploy: Callable[..., Any], gate: Gate) -> None:
    source = """
import gate
from cog import BasePredictor
class Predictor(BasePredictor):
    async def predict(self, n: int) -> int:
        await gate.wait_async(str(n))
        return n
"""
    config = "build:\n  python_packages:\n    - pydantic>=2\nconcurrency:\n  max: 2\npredict: predict.py:Predictor\n"
    function = await deploy(
        None, {"scale.max": 1}, files={"predict.py": source, "cog.yaml": config}, gate=gate
    )
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(function.answer({"n": n})) for n in range(2)]
        assert (await gate.next()).pid == (await gate.next()).pid
        gate.open()
    assert [task.result() for task in asked] == [0, 1]


@pytest.mark.parametrize(
    ("config", "fault", "word"),
    [
        ("build:\n  python_packages: [no-such-package==1.0]", "requirements_unmet", "cog.yaml is not met: line 1: no-such-package==1.0"),
        ("build:\n  python_requirements: more.txt", "requirements_unmet", "cog.yaml is not met: line 1: no-such-other"),
        ("build:\n  python_requirements: ../more.txt", "settings_invalid", "not in the folder"),
        ("build:\n  python_requirements: large.txt", "settings_invalid", "more than 65536 bytes"),
        ("concurrency:\n  max: many", "settings_invalid", "concurrency.max"),
        ("build: [", "settings_invalid", "cog.yaml cannot be used"),
        ("#" * 70_000, "settings_invalid", "more than 65536 bytes"),
        ("a: &a {x: 1}\nb: &b {<<: [*a, *a]}\nc: {<<: [*b, *b]}", "settings_invalid", "it merges mappings (<<)"),
        ("a: &a " + "x" * 60_000 + "\nbuild:\n  python_packages: [" + "*a, " * 900 + "]", "settings_invalid", "python_packages"),
    ],
)  # fmt: skip
async def test_what_cog_yaml_needs_is_checked(gateway: Gateway, config: str, fault: str, word: str) -> None:
    source = "from cog import BasePredictor\nclass Predictor(BasePredictor):\n    def predict(self) -> int:\n        return 1\n"
    files = {"predict.py": source, "cog.yaml": config, "more.txt": "no-such-other", "large.txt": "#" * 70_000}
    response = await gateway.send(None, files=files)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (422, fault)
    assert word in error["message"]


@pytest.mark.parametrize(
    ("body", "kind", "answer"),
    [
        ("async def predict(self, n: int) -> AsyncConcatenateIterator[str]:\n        for i in range(n):\n            yield str(i)", "async_generator", ["0", "1", {}]),
        ("def predict(self, n: int) -> Iterator[Path]:\n        Path('o.txt').write_text('o')\n        for i in range(n):\n            yield Path('o.txt')", "generator", ["data:text/plain;base64,bw=="] * 2 + [{}]),
        ("def predict(self, n: int) -> Iterator[int]:\n        return iter(range(n))", "generator", [0, 1, {}]),
    ],
    ids=["async", "files", "returned"],
)  # fmt: skip
async def test_iterators_of_every_kind(
    deploy: Callable[..., Any], body: str, kind: str, answer: list[Any]
) -> None:
    source = f"""
from typing import Iterator
from cog import AsyncConcatenateIterator, BasePredictor, Path
class Predictor(BasePredictor):
    {body}
"""
    function = await deploy(None, files={"predict.py": source})
    assert function.described["kind"] == kind
    assert pieces((await function.call({"input": {"n": 2}})).text) == answer


async def test_setup_gets_weights_and_names_may_be_odd(deploy: Callable[..., Any]) -> None:
    source = """
from __future__ import annotations
from typing import Any, Literal, Optional, Union
from cog import BaseRunner, Input, Path
class Runner(BaseRunner):
    def setup(self, weights: Optional[Union[str, Path]]):
        self.weights = weights
    def run(
        self, schema: str, copy: Optional[str], model_name: Literal["a", "b"] = "a", _x: int = 1, any=2,
        sizes: list[int] = Input(choices=[1, 2], default=[1]), file: Optional[Path] = None,
    ) -> Any:
        return [self.weights, schema, copy, model_name, _x, any, sizes, file]
"""
    function = await deploy(None, {"env.COG_WEIGHTS": "https://weights"}, files={"run.py": source})
    assert await function.answer({"schema": "s"}) == ["https://weights", "s", None, "a", 1, 2, [1], None]
    assert (await function.answer({"schema": "s", "copy": "c", "_x": 5}))[2:5] == ["c", "a", 5]
    assert set(await problems(function, {"schema": "s", "sizes": [1, 3]})) == {"input.sizes[1]"}


async def test_answers_with_files(deploy: Callable[..., Any]) -> None:
    source = """
import dataclasses, enum, io, pathlib
from typing import Any
from cog import BasePredictor, Path
class Colour(enum.Enum):
    RED = "red"
@dataclasses.dataclass
class Found:
    path: Path
class Predictor(BasePredictor):
    def predict(self, what: str) -> Any:
        pathlib.Path("a.webp").write_bytes(b"a")
        return {
            "path": Path("a.webp"), "plain": pathlib.Path("a.webp"), "list": [Path("a.webp")],
            "nested": {"x": (Found(Path("a.webp")), Colour.RED)}, "opened": open("a.webp", "rb"),
            "memory": io.StringIO("a"), "bytes": b"raw", "inner": [b"text", b"\\xff"], "gone": {"x": [Path("gone")]}, "keys": {1: 2},
        }[what]
"""
    function = await deploy(None, files={"predict.py": source})
    url = "data:image/webp;base64,YQ=="
    for what in ("path", "plain", "opened"):
        assert await function.answer({"what": what}) == url
    assert await function.answer({"what": "list"}) == [url]
    assert await function.answer({"what": "nested"}) == {"x": [{"path": url}, "red"]}
    assert await function.answer({"what": "memory"}) == "data:application/octet-stream;base64,YQ=="
    assert await function.answer({"what": "keys"}) == {"1": 2}
    # As in Cog, bytes in JSON are text. Bytes that are not valid text are a file.
    assert await function.answer({"what": "inner"}) == ["text", "data:application/octet-stream;base64,/w=="]
    raw = await function.call({"what": "bytes"})
    assert (raw.content, raw.headers["content-type"]) == (b"raw", "application/octet-stream")
    error = await function.error({"what": "gone"})
    assert (error["type"], "answer.x[0]" in error["message"]) == ("output_invalid", True)


async def test_a_function_can_be_the_predictor(deploy: Callable[..., Any], gateway: Gateway) -> None:
    source = "from cog import Input\ndef guess(n: int = Input(ge=1)) -> int:\n    return n + 1\n"
    function = await deploy(None, {"handler": "cog:predict.py:guess"}, files={"predict.py": source})
    assert await function.answer({"input": {"n": 1}}) == 2
    assert set(await problems(function, {"n": 0})) == {"input.n"}
    assert set(await problems(function, [1])) == {"input"}
    # Submit an input as the gateway does after it has removed the envelope: with the mark `bare`.
    assert gateway.server is not None
    now_s = time.monotonic()
    given = Invocation(
        "i",
        b'{"n": 5}',
        now_s=now_s,
        deadline_s=now_s + LIMIT_S,
        hold_until_s=now_s + LIMIT_S,
        extra={"bare": True},
    )
    gateway.server.functions.live(function.name).submit(given)
    assert (await given.output).payload == b"6"


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("from cog import BasePredictor\nclass Predictor(BasePredictor):\n    def guess(self): pass", "no method `predict`"),
        ("from cog import BasePredictor\nclass Predictor(BasePredictor):\n    def predict(self, a: 'Gone'): pass", "Gone"),
        ("from cog import BasePredictor, Nothing\nclass Predictor(BasePredictor): pass", "Nothing"),
        ("import cog\nclass Predictor(cog.BasePredictor): pass\ncog.nothing", "stand-in for cog has no"),
    ],
)  # fmt: skip
async def test_what_cannot_be_served_is_said_at_deploy(gateway: Gateway, source: str, word: str) -> None:
    response = await gateway.send(None, files={"predict.py": source})
    assert response.status_code == 422
    assert word in response.json()["error"]["message"]


TYPED = """
from typing import List, Optional, Union
from cog import BasePredictor, Input
class Predictor(BasePredictor):
    def predict(
        self, whole: int = 0, real: float = 0.0, flag: bool = False, text: str = "", many: List[int] = [], maybe: Optional[int] = None,
        either: Union[int, str] = 0, begins: str = Input(default="ab", regex="b"),
    ) -> list:
        return [whole, real, flag, text, many, maybe, either, begins]
"""


@pytest.mark.parametrize(
    ("name", "value", "taken"),
    [
        ("whole", 1.0, 1), ("whole", 2**40, 2**40), ("real", 5, 5.0), ("maybe", None, None), ("maybe", 3, 3), ("many", [1, 2.0], [1, 2]),
        ("either", 5, 5), ("either", "5", "5"), ("begins", "ba", "ba"),
    ],
)  # fmt: skip
async def test_an_input_that_cogs_server_takes(
    made: Callable[..., Any], name: str, value: Any, taken: Any
) -> None:
    predictor = made("cog:predict.py", TYPED)
    predictor.set_up()
    answer = predictor({name: value})
    found = answer[["whole", "real", "flag", "text", "many", "maybe", "either", "begins"].index(name)]
    assert (found, type(found)) == (taken, type(taken))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("whole", True), ("whole", "3"), ("whole", 1.5), ("real", True), ("real", "1.5"), ("flag", 1), ("flag", "yes"), ("text", 3),
        ("many", [True]), ("many", ["1"]), ("maybe", False), ("maybe", "1"), ("either", True), ("either", 1.5), ("begins", "ab"),
        ("whole", None),
    ],
)  # fmt: skip
async def test_an_input_that_cogs_server_refuses(made: Callable[..., Any], name: str, value: Any) -> None:
    predictor = made("cog:predict.py", TYPED)
    predictor.set_up()
    with pytest.raises(InputInvalid, match=name):
        predictor({name: value})
