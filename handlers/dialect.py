"""Defines a dialect, which recognises another platform's handlers without running their files, and resolves them.

A plugin offers an instance under the entry point group `pilotflame.dialects`. `Dialect.resolver` names the part that
runs in workers, so that only the workers of such functions import this part.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from .source_file import SourceFile

OWN, OWN_NAME = "pilotflame", "handler"
"""The dialect of pilotflame's own handlers, and the name of a handler in its file."""
DEFAULT = "handler.py"


class Entry(NamedTuple):
    """Where a handler is: its dialect, its file, and its name in the file, which may be ""."""

    dialect: str
    file: str
    name: str

    @property
    def label(self) -> str:
        return f"{self.file}:{self.name}" if self.name else self.file

    @property
    def reference(self) -> str:
        """The entry as a text that `parse_reference` reads."""
        return f"{self.dialect}:{self.label}"


def parse_reference(reference: str) -> Entry:
    """Return the parts of a reference such as "file.py:name" or "cog:predict.py:Predictor". A missing part is ""."""
    first, colon, rest = reference.partition(":")
    dialect, rest = (first, rest) if colon and first.isidentifier() else ("", reference)
    file, _, name = rest.partition(":")
    return Entry(dialect, file, name)


class Requirements(NamedTuple):
    """The needs of a function, as the platform's own file declares them."""

    file: str = ""
    """The name of the platform's file, for messages."""
    text: str = ""
    """Lines of a requirements.txt, in addition to the function's own file."""
    env: Mapping[str, str] = {}
    """Environment variables, which pilotflame.toml may override."""
    system_packages: tuple[str, ...] = ()
    """Packages of the operating system, which an image of the function installs."""


class Dialect:
    """The handlers of one platform. This base class recognises no handlers."""

    name: ClassVar[str]
    """The prefix of references, as in "runpod:handler.py"."""
    title: ClassVar[str]
    """The platform's name in messages."""
    resolver: ClassVar[str]
    """The function that makes the Handler in a worker, as "package.module:name". It is called with the folder, the Entry and
    the function's name, and raises HandlerImportError or HandlerSignatureError."""
    order: ClassVar[int] = 100
    """The dialects try to recognise a handler in ascending order of this number."""
    files: ClassVar[tuple[str, ...]] = ()
    """The files that usually hold the handler, beside handler.py."""
    short_key: ClassVar[str] = ""
    """A key of pilotflame.toml that is short for `handler`: with "asgi", `asgi = "shop.main:app"` means the handler
    "asgi:shop/main.py:app". "" for none."""
    concurrency: ClassVar[int] = 1
    """The invocations that one worker runs at the same time unless the settings say otherwise."""
    message: ClassVar[str] = ""
    """What a message of an event source must be, in words for the deployer; "" if it may be any input of a call."""
    stands_in: ClassVar[frozenset[str]] = frozenset()
    """The packages that need not be installed, because the dialect has stand-ins for them."""

    def claims(self, name: str, source: SourceFile) -> bool:
        """Return True if `name`, which a reference gives, is a handler of this platform in the file that `source`
        describes.
        """
        return False

    def find(self, file: str, source: SourceFile) -> str | None:
        """Return the name of the handler that a file shows, which may be ""; None if it shows no handler of this platform."""
        return None

    def default_name(self, source: SourceFile | None) -> str:
        """Return the handler's name if a reference gives only the file. `source` is None if the file cannot be read."""
        return ""

    def configured(self, folder: Path) -> Entry | None:
        """Return the handler that the platform's own file names, such as cog.yaml; None without such a file."""
        return None

    def requirements(self, folder: Path) -> Requirements:
        """Return the function's needs, which the platform's own file declares. Raise SettingsError if the file is
        malformed.
        """
        return Requirements()
