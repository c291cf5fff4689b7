"""Recognises the dialect of a folder's handler by reading the folder's files, without running them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..entry_points import DIALECTS, load
from ..errors import HandlerSignatureError
from .dialect import DEFAULT, OWN, OWN_NAME, Dialect, Entry, Requirements, parse_reference
from .source_file import SourceFile

MAX_SOURCES = 200
MAX_SEARCHED_BYTES = 1 << 20
"""The most bytes of source that are searched for foreign handlers in each group of files: the usual ones, the other ones,
and those in `src`.
"""


@functools.cache
def installed_dialects() -> Dialects:
    """Return the dialects of all installed packages."""
    return Dialects(load(DIALECTS).values())


class Dialects:
    """The dialects that are recognised."""

    def __init__(self, dialects: Iterable[Dialect]) -> None:
        self._all = sorted(dialects, key=lambda one: (one.order, one.name))
        self._by_name = {one.name: one for one in self._all}
        usual = dict.fromkeys(file for one in self._all for file in one.files)
        # These files are read first, in this order. Then all other Python files in the folder are read, and then the
        # Python files in `src`.
        self._usual = (*usual, "main.py")

    def find(self, name: str) -> Dialect | None:
        """Return the dialect of this name; None for pilotflame's own handlers."""
        return self._by_name.get(name)

    @property
    def short_keys(self) -> dict[str, str]:
        """The keys of pilotflame.toml that are short for `handler`, with the names of their dialects."""
        return {one.short_key: one.name for one in self._all if one.short_key}

    def concurrency(self, folder: Path, reference: str) -> int:
        """Return the concurrency of a function whose settings do not set it."""
        dialect = self.find(self.recognise(folder, reference).dialect)
        return 1 if dialect is None else dialect.concurrency

    def message(self, folder: Path, reference: str) -> str:
        """Return what a message of an event source of the function must be, in words; "" for any input."""
        dialect = self.find(self.recognise(folder, reference).dialect)
        return "" if dialect is None else dialect.message

    @property
    def stands_in(self) -> frozenset[str]:
        """The packages for which a dialect has stand-ins."""
        return frozenset[str]().union(*(one.stands_in for one in self._all))

    def requirements(self, folder: Path, reference: str) -> Requirements:
        """Return the needs of the function, as a file of the handler's platform declares them."""
        dialect = self.find(self.recognise(folder, reference).dialect)
        return Requirements() if dialect is None else dialect.requirements(folder)

    def resolver(self, entry: Entry) -> str:
        """Return the `Dialect.resolver` of an entry; "" for pilotflame's own handlers."""
        dialect = self.find(entry.dialect)
        return "" if dialect is None else dialect.resolver

    def recognise(self, root: Path, reference: str = DEFAULT) -> Entry:
        """Return the entry of the handler that `reference` names in the folder `root`.

        If the reference names no dialect, the contents of its file decide. If the reference is the default, and
        handler.py shows no handler or does not exist, the other files of the folder are searched for foreign handlers.
        If no foreign handler is found, the dialect is pilotflame's own. Raise HandlerSignatureError if several files
        have a foreign handler, or if no installed dialect has the name in the reference.
        """
        wanted = parse_reference(reference)
        source = SourceFile.read(root / wanted.file)
        if wanted.dialect:
            return wanted._replace(name=wanted.name or self._default_name(wanted.dialect, source))
        found = self._entry_in(wanted.file, wanted.name, source)
        # True if handler.py may define a handler that reading it does not show. Then no other file is searched:
        # importing handler.py finds the handler, or reports the fault.
        opaque = (root / DEFAULT).is_file() and (source is None or "*" in source.imported)
        if found is None and reference == DEFAULT and not opaque:
            found = self._configured(root) or self._search(root)
        return found or Entry(OWN, wanted.file, wanted.name or OWN_NAME)

    def _default_name(self, dialect: str, source: SourceFile | None) -> str:
        if dialect == OWN:
            return OWN_NAME
        if (found := self.find(dialect)) is None:
            known = ", ".join([OWN, *self._by_name])
            remedy = f"The dialects are {known}; others are in packages to install. A file has its ending, as in app.py:name."
            raise HandlerSignatureError(f"No dialect is called {dialect!r}.", remedy=remedy)
        return found.default_name(source)

    def _entry_in(self, file: str, name: str, source: SourceFile | None) -> Entry | None:
        """Return the handler that a file shows, or None. `name` is the handler's name, or "" if the reference gives no
        name.
        """
        if source is None:
            return None
        if name:
            dialect = next((one.name for one in self._all if one.claims(name, source)), OWN)
            return Entry(dialect, file, name)
        for one in self._all:
            if (found := one.find(file, source)) is not None:
                return Entry(one.name, file, found)
        return Entry(OWN, file, OWN_NAME) if OWN_NAME in source.arity else None

    def _configured(self, root: Path) -> Entry | None:
        entries = (one.configured(root) for one in self._all)
        return next((entry for entry in entries if entry is not None), None)

    def _search(self, root: Path) -> Entry | None:
        usual = [name for name in self._usual if (root / name).is_file()]
        others = [name for name in _python_files(root, "") if name not in (*usual, DEFAULT)]
        for names in (usual, others, _python_files(root, "src/")):
            found = list(self._foreign(root, names))
            if len(found) > 1 and names is not usual:
                fault = f"Several files could be the handler: {', '.join(entry.file for entry in found)}."
                remedy = f'Name one in pilotflame.toml, as `handler = "{found[0].reference}"`.'
                raise HandlerSignatureError(fault, remedy=remedy)
            if found:
                return found[0]
        return None

    def _foreign(self, root: Path, names: Iterable[str]) -> Iterator[Entry]:
        left_bytes = MAX_SEARCHED_BYTES
        for name in names:
            if (size := (root / name).stat().st_size) > left_bytes:
                continue
            left_bytes -= size
            entry = self._entry_in(name, "", SourceFile.read(root / name))
            if entry is not None and entry.dialect != OWN:
                yield entry


def _python_files(root: Path, folder: str) -> list[str]:
    found = sorted(path.name for path in (root / folder).glob("*.py"))
    return [folder + name for name in found[:MAX_SOURCES]]
