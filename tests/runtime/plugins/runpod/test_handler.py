"""RunPod's handlers, unchanged: the examples on a real gateway, the others called as a worker calls them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from live import LIMIT_S, Function, Gate, Gateway, until
from pilotflame.errors import HandlerFailed, HandlerImportError, HandlerSignatureError
from pilotflame.runtime.calls.serving.invocation import Invocation, Output

live = pytest.mark.asyncio(loop_scope="module")
START = "\nimport runpod\nrunpod.serverless.start({'handler': handler})\n"
SHOW = "def handler(job): return job" + START


async def invoke(gateway: Gateway, name: str, event: Any, **how: Any) -> Output:
    """Submit an invocation to the function, as the dispatcher of jobs does, and return its output."""
    assert gateway.server is not None
    now_s = time.monotonic()
    invocation = Invocation(
        "i1",
        json.dumps(event).encode(),
        now_s=now_s,
        deadline_s=now_s + LIMIT_S,
        hold_until_s=now_s + LIMIT_S,
        **how,
    )
    gateway.server.functions.live(name).submit(invocation)
    return await invocation.output


def pieces(text: str) -> list[Any]:
    return [
        json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")
    ]


# -- the examples, on a gateway


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def examples(gateway: Gateway) -> AsyncIterator[dict[str, Function]]:
    """Deploy all at once, because importing the real package takes seconds."""
    folder = Path(__file__).parents[3] / "examples"

    async def deployed(name: str) -> Function:
        order = {"path": str(folder / name), "overrides": {"name": name, "scale.max": 1}}
        response = await gateway.client.post("/v1/functions", json=order)
        assert response.status_code == 201, response.text
        return gateway.function(name, response.json())

    names = [path.name for path in folder.glob("runpod-*")]
    async with asyncio.TaskGroup() as tasks:
        found = {name: tasks.create_task(deployed(name)) for name in names}
    yield {name: task.result() for name, task in found.items()}
    for name in names:
        await gateway.client.delete(f"/v1/functions/{name}")


@live
async def test_plain(examples: dict[str, Function]) -> None:
    function = examples["runpod-plain"]
    assert (function.described["dialect"], function.described["entry"]) == ("runpod", "handler.py:handler")
    wrapped = await function.answer({"input": {"name": "Ada"}}, X_Request_Id="mine")
    assert wrapped == {"greeting": "Hello, Ada!", "job_id": "mine"}
    assert (await function.answer({"name": "Bob"}))["greeting"] == "Hello, Bob!"


@live
async def test_generator(examples: dict[str, Function], gateway: Gateway) -> None:
    function = examples["runpod-generator"]
    assert function.described["streaming"]
    assert gateway.server is not None
    assert gateway.server.functions.get(function.name).record.handler["aggregate"] is True
    response = await function.call({"input": {"text": "to be or"}})
    assert pieces(response.text) == [{"token": "to"}, {"token": "be"}, {"token": "or"}, {}]


@live
async def test_async(examples: dict[str, Function]) -> None:
    function = examples["runpod-async"]
    assert function.described["kind"] == "async"
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(function.answer({"input": {"numbers": [n, 1]}})) for n in range(20)]
    assert [task.result()["total"] for task in asked] == [n + 1 for n in range(20)]
    assert "Summing 2 numbers" in (await function.logged("Summing"))["text"]


@live
async def test_error_and_refresh(examples: dict[str, Function]) -> None:
    function = examples["runpod-error"]
    first = await function.answer({"input": {"number": 16}})
    assert first["root"] == 4.0
    told = await function.error({"input": {"number": 13}})
    assert (told["status"], told["type"], told["message"]) == (500, "handler_failed", "13 is not served here")
    assert "number is a required input." in (await function.error({"input": {}}))["message"]
    raised = await function.error({"input": {"number": 42}})
    assert (raised["details"]["exception"], raised["details"]["file"]) == ("ValueError", "handler.py")
    # The event `fresh` requests a new worker. The output does not show it, but the next call runs in another process.
    last = await function.answer({"input": {"number": 9, "fresh": True}})
    assert last == {"root": 3.0, "pid": first["pid"]}
    assert (await function.answer({"input": {"number": 9}}))["pid"] != first["pid"]


@live
async def test_progress(examples: dict[str, Function], gateway: Gateway, tmp_path: Path) -> None:
    function = examples["runpod-progress"]
    pipe, heard, came = tmp_path / "pipe", [], asyncio.Event()
    os.mkfifo(pipe)

    def hear(progress: bytes) -> None:
        heard.append(json.loads(progress))
        came.set()

    async def look() -> None:
        for step in (1, 2):
            async with asyncio.timeout(LIMIT_S):
                await came.wait()
            came.clear()
            assert heard[-1] == f"Step {step}/2"
            await asyncio.to_thread(pipe.write_text, "seen")

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(look())
        answer = await invoke(
            gateway, function.name, {"input": {"steps": 2, "wait_at": str(pipe)}},
            extra={"job": {"id": "job-1", "webhook": "https://example.com/hook"}}, on_progress=hear,
        )  # fmt: skip
    assert json.loads(answer.payload) == {"steps": 2, "webhook": "https://example.com/hook"}
    assert heard == ["Step 1/2", "Step 2/2"]


@live
async def test_the_concurrency_modifier_is_followed(
    gateway: Gateway, deploy: Callable[..., Any], gate: Gate
) -> None:
    source = """
