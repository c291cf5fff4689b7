"""RunPod's dialect keeps the contract of dialects."""

from __future__ import annotations

from typing import ClassVar

from pilotflame.runtime.plugins.runpod.dialect import DIALECT
from pilotflame.runtime.testing.dialect import DialectTests


class TestRunPodDialect(DialectTests):
    dialect = DIALECT
    file = "handler.py"
    source = """
import runpod
def handler(job):
    yield from job["input"]["text"].split()
runpod.serverless.start({"handler": handler, "return_aggregate_stream": True})
"""
    handler = ""
    event: ClassVar = {"input": {"text": "to be"}}
    output: ClassVar = ["to", "be"]
