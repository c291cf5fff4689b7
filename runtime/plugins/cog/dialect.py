"""Recognises Cog's predictors: a class in predict.py or run.py, or the class or function that cog.yaml names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar

from ....handlers.dialect import OWN_NAME, Dialect, Entry, Requirements
from ....handlers.source_file import SourceFile
from .cog_yaml import COG_YAML, MAX_BYTES, CogYaml

METHODS = {"Predictor": "predict", "Runner": "run"}
BASES = ("cog.BasePredictor", "cog.BaseRunner")
# This expression finds the entry without a YAML parser, whose import takes longer than most deploys.
_ENTRY = re.compile(r"""(?m)^(?:predict|run):\s*["']?([\w./-]+\.py)(?::(\w+))?["']?\s*(?:#.*)?$""")


class CogDialect(Dialect):
    """Classes with `setup()` and `predict(**inputs)`."""

    name: ClassVar = "cog"
    title: ClassVar = "Cog"
    resolver: ClassVar = "pilotflame.runtime.plugins.cog.handler:resolve_cog"
    order: ClassVar = 20
    files: ClassVar = ("predict.py", "run.py")

    def claims(self, name: str, source: SourceFile) -> bool:
        return name == _predictor(source)

    def find(self, file: str, source: SourceFile) -> str | None:
        return None if OWN_NAME in source.arity else _predictor(source) or None

    def default_name(self, source: SourceFile | None) -> str:
        return (_predictor(source) if source else "") or "Predictor"

    def configured(self, folder: Path) -> Entry | None:
        try:
            if (folder / COG_YAML).stat().st_size > MAX_BYTES:
                return None
            found = _ENTRY.search((folder / COG_YAML).read_text(encoding="utf-8"))
        except (OSError, UnicodeError):
            return None
        if found is None:
            return None
        file = found[1]
        if file.startswith("/") or ".." in file.split("/") or not (folder / file).is_file():
            return None
        return Entry(self.name, file, found[2] or self.default_name(SourceFile.read(folder / file)))

    def requirements(self, folder: Path) -> Requirements:
        config = CogYaml.read(folder)
        packages = tuple(config.build.system_packages or ())
        return Requirements(COG_YAML, config.requirements(folder), config.env(), packages)


def _predictor(source: SourceFile) -> str:
    """Return the name of the class that Cog would use, or "" if the file has no such class."""
    if not source.imports("cog"):
        return ""
    derived = [one.name for one in source.classes for base in one.bases if base in BASES]
    named = [one.name for one in source.classes if METHODS.get(one.name) in one.methods]
    usual = [name for name in ("Runner", "Predictor") if name in derived or name in named]
    return next(iter([*usual, *derived]), "")


DIALECT = CogDialect()
