"""Runs handlers that follow TorchServe's contract. A call gets the requests of a batch as a list."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import orjson

from ....errors import BadInput, HandlerFailed, HandlerSignatureError, OutputInvalid
from ....foreign_json import check_json, loads
from ....handlers.codec import FORM_TYPE, JSON_TYPE, InputCodec
from ....handlers.contract import NOTHING, BatchSpec, Context
from ....handlers.dialect import Entry
from ....handlers.dialect_calls import LenientOutput, awaited
from ....handlers.forms import MAX_FIELDS, FormField, FormParser, too_many_fields
from ....handlers.handler import Handler, HandlerKind
from ....handlers.loading import import_file
from ....handlers.stand_in import is_installed, provide
from .dialect import manifest_in
from .sdk import RequestMetrics, TorchServeContext, stand_in

ABOUT = "torchserve"
"""The key of `context.extra` with the gateway's facts about a request: content_type, query and headers."""
CONFIG = "model-config.yaml"
MULTIPART = "multipart/form-data"
NOT_OURS = """{0} was taken for a handler of TorchServe, which is called once without data. For AWS Lambda, set
handler = "lambda:{0}" in pilotflame.toml. For pilotflame, name the function handler.
"""


def resolve_torchserve(root: Path, entry: Entry, function: str = "") -> Handler:
    """Return the Handler of the class or the function that `entry` names.

    Raise HandlerImportError if the import fails, HandlerSignatureError if the file has no such handler.
    """
    module = import_file(root, root / entry.file, prepare=_provide_ts)
    service = Service(module, entry, root, function)
    return Handler(
        service.run, HandlerKind.PLAIN, InputCodec(None), TorchServeOutput(None), batch=BatchSpec(service.batch_size),
        setup=service.set_up, dialect=entry.dialect, entry=entry.label,
    )  # fmt: skip


def _provide_ts() -> None:
    if not is_installed("ts"):
        provide(stand_in(), __file__)


class Typed(NamedTuple):
    """An answer whose media type the handler has set."""

    value: Any
    content_type: str


class TorchServeOutput(LenientOutput):
    """Encodes answers as TorchServe does, if the handler has set their media type."""

    def encode(self, answer: Any, accept: str = "") -> tuple[bytes, str]:
        if not isinstance(answer, Typed):
            return super().encode(answer, accept)
        value, kind = answer
        if isinstance(value, str) and not kind.startswith(JSON_TYPE):
            return value.encode(), kind
        return (bytes(value) if isinstance(value, bytes | bytearray) else super().encode(value)[0]), kind


class Service:
    """The user's class or function. Each worker has an instance of the class, and a context."""

    def __init__(self, module: ModuleType, entry: Entry, root: Path, function: str) -> None:
        self._target: Any = getattr(module, entry.name, None)
        self._root, self._function, self._label = root, function, entry.label
        if not callable(self._target) or (self._is_class and not hasattr(self._target, "handle")):
            remedy = "Define a class with initialize(context) and handle(data, context), or a function handle(data, context)."
            raise HandlerSignatureError(
                f"{entry.file} has no handler {entry.name!r} of TorchServe.", remedy=remedy
            )
        self._manifest = {"model": {"modelName": function, "handler": entry.label, **_model_of(root)}}
        self._config = _config_of(root, str(self._manifest["model"].get("configFile", CONFIG)))
        size = self._config.get("batchSize", 1)
        self.batch_size = size if isinstance(size, int) and size > 0 else 1

    @property
    def _is_class(self) -> bool:
        return isinstance(self._target, type)

    def set_up(self, context: Context) -> tuple[Callable[..., Any], TorchServeContext]:
        """Initialize the handler. Return the callable for its calls, and its context."""
        name = context.function or self._function
        shared = TorchServeContext(
            name, str(self._root), self._manifest, self.batch_size, _gpu(), self._config
        )
        if not self._is_class:
            # TorchServe also calls a function once without data, so that it can load its model.
            try:
                self._target(None, shared)
            except Exception:
                sys.stderr.write(NOT_OURS.format(self._label))
                raise
            return self._target, shared
        instance = self._target()
        if hasattr(instance, "initialize"):
            instance.initialize(shared)
        return instance.handle, shared

    def run(self, events: Sequence[Any], context: Context) -> list[Any]:
        """Return one answer for each event: a HandlerFailed if the handler has set an error status for the request."""
        handle, shared = context.state
        items = context.items or [context]
        told = [item.extra.get(ABOUT, NOTHING) for item in items]
        # Copy the context, because calls may run at the same time, in several threads.
        asked = copy.copy(shared)
        headers = [one.get("headers", NOTHING) for one in told]
        asked.begin([item.id for item in items], headers, RequestMetrics(context.metrics))
        data = [fields_of(event, about) for event, about in zip(events, told, strict=True)]
        try:
            answers = awaited(handle(data, asked))
        except Exception as error:
            # Compare the name, because the real package and the stand-in have different classes of this name.
            if type(error).__name__ != "PredictionException":
                raise
            raise _failed(getattr(error, "error_code", 500), str(getattr(error, "message", error))) from None
        if not isinstance(answers, list):
            fault = f"The handler returned {type(answers).__name__}, not a list."
            raise OutputInvalid(
                fault,
                remedy="Return a list with one answer for each request. For a handler of pilotflame's own form, name the function `handler`.",
            )
        return [_answer(answer, idx, asked) for idx, answer in enumerate(answers)]


