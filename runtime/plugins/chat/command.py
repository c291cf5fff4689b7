"""The command that talks to a language model: `pilotflame chat`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click

from ....errors import OutputInvalid
from ...command.client import display, options
from ...command.client.client import Client

PROMPT = "> "


@dataclass
class ChatAnswer:
    """A model's answer, and how long it took."""

    started_s: float = field(default_factory=time.monotonic)
    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    stopped: bool = False
    """True if Ctrl-C has ended the answer."""
    usage: dict[str, int] = field(default_factory=dict)
    cold: bool = False
    first_s: float | None = None
    ended_s: float = 0.0

    def add(self, delta: dict[str, Any]) -> None:
        """Add a piece of the answer."""
        if self.first_s is None:
            self.first_s = time.monotonic()
        self.text += delta.get("text") or ""
        self.reasoning += delta.get("reasoning") or ""
        self.finish_reason = delta.get("finish_reason") or self.finish_reason
        self.usage = delta.get("usage") or self.usage

    @property
    def facts(self) -> dict[str, Any]:
        """The answer for --json."""
        return {
            "text": self.text, "reasoning": self.reasoning, "finish_reason": self.finish_reason, "usage": self.usage,
            "cold_start": self.cold, "first_token_s": self._first_token_s, "seconds": round(self.ended_s - self.started_s, 4),
        }  # fmt: skip

    @property
    def times(self) -> str:
        """The line about the answer's times and tokens."""
        tokens = self.usage.get("completion_tokens", 0)
        parts = [f"first token after {display.milliseconds((self._first_token_s or 0.0) * 1e3)}"]
        parts += ["from zero"] if self.cold else []
        rest_s = self.ended_s - (self.first_s or self.started_s)
        parts.append(display.counted(tokens, "token"))
        parts += [f"{(tokens - 1) / rest_s:.0f}/s"] if tokens > 1 and rest_s > 0 else []
        parts += ["stopped"] if self.stopped else []
        parts += ["cut off: max_tokens or the model's limit"] if self.finish_reason == "length" else []
        return ", ".join(parts)

    @property
    def _first_token_s(self) -> float | None:
        return None if self.first_s is None else round(self.first_s - self.started_s, 4)


@click.command()
@options.function
@click.argument("message", required=False)
@click.option("--system", metavar="TEXT", help="Instructions before the chat.")
@click.option("--temperature", type=click.FloatRange(0, 2), help="0 always takes the likeliest token.")
@click.option("--max-tokens", type=click.IntRange(1), help="The longest answer.")
@options.gateway
def chat(
    *, name: str, message: str | None, system: str | None, temperature: float | None, max_tokens: int | None,
    client: Client, as_json: bool,
) -> None:  # fmt: skip
    """Talk to a language model. Answers are printed as they are made, and a line says how long they took.

    Without MESSAGE, each line that you type is a message. Ctrl-C stops an answer, and Ctrl-D ends the chat. Lines may also come from a
    pipe. Write FUNCTION:ADAPTER for one of the function's adapters.

    \b
    Examples:
      pilotflame chat smol
      pilotflame chat smol "Why is the sky blue?" --max-tokens 200
    """
    function, _, adapter = name.partition(":")
    given = {"temperature": temperature, "max_tokens": max_tokens, "adapter": adapter or None}
    asked = {key: value for key, value in given.items() if value is not None}
    history: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    for text in _messages(message):
        history.append({"role": "user", "content": text})
        answer = _answer(client, function, {"messages": history, **asked}, quiet=as_json)
        history.append({"role": "assistant", "content": answer.text})
        if as_json:
            display.print_json(answer.facts)
        else:
            display.say(display.style(answer.times, dim=True), raw=True)


def _messages(message: str | None) -> Iterator[str]:
    """Yield the user's messages: the argument, or else the lines of standard input."""
    if message is not None:
        yield message
        return
    asks = sys.stdin.isatty()
    while True:
        try:
            line = input(PROMPT if asks else "")
        except EOFError:
            if asks:
                display.say("")
            return
        if line.strip():
            yield line


def _answer(client: Client, name: str, event: dict[str, Any], *, quiet: bool) -> ChatAnswer:
    """Send the chat, and print the answer as it comes, unless `quiet`."""
    answer = ChatAnswer()
    with client.call(name, json.dumps(event).encode()) as reply:
        answer.cold = reply.cold
        try:
            for delta in _deltas(reply.pieces() if reply.streaming else [reply.value()]):
                answer.add(delta)
                if not quiet:
                    display.echo(display.style(delta.get("reasoning") or "", dim=True), nl=False, raw=True)
                    display.echo(delta.get("text") or "", nl=False)
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            answer.stopped = True
    answer.ended_s = time.monotonic()
    if not quiet:
        display.echo()
    return answer


def _deltas(pieces: Iterator[Any] | Sequence[Any]) -> Iterator[dict[str, Any]]:
    """Yield the pieces of an answer. Raise OutputInvalid if the function is no language model."""
    for piece in pieces:
        if not isinstance(piece, dict) or "text" not in piece:
            raise OutputInvalid(
                "This function is no language model: its answers have no `text`.",
                remedy="Call it with `pilotflame invoke`.",
            )
        yield piece
