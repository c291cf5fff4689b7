"""Runs handlers that follow AWS Lambda's contract: functions called with (event, context)."""

from __future__ import annotations

import base64
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson

from ....errors import HandlerFailed, HandlerSignatureError, OutputInvalid
from ....handlers.codec import InputCodec, OutputCodec
from ....handlers.contract import NOTHING, Context
from ....handlers.dialect import Entry
from ....handlers.dialect_calls import LenientOutput
from ....handlers.failure import explain, user_frames
from ....handlers.handler import Handler, HandlerKind, kind_of
from ....handlers.loading import import_file
from ....machine import memory_bytes

ACCOUNT = "000000000000"
VERSION = "$LATEST"
SQS, KAFKA = "aws:sqs", "SelfManagedKafka"
DEFAULT_REGION = "us-east-1"
# The remaining time that an invocation without a deadline reports. It is the longest timeout that Lambda allows.
_MAX_REMAINING_MS = 900_000
_CLIENT = ("installation_id", "app_title", "app_version_name", "app_version_code", "app_package_name")


def resolve_lambda(root: Path, entry: Entry, function: str) -> Handler:
    """Import the file of `entry` and return the Handler for the function that `entry` names.

    `function` is the name in AWS's context object and environment variables. If it is empty, the folder's name is used.
    Raise HandlerImportError if the file cannot be imported, HandlerSignatureError if the function cannot be used.
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
    codecs = ObjectInput(None), ExactOutput(None)
    return Handler(called, kind, *codecs, dialect=entry.dialect, entry=entry.label)


class ObjectInput(InputCodec):
    """Accepts any JSON, with integers of any size. An empty body is decoded as an empty object."""

    def decode(self, body: bytes, content_type: str = "") -> Any:
        return super().decode(body, content_type) if body else {}


class ExactOutput(LenientOutput):
    """Encodes all that AWS's runtime encodes, including Decimals with all their digits."""

    def encode(self, answer: Any, accept: str = "") -> tuple[bytes, str]:
        try:
            return super().encode(answer, accept)
        except OutputInvalid as error:
            try:
                exact = _exact(answer)
            except (RecursionError, TypeError, ValueError):
                # Raise the first error, because it names the path of the fault.
                raise error from None
            return OutputCodec.encode(self, exact, accept)


