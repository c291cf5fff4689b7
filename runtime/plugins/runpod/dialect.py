"""Recognises RunPod's handlers: files that call `runpod.serverless.start`."""

from __future__ import annotations

from typing import ClassVar

from ....handlers.dialect import OWN, OWN_NAME, Dialect
from ....handlers.source_file import SourceFile

START = "runpod.serverless.start"


class RunPodDialect(Dialect):
    """Handlers that a file passes to `runpod.serverless.start`. An entry does not need to name such a handler."""

    name: ClassVar = "runpod"
    title: ClassVar = "RunPod"
    resolver: ClassVar = "pilotflame.runtime.plugins.runpod.handler:resolve_runpod"
    order: ClassVar = 10
    files: ClassVar = ("rp_handler.py",)
    stands_in: ClassVar = frozenset({"runpod"})

    def find(self, file: str, source: SourceFile) -> str | None:
        own = OWN_NAME in source.arity and source.imports(OWN)
        return "" if START in source.calls and not own else None


DIALECT = RunPodDialect()
