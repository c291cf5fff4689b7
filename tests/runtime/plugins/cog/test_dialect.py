"""Cog's dialect keeps the contract of dialects."""

from __future__ import annotations

from typing import ClassVar

from pilotflame.runtime.plugins.cog.dialect import DIALECT
from pilotflame.runtime.testing.dialect import DialectTests


class TestCogDialect(DialectTests):
    dialect = DIALECT
    file = "predict.py"
    source = """
from cog import BasePredictor, Input
class Predictor(BasePredictor):
    def setup(self):
        self.word = "hello "
    def predict(self, name: str, times: int = Input(default=2)) -> str:
        return self.word + name * times
"""
    handler = "Predictor"
    event: ClassVar = {"input": {"name": "Ada"}}
    output = "hello AdaAda"
