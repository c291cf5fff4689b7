"""Recognises AWS Lambda's handlers.

A handler is `lambda_handler`, or `handler(event, context)` in a file whose name is usual for Lambda. `FILES` lists these names.
"""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from ....handlers.dialect import OWN, OWN_NAME, Dialect
from ....handlers.source_file import SourceFile

LAMBDA_NAME = "lambda_handler"
# In a file with one of these names, `handler(event, context)` is a Lambda handler. In any other file, `handler` is
# pilotflame's own.
FILES = ("lambda_function.py", "app.py", "index.py")


class LambdaDialect(Dialect):
    """Functions that are called with (event, context)."""

    name: ClassVar = "lambda"
    title: ClassVar = "Lambda"
    resolver: ClassVar = "pilotflame.runtime.plugins.aws_lambda.handler:resolve_lambda"
    order: ClassVar = 30
    files: ClassVar = FILES

    def claims(self, name: str, source: SourceFile) -> bool:
        return name == LAMBDA_NAME

    def find(self, file: str, source: SourceFile) -> str | None:
        if OWN_NAME not in source.arity:
            return LAMBDA_NAME if LAMBDA_NAME in source.arity else None
        fits = LAMBDA_NAME in source.arity or source.arity[OWN_NAME] == 2
        if fits and not source.imports(OWN) and Path(file).name in FILES:
            return self.default_name(source)
        return None

    def default_name(self, source: SourceFile | None) -> str:
        return LAMBDA_NAME if source is None or LAMBDA_NAME in source.arity else OWN_NAME


DIALECT = LambdaDialect()
