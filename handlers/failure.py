"""Failures of the user's code, told as one paragraph: file, line, exception."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any, TypeVar

from ..errors import PilotflameError

E = TypeVar("E", bound=PilotflameError)

MAX_TRACEBACK_CHARS = 20_000
OWN_FOLDER = str(Path(__file__).resolve().parent.parent)


def explain(kind: type[E], what: str, error: BaseException, root: Path, *, remedy: str = "") -> E:
    """`kind`, saying that `what` raised `error`, at which file and line of the user's folder `root`.

    An error of our own tree (a snapshot that lacks a tensor, say) keeps its message and remedy.
    """
    file, line = locate(error, root)
    where = f" at {file}, line {line}" if file else ""
    text = error.message if isinstance(error, PilotflameError) else f"{type(error).__name__}: {_said(error)}"
    return kind(
        f"{what} failed{where}: {text}",
        remedy=error.remedy if isinstance(error, PilotflameError) else remedy,
        details={
            **(error.details if isinstance(error, PilotflameError) else {}),
            "exception": error.code if isinstance(error, PilotflameError) else type(error).__name__,
            **({"file": file, "line": line} if file else {}),
            "traceback": _user_traceback(error),
        },
    )


def locate(error: BaseException, root: Path) -> tuple[str, int]:
    """The innermost frame of `error` inside `root`: (path relative to root, line), or ("", 0)."""
    if isinstance(error, SyntaxError) and error.filename and (name := _inside(error.filename, root)):
        return name, error.lineno or 0
    found = ("", 0)
    for frame, line in traceback.walk_tb(error.__traceback__):
        if name := _inside(frame.f_code.co_filename, root):
            found = (name, line)
    return found


def _said(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  a broken __str__ must not hide what failed
        return "(it cannot be printed)"


def _inside(filename: str, root: Path) -> str:
    if not filename.startswith(
        "/"
    ):  # "<string>", "<frozen importlib._bootstrap>": would resolve to the folder
        return ""
    try:
        return str(Path(filename).resolve().relative_to(root.resolve()))
    except (ValueError, OSError):
        return ""


def _user_traceback(error: BaseException) -> str:
    """The traceback without the frames of pilotflame and importlib that led to the user's code."""
    told: Any = traceback.TracebackException.from_exception(error)
    kept = [
        frame
        for frame in told.stack
        if not frame.filename.startswith(OWN_FOLDER) and "importlib" not in frame.filename
    ]
    told.stack = traceback.StackSummary.from_list(kept)
    return "".join(told.format())[-MAX_TRACEBACK_CHARS:]