import gate, runpod
seen = []
async def handler(job):
    await gate.wait_async(str(job["input"]))
    return seen
def modifier(current):
    seen.append(current)
    return 3
runpod.serverless.start({"handler": handler, "concurrency_modifier": modifier})
"""
    function = await deploy(source, {"scale.max": 1}, gate=gate)
    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(function.answer(n)) for n in range(4)]
        inside = [await gate.next() for _ in range(3)]

        async def all_there() -> bool:
            status = await function.status()
            return bool(status["queued"] + status["in_flight"] == 4)

        await until(all_there, "the fourth")
        # One worker runs three calls at once, and the fourth call waits.
        assert len(gate.arrived) == 3
        assert len({arrival.pid for arrival in inside}) == 1
        gate.open()
    assert asked[0].result()[:2] == [1, 3]


# -- what the examples do not show


def test_what_a_job_is(made: Callable[..., Any]) -> None:
    show = made("handler.py", SHOW)
    assert show({"input": 0, "webhook": "w"}) == {"id": "i1", "input": 0, "webhook": "w"}
    assert show([1]) == {"id": "i1", "input": [1]}
    assert show(None) == {"id": "i1", "input": None}
    # The gateway removed the envelope, so this is the input, even with the key "input".
    assert show({"input": 5}, bare=True) == {"id": "i1", "input": {"input": 5}}
    assert show({"input": 5}, about={"id": "job-7", "webhook": "w"}) == {
        "id": "job-7",
        "input": 5,
        "webhook": "w",
    }
    assert show.handler.aggregate is False


@pytest.mark.parametrize(
    ("returned", "answer"),
    [
        ("{1: 'one'}", {"1": "one"}),
        ("{}", None),
        ("{'refresh_worker': False, 'x': 1}", {"x": 1}),
        ("{'error': '', 'x': 1}", {"x": 1}),
        ("True", True),
        ("'text'", "text"),
        ("[{'error': 1}]", [{"error": 1}]),
        ("{'deep': {(1, 2): 3}}", None),
    ],
)
def test_what_a_handler_returns(made: Callable[..., Any], returned: str, answer: Any) -> None:
    resolved = made("handler.py", SHOW.replace("return job", f"return {returned}"))
    # JSON cannot express this key.
    if "(1, 2)" in returned:
        with pytest.raises(Exception, match=r"answer\.deep is a dict with the key"):
            resolved.handler.output.encode(resolved())
        return
    assert json.loads(resolved.handler.output.encode(resolved())[0]) == answer


def test_an_error_keeps_its_words_and_what_came_with_it(made: Callable[..., Any]) -> None:
    resolved = made("handler.py", SHOW.replace("return job", "return job['input']"))
    with pytest.raises(HandlerFailed) as caught:
        resolved({"input": {"error": "out of memory", "step": 3, "refresh_worker": True}})
    assert (caught.value.message, caught.value.details) == ("out of memory", {"returned": {"step": 3}})
    assert resolved.host.retired == 1
    with pytest.raises(HandlerFailed) as caught:
        resolved({"input": {"error": {"code": 5}}})
    assert caught.value.message == '{"code": 5}'


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("async def one(): return 'awaited'\nhandler = lambda job: one()", "plain"),
        ("class C:\n    async def __call__(self, job): return 'awaited'\nhandler = C()", "async"),
        ("class C:\n    def run(self, job): return 'awaited'\nhandler = C().run", "plain"),
        ("import functools\ndef f(a, job): return 'awaited'\nhandler = functools.partial(f, 1)", "plain"),
    ],
)
def test_callables_of_every_kind(made: Callable[..., Any], source: str, kind: str) -> None:
    resolved = made("handler.py", source + START)
    assert resolved.handler.kind == kind
    assert resolved() == "awaited"


@pytest.mark.parametrize("asynchronous", ["", "async "])
def test_a_stream_that_says_error_fails_and_is_closed(made: Callable[..., Any], asynchronous: str) -> None:
    source = f"""