def fields_of(event: Any, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request as TorchServe passes it to handlers: the fields of the query and of the form.

    If the body is not a form, it is the field `body`.

    Raise BadInput if a form is malformed or has too many fields.
    """
    fields, content_type = dict(about.get("query", NOTHING)), str(about.get("content_type", ""))
    kind = content_type.partition(";")[0].strip().lower()
    if isinstance(event, bytes) and kind == MULTIPART:
        return fields | _multipart(event, content_type)
    if isinstance(event, bytes) and kind == FORM_TYPE:
        return fields | _url_encoded(event)
    return fields | {"body": bytearray(event) if isinstance(event, bytes) else event}


def _url_encoded(body: bytes) -> dict[str, Any]:
    """Return the fields of a form. `curl -d` sends JSON with the type of a form, so JSON becomes the field `body`."""
    check_json(body)
    try:
        return {"body": loads(body)}
    except orjson.JSONDecodeError:
        pass
    try:
        return dict(parse_qsl(body.decode(errors="replace"), max_num_fields=MAX_FIELDS))
    except ValueError:
        raise too_many_fields() from None


def _multipart(body: bytes, content_type: str) -> dict[str, Any]:
    """Return the fields of a form. A field without a name is the `body`."""
    form, fields = FormParser(content_type), dict[str, tuple[FormField, list[bytes]]]()
    content = list[bytes]()
    for found in form.feed(body):
        if isinstance(found, FormField):
            content = []
            fields[found.name or "body"] = found, content
        else:
            content.append(found)
    form.end()
    return {name: _value(b"".join(content), field.content_type) for name, (field, content) in fields.items()}


def _value(value: bytes, kind: str) -> Any:
    if kind == JSON_TYPE:
        check_json(value)
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            raise BadInput("A field of the form is not JSON.", remedy="Send JSON.") from None
    return value.decode(errors="replace") if kind.startswith("text/") else bytearray(value)


def _answer(answer: Any, idx: int, asked: TorchServeContext) -> Any:
    code, phrase = asked.get_response_status(idx)
    if code != 200:
        return _failed(
            code, phrase or (answer if isinstance(answer, str) else json.dumps(answer, default=str))
        )
    kind = asked.get_response_content_type(idx)
    return answer if kind is None else Typed(answer, kind)


def _failed(code: Any, message: str) -> HandlerFailed:
    return HandlerFailed(message, details={"status": code if isinstance(code, int) else 500})


def _model_of(root: Path) -> dict[str, Any]:
    """Return the manifest's field `model`. Without a manifest, name the only file of weights, and model.py, if they
    exist.
    """
    if found := manifest_in(root):
        return found
    weights = sorted([*root.glob("*.pt"), *root.glob("*.pth")])
    model = {"serializedFile": weights[0].name} if len(weights) == 1 else {}
    return model | ({"modelFile": "model.py"} if (root / "model.py").is_file() else {})


def _config_of(root: Path, file: str) -> dict[str, Any]:
    """Return the model's configuration; {} without the file. Raise HandlerSignatureError if it is malformed."""
    path = root / Path(file).name
    if not path.is_file():
        return {}
    # Only functions with such a file need the parser, whose import takes long.
    import yaml  # noqa: PLC0415

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeError) as error:
        raise HandlerSignatureError(
            f"{path.name} is malformed: {error}.", remedy="Correct the file."
        ) from None
    return found if isinstance(found, dict) else {}


def _gpu() -> int | None:
    """Return 0, the number of the worker's own GPU, if the worker has one and the handler has imported torch."""
    torch = sys.modules.get("torch")
    return 0 if torch is not None and torch.cuda.is_available() else None
