"""Defines the exit codes of the command line, and turns errors into exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from ....errors import GatewayUnreachable, PilotflameError
from ...ground.telemetry.refusals import explained
from .display import function_trace, json_text, say

ERROR = 1
USAGE = 2
UNREACHABLE = 3
# The job that the command waited for, or a line of a batch, did not complete.
NOT_COMPLETED = 4
INTERRUPTED = 130


@contextmanager
def on_interrupt(text: str) -> Iterator[None]:
    """If Ctrl-C is pressed in the block, print `text` and exit. `text` says how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        say(text)
        raise click.exceptions.Exit(INTERRUPTED) from None


def exit_code_of(command: Callable[[], Any], *, as_json: bool = False) -> int:
    """Run a command and return its exit code.

    If the command raises an error, print the error on stderr: as one paragraph, or as one line of JSON with the key
    `error`.
    """
    try:
        code = command()
    except (click.exceptions.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        if as_json:
            _say_json({"type": "usage", "message": error.format_message()})
        else:
            error.show()
        return USAGE if isinstance(error, click.UsageError) else ERROR
    except BrokenPipeError:
        # The reader of stdout has closed the pipe. Redirect stdout, so that the interpreter can flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ERROR
    except (PilotflameError, OSError, RuntimeError, MemoryError, ExceptionGroup) as error:
        if (known := explained(error)) is None:
            raise
        say_error(known, as_json=as_json)
        return UNREACHABLE if isinstance(known, GatewayUnreachable) else ERROR
    return code if isinstance(code, int) else 0


def say_error(error: PilotflameError, *, as_json: bool) -> None:
    """Print an error on stderr: as one paragraph and the function's traceback, or as one line of JSON."""
    if as_json:
        return _say_json(error.to_wire(private=True))
    say(f"error: {' '.join(str(error).split())}")
    # The gateway sends the traceback only to callers that may see the function's code.
    return say(f"\n{function_trace(error.trace)}") if error.trace else None


def _say_json(error: dict[str, Any]) -> None:
    say(json_text({"error": error}))