closed = []
{asynchronous}def handler(job):
    try:
        yield 1
        yield {{"error": "it broke"}}
        yield 2
    finally:
        closed.append(True)
"""
    resolved = made("handler.py", source + START)
    with pytest.raises(HandlerFailed, match=r"^it broke$"):
        resolved()
    assert sys.modules["handler"].closed == [True]


@pytest.mark.parametrize(
    "kind", ["def handler(job): return", "async def handler(job): return", "def handler(job): yield", "async def handler(job): yield"]
)  # fmt: skip
def test_refresh_worker_in_the_configuration_is_after_every_job(made: Callable[..., Any], kind: str) -> None:
    start = START.replace("handler}", "handler, 'refresh_worker': True}")
    resolved = made("handler.py", f"{kind} 1 / job['input']{start}")
    resolved(1)
    with pytest.raises(ZeroDivisionError):
        resolved(0)
    assert resolved.host.retired == 2


def test_the_modifier_is_asked_at_the_start_and_after_each_job(made: Callable[..., Any]) -> None:
    start = START.replace("handler}", "handler, 'concurrency_modifier': lambda current: current + 1}")
    resolved = made("handler.py", "async def handler(job): return 1" + start)
    resolved.set_up()
    resolved()
    assert resolved.host.sizes == [2, 3]
    # A plain handler does not run concurrently, so its modifier is not called.
    plain = made("handler.py", "def handler(job): return 1" + start)
    assert plain.handler.setup is None
    plain()
    assert plain.host.sizes == []


def test_a_modifier_that_fails_fails_no_job(
    made: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    start = START.replace("handler}", "handler, 'concurrency_modifier': lambda current: 1 / 0}")
    resolved = made("handler.py", "async def handler(job): return 1" + start)
    assert resolved() == 1
    assert "concurrency_modifier failed: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["return", "yield"])
def test_each_job_measures_its_steps_anew(made: Callable[..., Any], kind: str) -> None:
    source = f"""
from runpod.serverless.utils import rp_debugger
def handler(job):
    with rp_debugger.LineTimer("step"):
        {kind} 1
"""
    resolved = made("handler.py", source + START)
    assert resolved() == resolved()


def test_progress_is_of_the_job_that_is_named_and_never_fails_it(made: Callable[..., Any]) -> None:
    source = """
