"""The blocks of a Markdown page, and a terminal in which they run: for the tests of the README and of docs/how-to.

What an author has to know:

- A ```python block is run as a program of its own, with warnings as errors; it must end without an exception.
- A ```sh block holds commands, as a reader pastes them: no prompts, no output. Each line is a command, which
  is given to a shell and must end with 0. A line that ends in a backslash continues on the next line. After
  `export`, the rest of the block is given to the same shell.
- A command that ends in " &", as `pilotflame serve &`, runs until the end of the page. The next command
  begins at once, as when a reader pastes the block. In the end the command is sent SIGTERM and must end with
  0.
- Write the address that people will have: http://127.0.0.1:8600 (or localhost:8600). The test puts a free port there, and
  its own state folder in the environment.
- `make target` is not run: the target must be in the Makefile. `git clone …` and `cd …` are not run either. `pilotflame` and `curl` are
  run (`curl` with --fail, if it is installed). Any other command is refused, so that nothing here runs by accident.
- ```json and ```toml blocks must parse. Other languages, and blocks without one, are only read.
- An HTML comment `<!-- not run: reason -->` right before a block (blank lines between do not matter) skips it. The reason is required.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
LIMIT_S = 60
ADDRESS = re.compile(r"(127\.0\.0\.1|localhost):8600")
# The lines that are given to a shell: commands of pilotflame (also after variables or behind a pipe),
# `export`, and python3 in a folder.
RUN = re.compile(r"(\(cd \w+ && python3 |export \w+=|echo [^;&]*\|\s*pilotflame\b|(\w+=\S+ )*pilotflame\b)")
SKIP = re.compile(r"<!--\s*not run\s*:?\s*(.*?)\s*-->", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: where it begins, its language, its text, and why it is not run."""

    line: int
    language: str
    text: str
    skipped: str | None = None


def blocks(text: str) -> Iterator[Block]:
    """Yield the fenced blocks of a Markdown text."""
    lines = text.splitlines()
    begun: int | None = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if begun is None:
            begun = number
            continue
        before = "\n".join(lines[:begun]).rstrip()
        said = SKIP.search(before[before.rfind("<!--") :]) if before.endswith("-->") else None
        language = (lines[begun].removeprefix("```").split() or [""])[0]
        inside = "\n".join(lines[begun + 1 : number])
        yield Block(begun + 1, language, inside, said.group(1) if said else None)
        begun = None
    assert begun is None, f"the block of line {begun} does not end"


def commands(block: Block) -> list[str]:
    """Return the commands of a shell block. Continued lines are joined."""
    found: list[str] = []
    goes_on = False
    for line in block.text.splitlines():
        if goes_on:
            found[-1] += "\n" + line
        else:
            found.append(line)
        goes_on = line.endswith("\\") or found[-1].startswith("export ")
    return found


def targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Terminal:
    """Runs a page's commands as its reader would: in one folder, with one gateway address, and with commands
    in the background.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self._stack = stack
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        (folder / "bin").mkdir()
        wrapper = folder / "bin" / "pilotflame"
        wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pilotflame.runtime.cli "$@"\n')
        wrapper.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PILOTFLAME_")}
        self.environment = kept | {
            "PATH": f"{folder / 'bin'}:{kept.get('PATH', '')}",
            "HOME": str(folder),
            "HF_HUB_OFFLINE": "1",
            "PILOTFLAME_PORT": str(self.port),
            "PILOTFLAME_URL": f"http://127.0.0.1:{self.port}",
            "PILOTFLAME_STATE_DIR": str(folder / "state"),
        }

    def block(self, block: Block) -> None:
        if block.skipped is not None:
            assert block.skipped, f"line {block.line}: say why it is not run"
        elif block.language == "python":
            done = self.run([sys.executable, "-W", "error", "-c", self.addressed(block.text)])
            assert done.returncode == 0, f"the python block of line {block.line}:\n{done.stdout}"
        elif block.language == "sh":
            for command in commands(block):
                self.command(command)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "toml":
            tomllib.loads(block.text)

    def command(self, command: str) -> None:
        words = command.split()
        if words[0] == "make":
            assert set(words[1:]) <= targets(), f"$ {command}: no such target"
        elif words[0] == "pilotflame" and words[-1] == "&":
            self._stack.enter_context(
                Background(self, command.rstrip("& "), self.addressed(command).rstrip("& "))
            )
        elif RUN.match(command) or (words[0] == "curl" and shutil.which("curl")):
            told = self.addressed(command)
            told = told.replace("curl ", "curl --fail-with-body ", 1) if words[0] == "curl" else told
            done = self.run(["sh", "-c", told])
            assert done.returncode == 0, f"$ {command}\n{done.stdout}"
            assert "Traceback" not in done.stdout, f"$ {command}\n{done.stdout}"
        else:
            allowed = words[0] in ("curl", "cd") or words[:2] == ["git", "clone"]
            assert allowed, f"$ {command}: not one that is run; say <!-- not run: why --> before its block"

    def addressed(self, text: str) -> str:
        return ADDRESS.sub(rf"\g<1>:{self.port}", text)

    def end(self) -> None:
        """End the commands that still run. Fail if the exit code of one is not 0."""
        self._stack.close()

    def run(self, command: list[str], given: str = "") -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            command, cwd=self.folder, env=self.environment, input=given, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False,
        )  # fmt: skip


class Background:
    """A command that runs until the end of the page."""

    def __init__(self, terminal: Terminal, shown: str, command: str) -> None:
        self._shown = shown
        self._log = terminal.folder.parent / "background.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", "-c", f"exec {command}"], cwd=terminal.folder, env=terminal.environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            code = self._process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        assert code == 0, f"$ {self._shown} & ended with {code}\n{self._log.read_text()}"
