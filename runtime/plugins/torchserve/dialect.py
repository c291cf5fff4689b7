"""Recognises TorchServe's handlers: the class or the function `handle` of a file, or the handler that MAR-INF/MANIFEST.json names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from ....handlers.dialect import OWN_NAME, Dialect, Entry
from ....handlers.source_file import SourceClass, SourceFile

BASES = "ts.torch_handler."
METHODS = frozenset({"initialize", "handle"})
FUNCTION = "handle"
MANIFEST = "MAR-INF/MANIFEST.json"
MAX_MANIFEST_BYTES = 1 << 20


class TorchServeDialect(Dialect):
    """Classes with `initialize(context)` and `handle(data, context)`, and functions `handle(data, context)`."""

    name: ClassVar = "torchserve"
    title: ClassVar = "TorchServe"
    resolver: ClassVar = "pilotflame.runtime.plugins.torchserve.handler:resolve_torchserve"
    order: ClassVar = 40
    files: ClassVar = ("model_handler.py", "custom_handler.py")
    stands_in: ClassVar = frozenset({"ts"})

    def claims(self, name: str, source: SourceFile) -> bool:
        return name == _entry(source)

    def find(self, file: str, source: SourceFile) -> str | None:
        return None if OWN_NAME in source.arity else _entry(source) or None

    def default_name(self, source: SourceFile | None) -> str:
        return (_entry(source) if source else "") or FUNCTION

    def configured(self, folder: Path) -> Entry | None:
        """Return the handler that an unpacked model archive names, as handler.py or handler.py:function."""
        file, _, name = str(manifest_in(folder).get("handler", "")).partition(":")
        file = file if file.endswith(".py") else f"{file}.py"
        if file.startswith("/") or ".." in file.split("/") or not (folder / file).is_file():
            return None
        return Entry(self.name, file, name or self.default_name(SourceFile.read(folder / file)))


def manifest_in(folder: Path) -> dict[str, object]:
    """Return the field `model` of a model archive's manifest; {} if there is none."""
    try:
        path = folder / MANIFEST
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            return {}
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    model = found.get("model") if isinstance(found, dict) else None
    return model if isinstance(model, dict) else {}


def _entry(source: SourceFile) -> str:
    """Return the name that TorchServe would use, or "" if the file has no handler of TorchServe."""
    if source.arity.get(FUNCTION) == 2:
        return FUNCTION
    usable = [one.name for one in source.classes if _is_handler(one)]
    # TorchServe takes the only class of a file. If there are more, take the last one, which usually derives from the others.
    return usable[-1] if usable else ""


def _is_handler(made: SourceClass) -> bool:
    return any(base.startswith(BASES) for base in made.bases) or METHODS.issubset(made.methods)


DIALECT = TorchServeDialect()