def handler(job):
    runpod.serverless.progress_update(job, {"step": 1})
    runpod.serverless.progress_update(dict(job), 2)
    runpod.serverless.progress_update({"id": "another"}, 3)
    runpod.serverless.progress_update({}, 4)
"""
    resolved = made("handler.py", source + START)
    assert resolved() is None
    assert resolved.host.progressed == [{"step": 1}, 2]


def test_the_file_runs_as_the_main_program_up_to_start(made: Callable[..., Any]) -> None:
    source = """
from __future__ import annotations
import argparse, dataclasses, os, sys, typing
import runpod
@dataclasses.dataclass
class Note:
    kind: typing.ClassVar[str] = "note"
    text: str = ""
def handler(job):
    return [__name__, len(dataclasses.fields(Note)), sys.modules["__main__"] is sys.modules["handler"], os.getcwd()]
if __name__ == "__main__":
    argparse.ArgumentParser().parse_args()
    try:
        runpod.serverless.start({"handler": handler})
    except Exception:
        pass
    os._exit(3)  # never reached at RunPod
"""
    assert made("handler.py", source)() == ["__main__", 1, True, str(Path.cwd())]


def test_start_in_a_module_that_the_file_imports(made: Callable[..., Any]) -> None:
    resolved = made(
        "runpod:handler.py", "import inner\n", **{"inner.py": "def handler(job): return __name__" + START}
    )
    assert resolved() == "inner"
    # The import of `inner` never ended, but the module must stay, because the handler is in it.
    assert "inner" in sys.modules


def test_start_in_a_coroutine(made: Callable[..., Any]) -> None:
    source = "import asyncio, runpod\nasync def main():\n    runpod.serverless.start({'handler': lambda job: 5})\nasyncio.run(main())\n"
    assert made("handler.py", source)() == 5


@pytest.mark.parametrize(
    ("source", "error", "word"),
    [
        ("import runpod\nif False:\n    runpod.serverless.start({})\n", HandlerSignatureError, "never calls runpod.serverless.start"),
        ("import runpod\nrunpod.serverless.start({})\n", HandlerSignatureError, '"handler" NoneType'),
        ("import runpod\nrunpod.get_gpus\nrunpod.serverless.start({})\n", HandlerImportError, "stand-in for runpod has no 'get_gpus'"),
        ("import runpod, gone\nrunpod.serverless.start({})\n", HandlerImportError, "gone"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_said(made: Callable[..., Any], source: str, error: type, word: str) -> None:
    with pytest.raises(error, match=word):
        made("handler.py", source)


REAL = {
    "runpod/__init__.py": "from . import serverless\nreal = True\n",
    "runpod/serverless/__init__.py": "from .modules.rp_progress import progress_update\ndef start(config):\n    raise SystemExit('the real one')\n",
    "runpod/serverless/modules/__init__.py": "",
    "runpod/serverless/modules/rp_progress.py": "def progress_update(job, progress):\n    raise SystemExit('the real one')\n",
}


def test_the_real_package_is_used_where_it_is(made: Callable[..., Any]) -> None:
    source = """
import runpod
from runpod.serverless import progress_update
def handler(job):
    progress_update(job, 1)
    return runpod.real
"""
    resolved = made("handler.py", source + START, **REAL)
    assert resolved() is True
    assert resolved.host.progressed == [1]


def test_a_folder_of_that_name_is_no_package(made: Callable[..., Any]) -> None:
    assert made("handler.py", SHOW, **{"runpod/notes.txt": ""})(1) == {"id": "i1", "input": 1}


@pytest.mark.parametrize(
    ("build", "hooked"), [("build(context)", True), ("build()", False), ("build(path)", False)]
)
def test_only_a_build_that_takes_a_context_is_a_hook(
    made: Callable[..., Any], build: str, hooked: bool
) -> None:
    handler = made("handler.py", f"def {build}: return 7\n{SHOW}").handler
    assert (handler.build is not None) is hooked
