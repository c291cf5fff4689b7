"""Tests of a dialect: what it recognises without running a file, and what its resolver makes of a handler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import pytest

from ...handlers.dialect import DEFAULT, OWN, Dialect, Entry, Requirements
from ...handlers.recognise import Dialects

NOT_IN_WORKERS = (
    "aiohttp",
    "click",
    "httpx",
    "pilotflame.runtime.front.api",
    "pilotflame.runtime.calls.serving",
)

# Handlers run in a process of their own, as in a worker: they may change the modules and the environment.
LOADED = """
import json, sys
from importlib import import_module
import_module(sys.argv[1])
print(json.dumps(sorted(sys.modules)))
"""
ANSWER = """
import asyncio, inspect, json, os, sys
from pathlib import Path
from pilotflame.errors import PilotflameError
from pilotflame.handlers.contract import Context
from pilotflame.handlers.resolve import resolve

folder, reference, resolver, event = sys.argv[1:]

async def whole(given):
    if hasattr(given, "__aiter__"):
        return [piece async for piece in given]
    if inspect.isgenerator(given):
        return list(given)
    return await given if inspect.isawaitable(given) else given

async def main():
    os.chdir(folder)
    handler, state = resolve(Path(folder), reference, "tone", resolver), None
    for hook in (handler.build, handler.setup):
        made = None if hook is None else await whole(hook(Context("tone", "r1", state=state)))
        state = state if made is None else made
    context = Context("tone", "r1", invocation_id="i1", state=state, extra={"job": {"id": "i1"}, "bare": False})
    given = handler.input.decode(event.encode())
    if handler.batch:
        given, context = [given], Context.of_batch([context])
    answer = await whole(handler.call(given, context) if handler.takes_context else handler.call(given))
    answer = answer[0] if handler.batch else answer
    parts = answer if handler.kind.streaming else [answer]
    encoded = [json.loads(handler.output.encode(part)[0]) for part in parts]
    return {"dialect": handler.dialect, "output": encoded if handler.kind.streaming else encoded[0]}

try:
    told = asyncio.run(main())
except PilotflameError as error:
    told = {"error": type(error).__name__, "message": error.message, "remedy": error.remedy}
print("\\n" + json.dumps(told))
"""


def run_python(script: str, *arguments: str) -> Any:
    """Run a script in a new process that imports from the same folders. Return the JSON value in the last line that it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=100, check=False, stdin=subprocess.DEVNULL
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class DialectTests:
    """Tests of a `Dialect`. A subclass sets the attributes: a handler as the platform's users write it, and a call of it."""

    dialect: ClassVar[Dialect]
    file: ClassVar[str]
    """The file's usual name, which the dialect may also list in `Dialect.files`."""
    source: ClassVar[str]
    """The contents of the file."""
    handler: ClassVar[str]
    """The name of the handler in the file; "" if it has none."""
    event: ClassVar[Any]
    output: ClassVar[Any]
    """The handler's output for `event`; of a generator, the list of its pieces."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """The folder of a function with the handler."""
        (tmp_path / "tone").mkdir()
        (tmp_path / "tone" / self.file).write_text(self.source)
        return tmp_path / "tone"

    def recognise(self, folder: Path, reference: str = DEFAULT) -> Entry:
        return Dialects([self.dialect]).recognise(folder, reference)

    def answer(self, folder: Path) -> Any:
        """Resolve the handler and call it, in a new process. Return its output, or its error."""
        reference = Entry(self.dialect.name, self.file, self.handler).reference
        return run_python(ANSWER, str(folder), reference, self.dialect.resolver, json.dumps(self.event))

    def test_it_has_a_name_a_title_and_a_resolver(self) -> None:
        assert self.dialect.name.isidentifier()
        assert self.dialect.name != OWN
        assert self.dialect.title
        module, _, name = self.dialect.resolver.partition(":")
        assert callable(getattr(import_module(module), name))

    def test_its_handler_is_recognised(self, folder: Path) -> None:
        assert self.recognise(folder) == (self.dialect.name, self.file, self.handler)

    def test_recognising_runs_no_file(self, folder: Path) -> None:
        (folder / self.file).write_text(f"raise SystemExit('the file was run')\n{self.source}")
        assert self.recognise(folder) == (self.dialect.name, self.file, self.handler)

    def test_a_reference_names_the_dialect_and_the_file(self, folder: Path) -> None:
        found = self.recognise(folder, f"{self.dialect.name}:{self.file}")
        assert found == (self.dialect.name, self.file, self.handler)

    def test_pilotflames_own_handlers_are_left_alone(self, tmp_path: Path) -> None:
        for text in (
            "def handler(event):\n    return event\n",
            "import pilotflame\ndef handler(event, context): ...\n",
        ):
            (tmp_path / DEFAULT).write_text(text)
            assert self.recognise(tmp_path) == (OWN, DEFAULT, "handler")

    def test_a_file_that_does_not_parse_is_no_handler(self, tmp_path: Path) -> None:
        (tmp_path / self.file).write_text(f"{self.source}\n)(")
        assert self.recognise(tmp_path).dialect == OWN

    def test_a_folder_without_files_of_the_platform_needs_nothing(self, tmp_path: Path) -> None:
        assert self.dialect.configured(tmp_path) is None
        found = self.dialect.requirements(tmp_path)
        assert found._replace(file="") == Requirements()

    def test_its_handler_answers(self, folder: Path) -> None:
        assert self.answer(folder) == {"dialect": self.dialect.name, "output": self.output}

    def test_a_file_that_fails_is_an_import_error(self, folder: Path) -> None:
        (folder / self.file).write_text(f"{self.source}\nraise ValueError('no weights here')\n")
        if (told := self.answer(folder)).get("error") is None:
            # The platform's own call, in the middle of the file, may end the import.
            (folder / self.file).write_text(f"raise ValueError('no weights here')\n{self.source}")
            told = self.answer(folder)
        assert told["error"] == "HandlerImportError"
        assert "no weights here" in told["message"]

    def test_a_file_without_the_handler_is_refused(self, folder: Path) -> None:
        (folder / self.file).write_text("HANDLER = None\n")
        told = self.answer(folder)
        assert told["error"] == "HandlerSignatureError"
        assert self.file in told["message"]
        assert told["remedy"]

    def test_its_resolver_imports_no_http_server(self) -> None:
        loaded = run_python(LOADED, self.dialect.resolver.partition(":")[0])
        assert [name for name in NOT_IN_WORKERS if name in loaded] == []
