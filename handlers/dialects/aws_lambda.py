"""Runs handlers that follow AWS Lambda's contract: functions called with (event, context)."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ...errors import HandlerFailed, HandlerSignatureError
from ..codec import InputCodec
from ..contract import Context
from ..failure import PACKAGE_FOLDER, explain
from ..handler import Handler, HandlerKind, kind_of
from ..loading import import_file
from .adapter import LenientOutput
from .recognise import Entry

ACCOUNT = "000000000000"
VERSION = "$LATEST"
# The remaining time of an invocation without a deadline: the longest timeout of Lambda.
_MAX_REMAINING_MS = 900_000


def resolve_lambda(root: Path, entry: Entry, function: str) -> Handler:
    """Import the file of `entry` and return the Handler for the function that `entry` names.

    `function` is the name that AWS's context and variables show, by default that of the folder. Raises
    HandlerImportError if the file cannot be imported, HandlerSignatureError if the function cannot be used.
    """
    function = function or root.name
    module = import_file(root, root / entry.file, prepare=lambda: _set_environment(root, entry, function))
    call = getattr(module, entry.name, None)
    if not callable(call):
        remedy = f'Define `{entry.name}(event, context)`, or set `handler = "lambda:{entry.file}:NAME"`.'
        raise HandlerSignatureError(f"{entry.file} defines no function {entry.name!r}.", remedy=remedy)
    kind = kind_of(call)
    if kind.streaming:
        fault = f"`{entry.name}` in {entry.file} is a generator, which Lambda does not call."
        raise HandlerSignatureError(fault, remedy="Return the response.")
    caller = LambdaCaller(call, root)
    called = caller.call_async if kind is HandlerKind.ASYNC else caller.call
    codecs = ObjectInput(None), LenientOutput(None)
    return Handler(called, kind, *codecs, dialect=entry.dialect, entry=entry.label)


class ObjectInput(InputCodec):
    """Accepts any JSON. An empty body is decoded as an empty object."""

    def decode(self, body: bytes, content_type: str = "") -> Any:
        return super().decode(body, content_type) if body else {}


class LambdaContext:
    """The second argument of a Lambda handler. It has the attributes of AWS's context object."""

    identity = None
    client_context = None

    def __init__(self, context: Context) -> None:
        self._context = context
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        self.aws_request_id = context.id
        self.function_name = os.environ["AWS_LAMBDA_FUNCTION_NAME"]
        self.function_version = VERSION
        self.memory_limit_in_mb = os.environ["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"]
        self.invoked_function_arn = f"arn:aws:lambda:{region}:{ACCOUNT}:function:{self.function_name}"
        self.log_group_name = os.environ["AWS_LAMBDA_LOG_GROUP_NAME"]
        self.log_stream_name = os.environ["AWS_LAMBDA_LOG_STREAM_NAME"]

    def get_remaining_time_in_millis(self) -> int:
        remaining_ms = self._context.remaining_ms()
        return _MAX_REMAINING_MS if remaining_ms is None else remaining_ms

    def log(self, message: object) -> None:
        self._context.log.info("%s", message)


class LambdaCaller:
    """Calls the user's function. If it raises, the details of our error have Lambda's description."""

    def __init__(self, function: Callable[..., Any], root: Path) -> None:
        self._function = function
        self._root = root

    def call(self, event: Any, context: Context) -> Any:
        try:
            return self._function(event, LambdaContext(context))
        except Exception as error:
            raise self._failed(error) from error

    async def call_async(self, event: Any, context: Context) -> Any:
        try:
            return await self._function(event, LambdaContext(context))
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> HandlerFailed:
        failed = explain(HandlerFailed, "The handler", error, self._root)
        stack = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in stack if not frame.filename.startswith(PACKAGE_FOLDER)]
        failed.details |= {
            "errorType": type(error).__name__,
            "errorMessage": str(error),
        }
        failed.private["stackTrace"] = traceback.format_list(frames)
        return failed


def _set_environment(root: Path, entry: Entry, function: str) -> None:
    """Set the environment variables that AWS sets before it imports a handler, unless they are set."""
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
