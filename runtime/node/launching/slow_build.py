"""Waits for a zygote that imports and builds a handler.

If that takes long, the log gets the zygote's position in the code.
"""

from __future__ import annotations

import asyncio
from typing import Any

from ....errors import LauncherError
from ...calls.link.child import STACKS_TIMEOUT_S, Child
from ...calls.link.worker_spec import POSITION_SIGNAL, WorkerSpec
from ...ground.telemetry.logs import Log

# The time of the first line in the log about a slow import or `build`, and the time between the next lines.
FIRST_REPORT_S, NEXT_REPORT_S = 10.0, 30.0
# How long the zygote may take to report its position. It cannot report a position in native code.
ANSWER_S = 1.0


class SlowBuild:
    """Watches one zygote until `built`, the future with the head of its BUILT frame, is done."""

    def __init__(self, child: Child, built: asyncio.Future[dict[str, Any]]) -> None:
        self._child, self._built = child, built
        self._position: asyncio.Future[dict[str, Any]] | None = None

    def answer(self, position: dict[str, Any]) -> None:
        """Take the zygote's answer, which is the head of a POSITION frame."""
        if self._position is not None and not self._position.done():
            self._position.set_result(position)

    async def wait(self, spec: WorkerSpec, logs: Log) -> dict[str, Any]:
        """Return the result of `built`, or raise its error. Raise LauncherError after `spec.build_timeout_s`.

        If the import or `build` takes long, the log names its position. The error at the limit names it too.
        """
        loop, limit_s = asyncio.get_running_loop(), spec.build_timeout_s
        started_s, next_s = loop.time(), FIRST_REPORT_S
        while True:
            due_s = min(next_s, limit_s)
            await asyncio.wait([self._built], timeout=started_s + due_s - loop.time())
            place = "" if self._built.done() else await self._locate()
            if self._built.done():
                return self._built.result()
            if due_s >= limit_s:
                raise _too_slow(spec, place, self._position)
            text = f"import and build have taken {due_s:.0f} s, and are {place}"
            logs.write("gateway", f"{text}; build_timeout_s ({limit_s:g} s) limits them", "warning")
            next_s += NEXT_REPORT_S

    async def _locate(self) -> str:
        """Return the zygote's position in the code. If its Python code does not answer, let the zygote write its stacks
        to its log.
        """
        self._position = asyncio.get_running_loop().create_future()
        self._child.send_signal(POSITION_SIGNAL)
        first = asyncio.FIRST_COMPLETED
        await asyncio.wait([self._position, self._built], timeout=ANSWER_S, return_when=first)
        if self._position.done():
            return _text(**self._position.result())
        if not self._built.done():
            self._child.dump_stacks()
            await asyncio.wait([self._built], timeout=STACKS_TIMEOUT_S)
        return "in native code (the stack is in the function's log)"


def _text(file: str, line: int, inside: str) -> str:
    if not file:
        return f"in {inside}"
    return f"at {file}, line {line}" + (f" (inside {inside})" if inside else "")


def _too_slow(spec: WorkerSpec, place: str, position: asyncio.Future[dict[str, Any]] | None) -> LauncherError:
    message = f"Import and `build` took longer than {spec.build_timeout_s:g} s: they were {place}."
    remedy = "Move slow work from import and `build` to `setup`, or raise build_timeout_s in pilotflame.toml."
    found = position.result() if position is not None and position.done() else {}
    details = {key: found[key] for key in ("file", "line") if found.get("file")}
    return LauncherError(message, remedy=remedy, details=details)
