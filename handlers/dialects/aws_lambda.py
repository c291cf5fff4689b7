"""Lambda: a function called with (event, context), as AWS calls it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import HandlerFailed, HandlerSignatureError
from ..contract import Context
from ..failure import PACKAGE_FOLDER, explain
from ..handler import Handler, HandlerKind, kind_of
from ..loading import import_file
from .bodies import LenientOutput, ObjectInput
from .recognise import Entry

ACCOUNT = "000000000000"
VERSION = "$LATEST"
_ENOUGH_MS = 900_000  # Lambda's longest time, for calls that have no deadline


def resolve_lambda(root: Path, entry: Entry, function: str) -> Handler:
    """The function that `entry` names. Raises HandlerImportError or HandlerSignatureError."""
    function = function or root.name
    module = import_file(root, root / entry.file, prepare=lambda: _set_environment(root, entry, function))
    call = getattr(module, entry.name, None)
    if not callable(call):
        raise HandlerSignatureError(
            f"{entry.file} defines no function {entry.name!r}.",
            remedy=f'Define `def {entry.name}(event, context): ...`, or name yours: `handler = "lambda:{entry.file}:NAME"`.',
        )
    kind = kind_of(call)
    if kind.streaming:
        raise HandlerSignatureError(
            f"`{entry.name}` in {entry.file} is a generator, which Lambda does not call.",
            remedy="Return the answer.",
        )
    caller = LambdaCaller(call, root)
    return Handler(
        call=caller.answer_async if kind is HandlerKind.ASYNC else caller.answer,
        kind=kind,
        takes_context=True,
        batch=None,
        input=ObjectInput(),
        output=LenientOutput(),
        build=None,
        rehearse=None,
        setup=None,
        teardown=None,
        dialect="lambda",
        entry=entry.label,
    )


class LambdaContext:
    """The second argument, as AWS's."""

    identity = None
    client_context = None

    def __init__(self, context: Context) -> None:
        self._context = context
        self.aws_request_id = context.id
        self.function_name = os.environ["AWS_LAMBDA_FUNCTION_NAME"]
        self.function_version = VERSION
        self.memory_limit_in_mb = os.environ["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"]
        self.invoked_function_arn = f"arn:aws:lambda:{_region()}:{ACCOUNT}:function:{self.function_name}"
        self.log_group_name = os.environ["AWS_LAMBDA_LOG_GROUP_NAME"]
        self.log_stream_name = os.environ["AWS_LAMBDA_LOG_STREAM_NAME"]

    def get_remaining_time_in_millis(self) -> int:
        remaining_ms = self._context.remaining_ms()
        return _ENOUGH_MS if remaining_ms is None else remaining_ms

    def log(self, message: object) -> None:
        self._context.log.info("%s", message)


class LambdaCaller:
    """Calls the function, and tells its failures in Lambda's words beside ours."""

    def __init__(self, call: Callable[..., Any], root: Path) -> None:
        self._call = call
        self._root = root

    def answer(self, event: Any, context: Context) -> Any:
        try:
            return self._call(event, LambdaContext(context))
        except Exception as error:
            raise self._failed(error) from error

    async def answer_async(self, event: Any, context: Context) -> Any:
        try:
            return await self._call(event, LambdaContext(context))
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> HandlerFailed:
        told = explain(HandlerFailed, "The handler", error, self._root)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if not frame.filename.startswith(PACKAGE_FOLDER)
        ]
        told.details |= {
            "errorType": type(error).__name__,
            "errorMessage": str(error),
            "stackTrace": traceback.format_list(frames),
        }
        return told


def _set_environment(root: Path, entry: Entry, function: str) -> None:
    """What AWS sets before it imports the file. What the settings say already stays."""
    memory_mb = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    stream = f"{datetime.now(UTC):%Y/%m/%d}/[{VERSION}]{os.getpid():032x}"
    for name, value in {
        "AWS_LAMBDA_FUNCTION_NAME": function,
        "AWS_LAMBDA_FUNCTION_VERSION": VERSION,
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(memory_mb),
        "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{function}",
        "AWS_LAMBDA_LOG_STREAM_NAME": stream,
        "LAMBDA_TASK_ROOT": str(root),
        "_HANDLER": f"{entry.file.removesuffix('.py').replace('/', '.')}.{entry.name}",
    }.items():
        os.environ.setdefault(name, value)


def _region() -> str:
    return os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
