"""The cases of the HTTP tests of cog v0.14.12, against a gateway. Each case has the name of Cog's test without `test_`.

NOT_ALIKE lists those of Cog's 61 cases in which pilotflame behaves differently, and why.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from aiohttp import web
from live import Function, Gate, Gateway, gateway_here, short_folder, until
from multidict import CIMultiDict

pytestmark = pytest.mark.asyncio(loop_scope="module")

NOT_ALIKE = {
    "train_openapi_specification": "there are no trainings",
    "prediction_idempotent_endpoint_conflict": "a second prediction waits in the queue instead of 409",
    "index_document": "`/` has Cog's names but `shutdown_url`: a caller cannot end the gateway",
    "untyped_inputs": "an input without a type takes any value",
    "input_with_unsupported_type": "an input may be any type that pydantic knows",
}
COG_CASES = 61
LOOPBACK = "127.0.0.0/8"


def data_url(content: bytes, kind: str = "text/plain") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def predictor(parameters: str, returned: str, body: str, *, before: str = "", setup: str = "") -> str:
    lines = [
        "import asyncio, io, os, sys, tempfile, time",
        "from typing import Any, Iterator, List, Literal, Optional, Union",
        "import pydantic",
        "from cog import BasePredictor, ConcatenateIterator, File, Input, Path, Secret",
        before,
        "class Predictor(BasePredictor):",
        *([f"    def setup(self{setup.partition('|')[0]}):", f"        {setup.partition('|')[2]}"] if setup else []),
        f"    def predict(self{', ' if parameters else ''}{parameters}) -> {returned}:",
        *(f"        {line}" for line in body.splitlines()),
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


FOOBAR = predictor("", "str", "return 'foobar'")
SLEEP = predictor("sleep: float = 0", "str", "time.sleep(sleep)\nreturn f'done in {sleep} seconds'")
READS_PATH = predictor("path: Path", "str", "with open(path) as file:\n    return file.name.split('.')[-1] + ' ' + file.read()")  # fmt: skip
READS_FILE = predictor("file: File", "str", "return file.read()")
NAMED_FILE = predictor("", "File", "file = io.StringIO('hello')\nfile.name = 'foo.txt'\nreturn file")
MODEL = "class MyOutput(pydantic.BaseModel):\n    foo_number: int = '42'\n    foo_string: str = 'meaning of life'\n"
COMPLEX = "class Output(pydantic.BaseModel):\n    text: str\n    file: File\n"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Gateway]:
    with short_folder() as folder:
        async with gateway_here(folder / "state", drain_s=5.0, webhook_networks=(LOOPBACK,)) as found:
            yield found


class Caller:
    """Calls one predictor."""

    def __init__(self, function: Function) -> None:
        self.function = function

    async def __call__(self, body: Any = None, *, path: str = "", method: str = "POST", **headers: str) -> httpx.Response:  # fmt: skip
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        named["X-Pilotflame-Function"] = self.function.name
        return await self.function.client.request(method, f"/cog/predictions{path}", json=body, headers=named)

    async def succeeds(self, body: Any, output: Any) -> None:
        response = await self(body)
        found = response.json()
        assert (response.status_code, found["status"]) == (200, "succeeded"), response.text
        assert found["output"] == output


@pytest_asyncio.fixture(loop_scope="module")
async def deployed(gateway: Gateway) -> AsyncIterator[Callable[..., Any]]:
    functions: list[Function] = []

    async def deploy(source: str, **how: Any) -> Caller:
        settings = {"env.PILOTFLAME_INPUT_NETWORKS": LOOPBACK, **how.pop("settings", {})}
        functions.append(await gateway.deploy(None, settings, files={"predict.py": source}, **how))
        return Caller(functions[-1])

    yield deploy
    for function in functions:
        await gateway.client.delete(f"/v1/functions/{function.name}")


class Host:
    """A server that answers each GET with the file "hello", but /gone.txt with 404. It records webhooks and uploads."""

    def __init__(self) -> None:
        self.url = ""
        self.came: list[tuple[str, str, CIMultiDict[str], Any]] = []
        self.parts: list[list[str]] = []
        self.changed = asyncio.Condition()
        self.open = asyncio.Event()

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            if request.path == "/slow.txt":
                await self.open.wait()
            return web.Response(text="hello", status=404 if request.path == "/gone.txt" else 200)
        if request.content_type == "multipart/form-data":
            form = await request.post()
            file = form["file"]
            assert isinstance(file, web.FileField)
            self.parts.append(list(file.headers))
            body: Any = (file.filename, file.file.read())
        else:
            body = await (request.json() if request.method == "POST" else request.read())
        self.came.append((request.method, request.path, request.headers.copy(), body))
        async with self.changed:
            self.changed.notify_all()
        return web.Response(status=201)

    async def next(self, count: int = 1) -> list[tuple[str, str, CIMultiDict[str], Any]]:
        async with asyncio.timeout(30), self.changed:
            await self.changed.wait_for(lambda: len(self.came) >= count)
        return self.came


@pytest_asyncio.fixture(loop_scope="module")
async def host() -> AsyncIterator[Host]:
    found, app = Host(), web.Application()
    app.router.add_route("*", "/{path:.*}", found.serve)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    found.open.set()
    await runner.cleanup()


# -- predictions that succeed with an output

SUCCEED: dict[str, tuple[str, list[tuple[Any, Any]]]] = {
    "setup_is_called": (predictor("", "str", "return self.foo", setup="|self.foo = 'bar'"), [(None, "bar")]),
    "yielding_strings_from_generator_predictors": (
        predictor("", "Iterator[str]", "yield 'foo'\nyield 'bar'\nyield 'baz'"), [(None, ["foo", "bar", "baz"])]),
    "yielding_strings_from_concatenate_iterator": (
        predictor("", "ConcatenateIterator[str]", "yield from ('foo', 'bar', 'baz')"), [(None, ["foo", "bar", "baz"])]),
    "yielding_strings_from_generator_predictors_file_input": (
        predictor("file: Path", "Iterator[str]", "for word in ('foo', 'bar'):\n    yield file.read_text() + ' ' + word"),
        [({"file": "data:text/plain; charset=utf-8;base64,aGVsbG8="}, ["hello foo", "hello bar"])]),
    "yielding_files_from_generator_predictors": (
        predictor("", "Iterator[Path]", "for n in range(2):\n    path = Path(tempfile.mkdtemp()) / f'{n}.png'\n    path.write_bytes(b'%d' % n)\n    yield path"),
        [(None, [data_url(b"0", "image/png"), data_url(b"1", "image/png")])]),
    "no_input": (FOOBAR, [(None, "foobar")]),
    "empty_input": (FOOBAR, [({}, "foobar")]),
    "good_int_input": (predictor("num: int", "int", "return num ** 3"), [({"num": 3}, 27), ({"num": -3}, -27)]),
    "default_int_input": (predictor("num: int = Input(default=5)", "int", "return num ** 2"), [({}, 25), ({"num": 3}, 9)]),
    "file_input_data_url": (READS_FILE, [({"file": data_url(b"bar")}, "bar")]),
    "path_input_data_url": (READS_PATH, [({"path": data_url(b"bar")}, "txt bar")]),
    "multiple_arguments": (
        predictor("text: str, path: Path, num1: int, num2: int = Input(default=10)", "str", "return f'{text} {num1 * num2} {path.read_text()}'"),
        [({"text": "baz", "num1": 5, "path": data_url(b"wibble")}, "baz 50 wibble")]),
    "union_strings": (
        predictor("args: Union[str, List[str]]", "str", "return args if isinstance(args, str) else ''.join(args)"),
        [({"args": "abc"}, "abc"), ({"args": ["a", "b", "c"]}, "abc")]),
    "output_file": (predictor("", "File", "return io.StringIO('hello')"), [(None, data_url(b"hello", "application/octet-stream"))]),
    "output_path": (
        predictor("", "Path", "path = Path(tempfile.mkdtemp()) / 'my_file.png'\npath.write_bytes(b'image')\nreturn path"),
        [(None, data_url(b"image", "image/png"))]),
    "complex_output": (
        predictor("", "Output", "return Output(text='hello', file=io.StringIO('hello'))", before=COMPLEX),
        [(None, {"text": "hello", "file": data_url(b"hello", "application/octet-stream")})]),
    "iterator_of_list_of_complex_output": (
        predictor("", "Iterator[List[Output]]", "yield [Output(text='hello')]", before="class Output(pydantic.BaseModel):\n    text: str\n"),
        [(None, [[{"text": "hello"}]])]),
}  # fmt: skip


@pytest.mark.parametrize("case", SUCCEED)
async def test_predictions_that_succeed(deployed: Callable[..., Any], case: str) -> None:
    source, calls = SUCCEED[case]
    call = await deployed(source)
    for given, output in calls:
        await call.succeeds(None if given is None else {"input": given}, output)


# -- inputs that are refused with 422

REFUSED: dict[str, tuple[str, list[Any], list[Any]]] = {
    "bad_int_input": (predictor("num: int", "int", "return num"), [{"num": 1}], [{"num": "foo"}]),
    "file_bad_input": (READS_FILE, [], [{"file": "foo"}]),
    "gt_lt": (predictor("num: float = Input(ge=3.01, le=10.5)", "float", "return num"), [{"num": 5}], [{"num": 2}, {"num": 11}]),
    "choices_str": (predictor("text: str = Input(choices=['foo', 'bar'])", "str", "return text"), [{"text": "foo"}], [{"text": "baz"}]),
    "choices_str_iterable": (
        predictor("text: str = Input(choices={'foo': 'x', 'bar': 'y'}.keys())", "str", "return text"), [{"text": "foo"}], [{"text": "baz"}]),
    "choices_int": (predictor("x: int = Input(choices=[1, 2])", "int", "return x ** 2"), [{"x": 1}], [{"x": 3}]),
    "literal_str": (predictor("text: Literal['foo', 'bar']", "str", "return text"), [{"text": "foo"}], [{"text": "baz"}]),
    "literal_int": (predictor("x: Literal[1, 2]", "int", "return x ** 2"), [{"x": 1}], [{"x": 3}]),
    "union_integers": (
        predictor("args: Union[int, List[int]]", "int", "return args if isinstance(args, int) else sum(args)"),
        [{"args": 123}, {"args": [1, 2, 3]}], [{"args": "abc"}, {"args": ["a", "b", "c"]}]),
    "secret_str": (predictor("secret: Secret", "str", "return secret.get_secret_value()"), [{"secret": "foo"}], [{"secret": {}}]),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
async def test_inputs_that_are_refused(deployed: Callable[..., Any], case: str) -> None:
    source, good, bad = REFUSED[case]
    call = await deployed(source)
    for given in good:
        response = await call({"input": given})
        assert (response.status_code, response.json()["status"]) == (200, "succeeded"), response.text
    for given in bad:
        response = await call({"input": given})
        assert response.status_code == 422, response.text
        detail = response.json()["detail"][0]
        assert detail["loc"][:3] == ["body", "input", next(iter(given))]
        assert detail["msg"]
    if case == "bad_int_input":
        assert "valid integer" in detail["msg"]
    if case == "gt_lt":
        assert "less than or equal to 10.5" in detail["msg"]


# -- the description

OUTPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "openapi_specification_with_custom_user_defined_output_type": (
        predictor("", "MyOutput", "...", before=MODEL),
        {"Output": {"$ref": "#/components/schemas/MyOutput", "title": "Output"}, "MyOutput": {
            "title": "MyOutput", "type": "object", "properties": {
                "foo_number": {"title": "Foo Number", "type": "integer", "default": "42"},
                "foo_string": {"title": "Foo String", "type": "string", "default": "meaning of life"}}}}),
    "openapi_specification_with_custom_user_defined_output_type_called_output": (
        predictor("", "Output", "...", before=MODEL.replace("MyOutput", "Output")),
        {"Output": {"title": "Output", "type": "object", "properties": {
            "foo_number": {"title": "Foo Number", "type": "integer", "default": "42"},
            "foo_string": {"title": "Foo String", "type": "string", "default": "meaning of life"}}}}),
    "openapi_specification_with_yield": (
        predictor("", "Iterator[str]", "yield ''"),
        {"Output": {"title": "Output", "type": "array", "items": {"type": "string"}, "x-cog-array-type": "iterator"}}),
    "openapi_specification_with_yield_with_concatenate_iterator": (
        predictor("", "ConcatenateIterator[str]", "yield ''"),
        {"Output": {"title": "Output", "type": "array", "items": {"type": "string"}, "x-cog-array-type": "iterator",
                    "x-cog-array-display": "concatenate"}}),
    "openapi_specification_with_list": (
        predictor("", "List[str]", "..."), {"Output": {"title": "Output", "type": "array", "items": {"type": "string"}}}),
    "openapi_specification_with_int_choices": (
        predictor("pick_a_number_any_number: int = Input(choices=[1, 2])", "str", "..."),
        {"pick_a_number_any_number": {
            "description": "An enumeration.", "enum": [1, 2], "title": "pick_a_number_any_number", "type": "integer"}}),
    "openapi_specification_with_literal": (
        predictor("text: Literal['foo', 'bar']", "str", "..."),
        {"text": {"description": "An enumeration.", "enum": ["foo", "bar"], "title": "text", "type": "string"}}),
    "openapi_specification": (
        predictor(
            "no_default: str, default_without_input: str = 'default', input_with_default: int = Input(default=-10), "
            "path: Path = Input(description='Some path'), image: File = Input(description='Some path'), "
            "choices: str = Input(choices=['foo', 'bar']), int_choices: int = Input(choices=[3, 4, 5])", "str", "..."),
        {"Output": {"title": "Output", "type": "string"}, "Input": {
            "title": "Input", "type": "object", "required": ["no_default", "path", "image", "choices", "int_choices"],
            "properties": {
                "no_default": {"title": "No Default", "type": "string", "x-order": 0},
                "default_without_input": {"title": "Default Without Input", "type": "string", "default": "default", "x-order": 1},
                "input_with_default": {"title": "Input With Default", "type": "integer", "default": -10, "x-order": 2},
                "path": {"title": "Path", "description": "Some path", "type": "string", "format": "uri", "x-order": 3},
                "image": {"title": "Image", "description": "Some path", "type": "string", "format": "uri", "x-order": 4},
                "choices": {"allOf": [{"$ref": "#/components/schemas/choices"}], "x-order": 5},
                "int_choices": {"allOf": [{"$ref": "#/components/schemas/int_choices"}], "x-order": 6}}}}),
}  # fmt: skip


@pytest.mark.parametrize("case", OUTPUTS)
async def test_the_components_of_the_description(deployed: Callable[..., Any], case: str) -> None:
    source, wanted = OUTPUTS[case]
    call = await deployed(source)
    # The gateway has only this function, so the request need not name it.
    response = await call.function.client.get("/openapi.json")
    found = response.json()["components"]["schemas"]
    assert {name: found[name] for name in wanted} == wanted
    response = await call.function.client.get("/openapi.json", params={"function": call.function.name})
    named = response.json()
    assert {name: named["components"]["schemas"][name] for name in wanted} == wanted
    assert (named["openapi"], named["info"]) == ("3.0.2", {"title": "Cog", "version": "0.1.0"})
    assert ("/predictions" in named["paths"], "/invoke/{function}" in named["paths"]) == (True, False)
    assert (await call.function.client.get("/openapi.json?function=none")).status_code == 404
    below = await call.function.client.get("/cog/openapi.json")
    assert below.json() == named
    assert (await call.function.client.get("/cog/openapi.json?function=none")).status_code == 404


async def test_the_index_names_routes_that_are_there(deployed: Callable[..., Any]) -> None:
    client = (await deployed(OUTPUTS["openapi_specification_with_list"][0])).function.client
    found = (await client.get("/cog/")).json()
    assert found["cog_version"]
    for name in ("openapi_url", "healthcheck_url"):
        assert (await client.get(found[name])).status_code == 200
    for name in ("predictions_url", "predictions_idempotent_url", "predictions_cancel_url"):
        assert found[name].startswith("/cog/predictions")


# -- files

FILES: dict[str, tuple[str, str]] = {
    "file_input_with_http_url": (READS_FILE, "file"),
    "path_input_with_http_url": (READS_PATH, "path"),
    "path_or_none": (predictor("file: Path | None", "str", "return 'hello'"), "file"),
}


@pytest.mark.parametrize("case", FILES)
async def test_files_from_a_server(deployed: Callable[..., Any], host: Host, case: str) -> None:
    source, name = FILES[case]
    output = "txt hello" if "path_input" in case else "hello"
    await (await deployed(source)).succeeds({"input": {name: f"{host.url}/foo.txt"}}, output)


async def test_file_input_with_http_url_error(deployed: Callable[..., Any], host: Host) -> None:
    response = await (await deployed(READS_PATH))({"input": {"path": f"{host.url}/gone.txt"}})
    assert (response.status_code, response.json()["status"]) == (200, "failed")
    assert "404" in response.json()["error"]


async def test_path_input_slow_response(deployed: Callable[..., Any], host: Host) -> None:
    call = await deployed(READS_PATH)
    response = await call({"input": {"path": f"{host.url}/slow.txt"}}, Prefer="respond-async")
    assert (response.status_code, response.json()["status"] in ("starting", "processing")) == (202, True)
    await reached(call, response.json()["id"], "processing")
    host.open.set()
    assert (await reached(call, response.json()["id"], "succeeded"))["output"] == "txt hello"


async def test_path_temporary_files_are_removed(deployed: Callable[..., Any]) -> None:
    call = await deployed(predictor("path: Path", "str", "return str(path)"))
    response = await call({"input": {"path": data_url(b"bar")}})
    assert not Path(response.json()["output"]).exists()


@pytest.mark.parametrize("case", ["output_file_to_http", "output_file_to_http_with_upload_url_specified", "output_path_to_http"])  # fmt: skip
async def test_outputs_go_where_the_caller_says(deployed: Callable[..., Any], host: Host, case: str) -> None:
    path = predictor(
        "", "Path", "path = Path(tempfile.mkdtemp()) / 'foo.txt'\npath.write_text('hello')\nreturn path"
    )
    settings = {"env.PILOTFLAME_UPLOAD_URL": "https://dontuseme"} if "upload_url" in case else {}
    call = await deployed(path if "path" in case else NAMED_FILE, settings=settings)
    await call.succeeds({"output_file_prefix": f"{host.url}/upload/"}, f"{host.url}/upload/foo.txt")
    method, uploaded, headers, body = host.came[0]
    assert (method, uploaded, body) == ("PUT", "/upload/foo.txt", ("foo.txt", b"hello"))
    assert headers["Content-Type"].startswith("multipart/form-data")
    # As in Cog, the part of the file has no Content-Type: receivers may compare the whole body.
    assert host.parts == [["Content-Disposition"]]


async def test_an_output_that_cannot_be_uploaded(deployed: Callable[..., Any], host: Host) -> None:
    call = await deployed(NAMED_FILE)
    response = await call({"output_file_prefix": "http://127.0.0.1:1/"})
    assert response.status_code == 500
    assert "cannot be uploaded" in response.json()["detail"]
    assert (await call({"output_file_prefix": "file:///tmp/"})).status_code == 422


async def test_return_wrong_type(deployed: Callable[..., Any]) -> None:
    assert (await (await deployed(predictor("", "int", "return 'foo'")))()).status_code == 500


async def test_weights_are_read_from_environment_variables(deployed: Callable[..., Any]) -> None:
    source = predictor("", "str", "return self.text", setup=", weights: File|self.text = weights.read()")
    settings = {"env.COG_WEIGHTS": "data:text/plain; charset=utf-8;base64,aGVsbG8="}
    await (await deployed(source, settings=settings)).succeeds(None, "hello")


async def test_predict_works_with_functions(deployed: Callable[..., Any]) -> None:
    source = "def predict(text: str) -> str:\n    return 'hello ' + text\n"
    call = await deployed(source, settings={"handler": "cog:predict.py:predict"})
    await call.succeeds({"input": {"text": "baz"}}, "hello baz")


# -- ids, preferences and webhooks


async def reached(call: Caller, prediction: str, status: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    async def so() -> bool:
        found.update((await call(path=f"/{prediction}", method="GET")).json())
        return bool(found["status"] == status)

    await until(so, f"{prediction} {status}")
    return found


@pytest.mark.parametrize(
    ("case", "body", "status"),
    [
        ("missing_input", {}, 200), ("prediction_idempotent_endpoint", {}, 200),
        ("prediction_idempotent_endpoint_matched_ids", {"id": "abcd1234"}, 200),
        ("prediction_idempotent_endpoint_mismatched_ids", {"id": "foobar"}, 422),
    ],
)  # fmt: skip
async def test_ids_in_the_path(deployed: Callable[..., Any], case: str, body: Any, status: int) -> None:
    call = await deployed(FOOBAR)
    put = "idempotent" in case
    chosen = f"abcd1234-{case}"[:20] if case.endswith("endpoint") else "abcd1234"
    response = await call(body, path=f"/{chosen}" if put else "", method="PUT" if put else "POST")
    assert response.status_code == status
    if status == 200:
        found = response.json()
        assert (found["status"], found["output"]) == ("succeeded", "foobar")
        assert not put or found["id"] == chosen


async def test_prediction_idempotent_endpoint_is_idempotent(deployed: Callable[..., Any]) -> None:
    call = await deployed(SLEEP)
    ask = {"path": "/idem1234", "method": "PUT", "Prefer": "respond-async"}
    first = await call({"input": {"sleep": 1}}, **ask)
    await reached(call, "idem1234", "processing")
    again = await call({"input": {"sleep": 1}}, **ask)
    assert (first.status_code, again.status_code) == (202, 202)
    assert (first.json()["id"], again.json()["id"]) == ("idem1234", "idem1234")
    assert (again.json()["status"], again.headers["Idempotent-Replayed"]) == ("processing", "true")


async def test_prediction_cancel(deployed: Callable[..., Any]) -> None:
    call = await deployed(SLEEP)
    assert (await call(path="/123/cancel")).status_code == 404
    assert (await call({"id": "123", "input": {"sleep": 1}}, Prefer="respond-async")).status_code == 202
    assert (await call(path="/456/cancel")).status_code == 404
    assert (await call(path="/123/cancel")).status_code == 200


async def test_asynchronous_prediction_endpoint(deployed: Callable[..., Any], host: Host) -> None:
    call = await deployed(predictor("text: str", "str", "return text"))
    hook = {"webhook": f"{host.url}/webhook", "webhook_events_filter": ["completed"]}
    response = await call(
        {"id": "12345abcde", "input": {"text": "hello world"}, **hook}, Prefer="respond-async"
    )
    assert response.status_code == 202
    assert response.json()["status"] in ("starting", "processing", "succeeded")
    assert response.json()["output"] in (None, "hello world")
    (_, path, headers, body) = (await host.next())[0]
    assert (path, body["id"], body["status"], body["output"]) == (
        "/webhook",
        "12345abcde",
        "succeeded",
        "hello world",
    )
    assert body["input"] == {"text": "hello world"}
    assert body["metrics"]["predict_time"] >= 0
    assert (body["version"], body["error"]) == (call.function.name, None)
    assert body["started_at"]
    assert body["completed_at"]
    assert headers["webhook-signature"]


async def test_every_event_of_a_stream_is_the_prediction(deployed: Callable[..., Any], host: Host) -> None:
    call = await deployed(predictor("", "Iterator[str]", "yield 'foo'\nyield 'bar'"))
    await call({"webhook": f"{host.url}/webhook"})
    async with asyncio.timeout(30):
        while host.came[-1:] == [] or host.came[-1][3]["status"] != "succeeded":
            await host.next(len(host.came) + 1)
    told = [body for _, _, _, body in host.came]
    assert told[0]["status"] == "processing"
    assert all(one["output"] in (None, ["foo"], ["foo", "bar"]) for one in told)
    assert told[-1]["output"] == ["foo", "bar"]


async def test_asynchronous_prediction_endpoint_with_trace_context(deployed: Callable[..., Any], host: Host) -> None:  # fmt: skip
    """As in Cog, both headers are passed on unchanged, even if they are no W3C trace context."""
    call = await deployed(
        predictor("", "File", "return io.StringIO('hello')"),
        settings={"env.PILOTFLAME_UPLOAD_URL": f"{host.url}/upload"},
    )
    hook = {"webhook": f"{host.url}/webhook", "webhook_events_filter": ["completed"]}
    trace = {"traceparent": "traceparent-123", "tracestate": "tracestate-123"}
    await call({"id": "tracing", "input": {}, **hook}, Prefer="respond-async", **trace)
    came = await host.next(2)
    assert [path for _, path, _, _ in came] == ["/upload/file", "/webhook"]
    for _, _, headers, _ in came:
        assert {name: headers.get(name) for name in trace} == trace


async def test_unknown_inputs_are_dropped(deployed: Callable[..., Any]) -> None:
    call = await deployed(predictor("num: int = Input(default=5)", "int", "return num ** 2"))
    await call.succeeds({"input": {"num": 3, "seed": 7}}, 9)
    await call.succeeds({"input": {"seed": 7}}, 25)


async def test_files_of_asynchronous_predictions_are_uploaded(
    deployed: Callable[..., Any], host: Host
) -> None:
    call = await deployed(
        predictor("", "File", "return io.StringIO('hello')"),
        settings={"env.PILOTFLAME_UPLOAD_URL": f"{host.url}/upload"},
    )
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    hook = {"webhook": f"{host.url}/webhook", "webhook_events_filter": ["completed"]}
    await call({"id": "traced", "input": {}, **hook}, Prefer="respond-async", traceparent=trace)
    uploaded, told = await host.next(2)
    assert uploaded[:2] == ("PUT", "/upload/file")
    assert uploaded[3] == b"hello"
    assert (uploaded[2]["X-Prediction-ID"], uploaded[2]["traceparent"][3:35]) == ("traced", trace[3:35])
    assert told[3]["output"] == f"{host.url}/upload/file"
    made = (await call({}, Prefer="respond-async")).json()
    assert (await reached(call, made["id"], "succeeded"))["output"] == f"{host.url}/upload/file"
    assert host.came[-1][2]["X-Prediction-ID"] == made["id"]
    # A caller who waits gets data URLs, as in Cog.
    await call.succeeds({}, data_url(b"hello", "application/octet-stream"))


async def test_logs_are_sent_while_a_prediction_runs(
    deployed: Callable[..., Any], host: Host, gate: Gate
) -> None:
    source = predictor("", "str", "print('first')\nprint('second')\ngate.wait('in')\nprint('third')\nreturn 'done'", before="import gate")  # fmt: skip
    call = await deployed(source, gate=gate)
    await call({"webhook": f"{host.url}/cog", "webhook_events_filter": ["logs"]}, Prefer="respond-async")
    arrival = await gate.next("in")
    while not host.came or host.came[-1][3]["logs"] != "first\nsecond":
        await host.next(len(host.came) + 1)
    assert host.came[-1][3]["status"] == "processing"
    arrival.go()
    while host.came[-1][3]["logs"] != "first\nsecond\nthird":
        await host.next(len(host.came) + 1)
    # Repeat this with a job of RunPod's queue. Its logs are sent as events in the form of Standard Webhooks.
    gate.open()
    hook = {"webhook": f"{host.url}/queue", "webhook_events": ["logs", "completed"]}
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    await call.function.client.post(
        f"/v2/{call.function.name}/run", json={"input": {}, **hook}, headers=trace
    )
    while (told := host.came[-1])[1] != "/queue" or told[3]["type"] != "job.completed":
        await host.next(len(host.came) + 1)
    assert told[2]["traceparent"] == trace["traceparent"]
    events = [body["type"] for _, path, _, body in host.came if path == "/queue"]
    assert set(events) == {"job.logs", "job.completed"}
    (*_, last, _) = (body for _, path, _, body in host.came if path == "/queue")
    assert (last["type"], last["data"]["logs"]) == ("job.logs", "first\nsecond\nthird")


async def test_context(deployed: Callable[..., Any]) -> None:
    source = predictor("name: str", "str", "return current_scope().context['prefix'] + name", before="from cog import current_scope")  # fmt: skip
    call = await deployed(source)
    await call.succeeds({"input": {"name": "you"}, "context": {"prefix": "hello "}}, "hello you")
    assert (await call({"input": {"name": "you"}, "context": {"prefix": 1}})).status_code == 422


async def test_starting_after_the_wait_ran_out(deployed: Callable[..., Any], gate: Gate) -> None:
    source = predictor("", "str", "gate.wait('in')\nreturn 'done'", before="import gate")
    call = await deployed(source, gate=gate)
    first = await call(Prefer="respond-async")
    await gate.next("in")
    await reached(call, first.json()["id"], "processing")
    # The prediction is running, but the answer says `starting`: some callers take every other status for its end.
    again = await call({"id": "waited"}, Prefer="wait=1")
    assert (again.status_code, again.json()["status"]) == (202, "starting")
    gate.open()


async def test_setup_healthcheck(deployed: Callable[..., Any], gate: Gate) -> None:
    source = predictor("", "int", "return 3", before="import gate", setup="|gate.wait('setup')")
    call = await deployed(source, gate=gate, check=False)
    asked = asyncio.ensure_future(call())
    arrival = await gate.next("setup")
    response = await call.function.client.get("/cog/health-check", params={"function": call.function.name})
    assert (response.json()["status"], response.json()["setup"]) == ("STARTING", {})
    arrival.go()
    assert (await asked).json()["output"] == 3
    response = await call.function.client.get("/cog/health-check", params={"function": call.function.name})
    assert (response.json()["status"], response.json()["setup"]) == ("READY", {"status": "succeeded"})


async def test_the_root_has_the_names_of_cog(gateway: Gateway) -> None:
    found = (await gateway.client.get("/")).json()
    names = ("docs", "openapi", "healthcheck", "predictions", "predictions_idempotent", "predictions_cancel")
    assert all(found[f"{name}_url"] for name in names)
    assert found["cog_version"]


async def test_enough_cases_are_alike() -> None:
    functions = [name for name in globals() if name.startswith("test_")]
    alone = [name.removeprefix("test_") for name in functions]
    tables = [*SUCCEED, *REFUSED, *OUTPUTS, *FILES]
    assert not NOT_ALIKE.keys() & {*alone, *tables}
    assert COG_CASES - len(NOT_ALIKE) >= 56