def _exact(value: Any) -> Any:
    """Return `value` with its Decimals as fragments of JSON, and its keys as text."""
    if isinstance(value, dict):
        return {_key(key): _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError("no JSON number")
        return orjson.Fragment(str(value))
    return value


def _key(key: Any) -> str:
    """Return a dictionary's key as `json.dumps` writes it. Raise TypeError for a key that `json.dumps` refuses."""
    return key if isinstance(key, str) else str(next(iter(json.loads(json.dumps({key: None})))))


class LambdaContext:
    """The second argument of a Lambda handler. It has the attributes of AWS's context object.

    `identity` has no values: only Amazon Cognito provides them.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        qualifier = context.extra.get("qualifier", "")
        self.aws_request_id = context.id
        self.function_name = os.environ["AWS_LAMBDA_FUNCTION_NAME"]
        self.function_version = os.environ["AWS_LAMBDA_FUNCTION_VERSION"]
        self.memory_limit_in_mb = os.environ["AWS_LAMBDA_FUNCTION_MEMORY_SIZE"]
        arn = f"arn:aws:lambda:{os.environ['AWS_REGION']}:{ACCOUNT}:function:{self.function_name}"
        self.invoked_function_arn = f"{arn}:{qualifier}" if qualifier else arn
        self.log_group_name = os.environ["AWS_LAMBDA_LOG_GROUP_NAME"]
        self.log_stream_name = os.environ["AWS_LAMBDA_LOG_STREAM_NAME"]
        self.identity = SimpleNamespace(cognito_identity_id=None, cognito_identity_pool_id=None)
        self.client_context = _client_context(context.extra.get("client_context"))

    def get_remaining_time_in_millis(self) -> int:
        remaining_ms = self._context.remaining_ms()
        return _MAX_REMAINING_MS if remaining_ms is None else remaining_ms

    def log(self, message: object) -> None:
        self._context.log.info("%s", message)


def _client_context(sent: Mapping[str, Any] | None) -> SimpleNamespace | None:
    """Return the caller's ClientContext in the form of AWS's runtime, or None if the caller sent no ClientContext."""
    if sent is None:
        return None
    client = sent.get("client")
    fields = {name: client.get(name) for name in _CLIENT} if isinstance(client, dict) else None
    shown = None if fields is None else SimpleNamespace(**fields)
    return SimpleNamespace(custom=sent.get("custom"), env=sent.get("env"), client=shown)


def _mapped(event: Any, context: Context) -> Any:
    """Return a message of SQS or Kafka in the form of AWS's event source mapping. Return any other event unchanged."""
    if (record := _record(context)) is None:
        return event
    if record["eventSource"] == KAFKA:
        return _of_kafka(event, record)
    body = record["body"] if "body" in record else orjson.dumps(event).decode()
    return {"Records": [{**record, "body": body}]}


def _of_kafka(event: Any, facts: Mapping[str, Any]) -> dict[str, Any]:
    outer = ("eventSource", "bootstrapServers")
    record = {name: value for name, value in facts.items() if name not in outer}
    if "value" not in record:
        record["value"] = base64.b64encode(orjson.dumps(event)).decode()
    elif record["value"] is None:
        # AWS leaves out the value of a tombstone.
        del record["value"]
    records = {f"{record['topic']}-{record['partition']}": [record]}
    return {**{name: facts[name] for name in outer}, "records": records}


def _checked(answer: Any, context: Context) -> Any:
    """Return an answer. Raise HandlerFailed if the answer reports the call's message as failed, so that the message stays
    in the queue.
    """
    if _record(context) is not None and isinstance(answer, dict) and answer.get("batchItemFailures"):
        raise HandlerFailed("The handler has returned the message in batchItemFailures.")
    return answer


def _record(context: Context) -> Mapping[str, Any] | None:
    found: Mapping[str, Any] = context.extra.get("message", NOTHING)
    return found if found.get("eventSource") in (SQS, KAFKA) else None


class LambdaCaller:
    """Calls the user's function. If it fails, raises HandlerFailed with Lambda's errorType and errorMessage."""

    def __init__(self, function: Callable[..., Any], root: Path) -> None:
        self._function = function
        self._root = root

    def call(self, event: Any, context: Context) -> Any:
        try:
            answer = self._function(_mapped(event, context), LambdaContext(context))
        except Exception as error:
            raise self._failed(error) from error
        return _checked(answer, context)

    async def call_async(self, event: Any, context: Context) -> Any:
        try:
            answer = await self._function(_mapped(event, context), LambdaContext(context))
        except Exception as error:
            raise self._failed(error) from error
        return _checked(answer, context)

    def _failed(self, error: Exception) -> HandlerFailed:
        failed = explain(HandlerFailed, "The handler", error, self._root)
        frames = user_frames(traceback.extract_tb(error.__traceback__), self._root)
        failed.details |= {
            "errorType": type(error).__name__,
            "errorMessage": str(error),
        }
        failed.private["stackTrace"] = traceback.format_list(frames)
        return failed


def _set_environment(root: Path, entry: Entry, function: str) -> None:
    """Set the main environment variables that AWS sets before it imports a handler. Keep those that are set already."""
    memory_mb = memory_bytes() >> 20
    stream = f"{datetime.now(UTC):%Y/%m/%d}/[{VERSION}]{os.getpid():032x}"
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
    for name, value in {
        "AWS_DEFAULT_REGION": region,
        "AWS_EXECUTION_ENV": f"AWS_Lambda_python{sys.version_info.major}.{sys.version_info.minor}",
        "AWS_LAMBDA_INITIALIZATION_TYPE": "on-demand",
        "AWS_REGION": region,
        "AWS_LAMBDA_FUNCTION_NAME": function,
        "AWS_LAMBDA_FUNCTION_VERSION": VERSION,
        "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": str(memory_mb),
        "AWS_LAMBDA_LOG_GROUP_NAME": f"/aws/lambda/{function}",
        "AWS_LAMBDA_LOG_STREAM_NAME": stream,
        "LAMBDA_TASK_ROOT": str(root),
        "_HANDLER": f"{entry.file.removesuffix('.py').replace('/', '.')}.{entry.name}",
    }.items():
        os.environ.setdefault(name, value)
