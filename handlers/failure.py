"""Describes an exception of user code in one paragraph: its file and line, its type and its message."""

from __future__ import annotations

import errno
import os
import socket
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from ..errors import PilotflameError, wrapped

# The code that `os.environ[name]` runs.
_OS_ENVIRON_CODE = type(os.environ).__getitem__.__code__
E = TypeVar("E", bound=PilotflameError)

MAX_TRACEBACK_CHARS = 12_000
CUT = "\n[…]\n"
PACKAGE_FOLDER = str(Path(__file__).resolve().parent.parent)
NO_NETWORK_REMEDY = (
    "There is no network here. A function in a container gets one by resources.network in pilotflame.toml."
)
OUT_OF_MEMORY_REMEDY = "This input needs more memory than there is: send a smaller one, or add memory."


def explain(kind: type[E], what: str, error: BaseException, root: Path, *, remedy: str = "") -> E:
    """Return an error of class `kind`. Its message says that `what` failed, with `error` and its position.

    The position is a file and line in the user's folder `root`. If `error` is a PilotflameError, its message,
    remedy and details are used, and not the argument `remedy`.
    """
    file, line = locate(error, root)
    where = f" at {file}, line {line}" if file else ""
    details: dict[str, Any] = {"exception": type(error).__name__}
    text = f"{type(error).__name__}: {_text(error)}"
    remedy = remedy or _variable_remedy(error)
    if not isinstance(error, PilotflameError) and not remedy and _lacks_network(error):
        remedy = NO_NETWORK_REMEDY
    if file:
        details |= {"file": file, "line": line}
    details["traceback"] = _user_traceback(error, root)

    def said(text: str) -> str:
        return f"{what} failed{where}: {cut(text)}"

    if isinstance(error, PilotflameError):
        return wrapped(kind, error, said, details=details | {"exception": error.code})
    return kind(said(text), remedy=remedy, details=details)


def locate(error: BaseException, root: Path) -> tuple[str, int]:
    """Return (path relative to `root`, line) of the innermost stack frame of `error` in `root`, or ("", 0).

    For a SyntaxError, return the position of its text.
    """
    if isinstance(error, SyntaxError) and error.filename and (name := _relative(error.filename, root)):
        return name, error.lineno or 0
    found = ("", 0)
    for frame, line in traceback.walk_tb(error.__traceback__):
        if name := _relative(frame.f_code.co_filename, root):
            found = (name, line)
    return found


def locate_frame(frame: FrameType | None, root: Path) -> dict[str, Any]:
    """Return the position of the stack of `frame`, as the fields `file`, `line` and `inside`.

    `file` is the outermost file in the user's folder `root`, which is usually the handler's file. `line` is the innermost
    line of the stack in this file. `inside` names the innermost function of the stack; "" if it is at `line` of `file`.
    """
    stack = list(traceback.walk_stack(frame))
    own = [(name, line) for one, line in stack if (name := _relative(one.f_code.co_filename, root))]
    file, line = next((place for place in own if place[0] == own[-1][0]), ("", 0))
    inner, inner_line = stack[0]
    name = _relative(inner.f_code.co_filename, root) or _importable(inner.f_code.co_filename)
    inside = f"{name}, line {inner_line}, in {inner.f_code.co_name}"
    return {"file": file, "line": line, "inside": "" if (name, inner_line) == (file, line) else inside}


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if `error` says that the memory of the host or of a device ran out.

    torch's errors are recognised by class name and message, because this module does not import torch.
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    kinds = type(error).__mro__
    if any(kind.__name__ == "OutOfMemoryError" and kind.__module__.startswith("torch") for kind in kinds):
        return True
    text = _text(error).lower() if isinstance(error, RuntimeError) else ""
    # cuBLAS and cuDNN report `status_alloc_failed`.
    return any(words in text for words in ("out of memory", "can't allocate memory", "status_alloc_failed"))


def _variable_remedy(error: BaseException) -> str:
    """Return what to do if `error` says that an environment variable does not exist, else ""."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not isinstance(error, KeyError) or not frames or frames[-1].f_code is not _OS_ENVIRON_CODE:
        return ""
    name = error.args[0]
    return (
        f"The function's environment has no {name}. Run `pilotflame secrets set FUNCTION {name}`, or add it to [env]"
        f" in pilotflame.toml if it is not secret. `pilotflame test` has no secrets: give it --set env.{name}=VALUE."
    )


def _lacks_network(error: BaseException) -> bool:
    """Return True if the name of a host was not resolved, and this process has no network interface but loopback."""
    found: list[Any] = [error]
    # Libraries raise their own errors, so look at the causes of an error. urllib keeps the cause in `reason`.
    for one in found:
        if isinstance(one, socket.gaierror):
            return all(name == "lo" for _, name in socket.if_nameindex())
        found += [
            cause
            for cause in (one.__cause__, one.__context__, getattr(one, "reason", None))
            if isinstance(cause, BaseException) and cause not in found
        ]
    return False


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not hide the failure
        return "(it cannot be printed)"


def _relative(filename: str, root: Path) -> str:
    # "<string>" and "<frozen importlib._bootstrap>" are no paths, but would resolve to files in the folder.
    if not filename.startswith("/"):
        return ""
    try:
        return str(Path(filename).resolve().relative_to(root.resolve()))
    except (ValueError, OSError):
        return ""


def _importable(filename: str) -> str:
    """Return the path of a file below the folder that it was imported from, such as "torch/hub.py"."""
    folders = sorted((folder for folder in sys.path if folder), key=len, reverse=True)
    folder = next((folder for folder in folders if filename.startswith(f"{folder}/")), "")
    return filename.removeprefix(f"{folder}/") if folder else filename


def _user_traceback(error: BaseException, root: Path) -> str:
    """Return the traceback without the stack frames of pilotflame and importlib, and with short paths of libraries.

    If frames of libraries come before the frames of the user's folder `root`, the user's frames are also shown at the
    start. A long text is cut in its middle.
    """
    trace: Any = traceback.TracebackException.from_exception(error)
    chain = [trace]
    for one in chain:
        one.stack = traceback.StackSummary.from_list(user_frames(one.stack, root))
        chain += filter(None, (one.__cause__, one.__context__, *(one.exceptions or ())))
    text = "".join(trace.format())
    own = [frame for frame in trace.stack if _relative(frame.filename, root)]
    if own and own != trace.stack[: len(own)]:
        frames = "".join(traceback.format_list(own))
        text = f"In the function's own code:\n{frames}In all:\n{text}"
    return cut(text)


def user_frames(stack: Iterable[traceback.FrameSummary], root: Path) -> list[traceback.FrameSummary]:
    """Return the frames without those of pilotflame and importlib. The path of a file outside the user's folder `root` begins below
    its import folder, so that it does not show the folders of this machine.
    """
    frames = [
        frame
        for frame in stack
        if not frame.filename.startswith(PACKAGE_FOLDER) and "importlib" not in frame.filename
    ]
    for frame in frames:
        # Use `frame.line` before the path becomes shorter: the frame reads the line of source at the first use, from this path.
        if frame.line is not None and not _relative(frame.filename, root):
            frame.filename = _importable(frame.filename)
    return frames


def cut(text: str) -> str:
    """Return a text without its middle if it is too long to be read."""
    if len(text) <= MAX_TRACEBACK_CHARS:
        return text
    half = (MAX_TRACEBACK_CHARS - len(CUT)) // 2
    return f"{text[:half]}{CUT}{text[-half:]}"
