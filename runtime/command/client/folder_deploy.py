"""Deploys a folder to a gateway. A gateway that sees the folder gets its path, and any other gateway the files that it lacks."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ....errors import (
    BaseChanged,
    CodeError,
    FolderUnseen,
    HandlerError,
    PilotflameError,
    RequirementsError,
    SettingsError,
    SnapshotError,
    UnknownFunction,
)  # fmt: skip
from ...node.packaging.code import FileDigest, file_digests, identity, pack, select
from . import display, exit_codes
from .client import Client, OnProgress
from .options import FunctionSource

# If the files have at least this total size, the first upload of a command asks the gateway which of them it has. The
# question needs the function's name, and the import that finds the name takes longer than sending fewer bytes.
WORTH_ASKING_BYTES = 1 << 20
SHOWN_CHANGES = 3
# Errors that an edit of the folder may fix.
MENDABLE: tuple[type[PilotflameError], ...] = (
    CodeError, HandlerError, RequirementsError, SettingsError, SnapshotError,
)  # fmt: skip


class FolderDeploy:
    """A folder that is deployed once, or again after each change.

    A gateway on loopback that sees the same folder at this path gets the path. Every other gateway gets the files, for
    example a gateway in a container or behind a forwarded port. With `upload`, every gateway gets the files.
    """

    def __init__(self, client: Client, source: FunctionSource, *, upload: bool, **flags: bool) -> None:
        """Pass `flags`, such as `install`, to `Client.deploy` and `Client.upload`."""
        self._client, self._source, self._flags = client, source, flags
        self._by_path = client.on_loopback and not upload
        self._function = ""
        """The function's name, known after the first deploy."""
        self._files: list[FileDigest] = []
        """The files of the last upload. Empty if the last deploy failed."""

    def run(self, on_progress: OnProgress) -> dict[str, Any]:
        """Deploy the folder and return the function's status. Call `on_progress` with each event of the deploy."""
        try:
            found = self._read_there(on_progress) if self._by_path else None
            if found is None:
                found = self._upload(on_progress)
        except PilotflameError:
            # Forget the files, so that saving a file again counts as a change even if its content is the same.
            self._files = []
            raise
        self._function = found["name"]
        return found

    def has_changed(self) -> bool:
        """Return False if the last deploy has uploaded all files with their present content."""
        with contextlib.suppress(CodeError):
            return self._by_path or self._files != list(file_digests(self._source.folder))
        return True

    def _read_there(self, on_progress: OnProgress) -> dict[str, Any] | None:
        """Let the gateway read the folder. Return None if the gateway does not see the folder."""
        folder = self._source.folder
        try:
            return self._client.deploy(
                folder, self._source.overrides(), seen_as=identity(folder.resolve()), on_progress=on_progress, **self._flags
            )  # fmt: skip
        except FolderUnseen:
            self._by_path = False
            return None

    def _upload(self, on_progress: OnProgress) -> dict[str, Any]:
        on_progress("step", {"name": "upload", "seconds": None})
        base, kept = self._kept()
        try:
            return self._send(base, kept, on_progress)
        except BaseChanged:
            return self._send("", (), on_progress)

    def _send(self, base: str, kept: Sequence[FileDigest], on_progress: OnProgress) -> dict[str, Any]:
        folder, overrides = self._source.folder, self._source.overrides(local=False)
        return self._client.upload(
            pack(folder, kept=kept), overrides, folder=folder.resolve().name, base=base if kept else "",
            on_progress=on_progress, **self._flags,
        )  # fmt: skip

    def _kept(self) -> tuple[str, list[FileDigest]]:
        """Return the live revision, as FUNCTION/REVISION, and the files that this revision already has."""
        self._files = list(file_digests(self._source.folder))
        if not (function := self._function or self._guessed_name()):
            return "", []
        try:
            found = self._client.post("v1", "functions", function, "lacking", body={"files": self._files})
        # Send all files: the function does not exist yet, or the API key has no access to it.
        except UnknownFunction:
            return "", []
        lacking = set(found["lacking"])
        return f"{function}/{found['revision']}", [
            file for file in self._files if file["path"] not in lacking
        ]

    def _guessed_name(self) -> str:
        """Return the name that the gateway will give the function, or "" if the settings are invalid or the files too small to ask."""
        if sum(file.size for file in select(self._source.folder)) < WORTH_ASKING_BYTES:
            return ""
        from ...ground.settings.function_settings import read_settings  # noqa: PLC0415  pydantic takes 0.3 s to import

        # Ignore faults of the settings here, because the gateway reports them.
        with contextlib.suppress(PilotflameError):
            return read_settings(self._source.folder, overrides=self._source.overrides(local=False)).name
        return ""


class Changes:
    """The changes of a folder since this object was made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = queue.SimpleQueue[list[str] | CodeError]()
        # A daemon thread, because it runs until the process ends.
        threading.Thread(target=self._watch, daemon=True).start()

    def next(self) -> list[str]:
        """Wait for the next change, and return the paths of some changed files. Raise CodeError if the watch fails."""
        if isinstance(found := self._found.get(), CodeError):
            raise found
        return found

    def _watch(self) -> None:
        from watchfiles import watch  # noqa: PLC0415  only `deploy --watch` needs it

        try:
            for changed in watch(self._folder, raise_interrupt=False):
                self._found.put(sorted({path for _, path in changed})[:SHOWN_CHANGES])
        # OSError comes from the kernel, RuntimeError from the watcher itself.
        except (OSError, RuntimeError) as error:
            message = f"{self._folder} cannot be watched: {error}."
            self._found.put(CodeError(message, remedy="Check that it still exists."))


def deploy_changes(
    deploy: FolderDeploy, folder: Path, once: Callable[[], None], *, as_json: bool
) -> NoReturn:
    """Call `once` now and after each change of the folder. Print the errors of `once` and go on.

    An edit of the folder can fix only the errors in MENDABLE, and not, for example, a gateway that does not answer. So
    raise any other error of the first call.
    """
    changes, mendable = Changes(folder), MENDABLE
    while True:
        try:
            once()
        except mendable as error:
            exit_codes.say_error(error, as_json=as_json)
        mendable = (PilotflameError,)
        changed = changes.next()
        while not deploy.has_changed():
            changed = changes.next()
        if not as_json:
            display.say(f"changed: {', '.join(changed)}")
