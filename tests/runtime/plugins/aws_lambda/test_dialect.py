"""Lambda's dialect keeps the contract of dialects."""

from __future__ import annotations

from typing import ClassVar

from pilotflame.runtime.plugins.aws_lambda.dialect import DIALECT
from pilotflame.runtime.testing.dialect import DialectTests


class TestLambdaDialect(DialectTests):
    dialect = DIALECT
    file = "lambda_function.py"
    source = "def lambda_handler(event, context):\n    return [event['n'], context.function_name]\n"
    handler = "lambda_handler"
    event: ClassVar = {"n": 3}
    output: ClassVar = [3, "tone"]
