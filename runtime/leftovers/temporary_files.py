"""Finds the temporary files and folders that an import has made and kept. Forks would share them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any


class TemporaryNames:
    """Gives the module tempfile its random names, and keeps them."""

    def __init__(self) -> None:
        module: Any = tempfile
        self._names: Iterator[str] = module._RandomNameSequence()  # noqa: SLF001
        self._given: list[str] = []

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        self._given.append(name := next(self._names))
        return name

    def left(self) -> list[str]:
        """Return the paths of the temporary files and folders with these names that still exist."""
        if not self._given:
            return []
        folder = tempfile.gettempdir()
        # OSError: the folder was removed meanwhile.
        with suppress(OSError):
            entries = os.listdir(folder)  # noqa: PTH208  a folder of temporary files may have many entries
            return [f"{folder}/{entry}" for entry in entries if any(name in entry for name in self._given)]
        return []


@contextmanager
def watch_temporary_files() -> Iterator[TemporaryNames]:
    """Yield the names that tempfile gives in the block."""
    module: Any = tempfile
    names, before = TemporaryNames(), module._name_sequence  # noqa: SLF001
    module._name_sequence = names  # noqa: SLF001
    try:
        yield names
    finally:
        module._name_sequence = before  # noqa: SLF001
