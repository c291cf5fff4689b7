"""`pilotflame chat`: one message, lines from a pipe, and a person at a terminal who stops an answer."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
from typing import Any

from ... import conftest

MODEL = """
import asyncio
from pilotflame import Delta, GenerationRequest

async def handler(event: GenerationRequest):
    told = " | ".join(f"{message['role']}: {message['content']}" for message in event.messages)
    yield Delta(reasoning="Hm. ", tokens=[1])
    yield Delta(text=told, tokens=[2])
    if "wait" in event.messages[-1]["content"]:
        await asyncio.Event().wait()
    reason = "length" if event.max_tokens == 1 else "stop"
    yield Delta(text=".", tokens=[3], finish_reason=reason, usage={"prompt_tokens": 2, "completion_tokens": 3})
"""


def test_one_message(pilotflame: Any, deployed: Any) -> None:
    name = deployed(MODEL)
    done = pilotflame("chat", name, "Why?", "--system", "Be short.", "--max-tokens", 1)
    assert done.stdout == "Hm. system: Be short. | user: Why?.\n"
    assert "first token after" in done.stderr
    assert "from zero, 3 tokens" in done.stderr
    assert "cut off" in done.stderr
    found = json.loads(pilotflame("chat", name, "Why?", "--json").stdout)
    assert (found["text"], found["reasoning"], found["finish_reason"]) == ("user: Why?.", "Hm. ", "stop")
    assert 0 < found["first_token_s"] <= found["seconds"]


def test_lines_from_a_pipe_are_one_chat(pilotflame: Any, deployed: Any) -> None:
    done = pilotflame("chat", deployed(MODEL), given=b"Why?\n\nSo?\n")
    first = "user: Why?."
    assert done.stdout == f"Hm. {first}\nHm. user: Why? | assistant: {first} | user: So?.\n"


def test_a_function_that_is_no_language_model(pilotflame: Any, deployed: Any) -> None:
    name = deployed("def handler(event):\n    return event\n")
    done = pilotflame("chat", name, "Why?")
    assert done.returncode == 1
    assert "no language model" in done.stderr
    assert pilotflame("chat", "nobody", "Why?").returncode != 0


def test_a_person_stops_an_answer_and_goes_on(served: str, deployed: Any) -> None:
    name = deployed(MODEL)
    child, master = pty.fork()
    if not child:
        # Restore the default: if a script starts the tests with `&`, they ignore SIGINT, and the command would inherit that.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        command = [*conftest.COMMAND, "chat", name]
        os.execve(command[0], command, conftest.environment(PILOTFLAME_URL=served))
    terminal = Terminal(master)
    terminal.expect("> ")
    terminal.type(b"wait\n")
    terminal.expect("user: wait")
    terminal.type(b"\x03")
    terminal.expect("stopped")
    terminal.expect("> ")
    terminal.type(b"So?\n")
    terminal.expect("assistant: user: wait | user: So?")
    terminal.expect("> ")
    terminal.type(b"\x04")
    terminal.expect("\n")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(master)


class Terminal:
    """The terminal of a command: reads what the command writes, and types keys."""

    def __init__(self, file: int) -> None:
        self.file, self.unread = file, b""

    def expect(self, text: str) -> None:
        """Read until the command has written this text."""
        while text.encode() not in self.unread:
            assert select.select([self.file], [], [], 20)[0], self.unread
            self.unread += os.read(self.file, 4096)
        self.unread = self.unread.partition(text.encode())[2]

    def type(self, keys: bytes) -> None:
        os.write(self.file, keys)
