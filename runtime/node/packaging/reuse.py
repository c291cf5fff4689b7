"""Lets an upload reuse files of the function's live revision, so that a client sends changed files only.

The client names each file by its digest. A client that knows a digest has no right to the bytes. So files are copied
from only one folder: the code of the live revision of a function that the caller may deploy. The function can write to
this folder, so each file is hashed while it is copied, and no link is followed.
"""

from __future__ import annotations

import hashlib
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, NamedTuple, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from ....errors import BadInput, BaseChanged, CodeError
from ....foreign_json import excess, first_errors
from .archive import checked_path
from .code import KEPT_FILE, MAX_FILES

BUFFER_BYTES = 1 << 20
_FULL_REMEDY = "Upload the whole folder."


class ReusedRevision(NamedTuple):
    """The live revision whose files an upload reuses."""

    function: str
    revision: str

    @classmethod
    def parse(cls, text: str) -> ReusedRevision:
        function, slash, revision = text.partition("/")
        if not slash:
            raise BadInput(f"base={text[:80]!r} is not FUNCTION/REVISION.", remedy=_FULL_REMEDY)
        return cls(function, revision)


class CodeFileDigest(BaseModel, frozen=True, extra="forbid"):
    """A file of a function's code as its client has it."""

    path: str = Field(pattern="^[^\0]+$")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    executable: bool = False


class FileDigests(BaseModel, frozen=True, extra="forbid"):
    """The files of a function's code."""

    files: tuple[CodeFileDigest, ...] = Field(max_length=MAX_FILES)

    @model_validator(mode="after")
    def _each_once(self) -> Self:
        if len({file.path for file in self.files}) < len(self.files):
            raise ValueError("a path is there twice")
        return self


def lacking(code: Path, wanted: FileDigests, gone: threading.Event | None = None) -> list[str]:
    """Return the paths of the wanted files that the folder `code` lacks, or has with other content. Blocks.

    If `gone` is set, the caller has gone: stop, and count the other files as lacking.
    """
    gone = gone or threading.Event()
    return [file.path for file in wanted.files if not _has(code, file, gone)]


def take(code: Path, staged: Path) -> None:
    """Copy files from `code` into the unpacked upload `staged`, whose KEPT_FILE lists them. Blocks.

    Raise BaseChanged if `code` lacks a listed file, and CodeError if the list cannot be used.
    """
    for file in _listed(staged).files:
        name = checked_path(file.path, KEPT_FILE)
        path = staged / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() or Path(os.path.realpath(path.parent)) != path.parent:
            raise CodeError(f"{file.path!r:.200} is kept and uploaded too.", remedy=_FULL_REMEDY)
        try:
            with _opened(code, name) as source, path.open("xb") as target:
                same = _hash(source, target) == file.sha256
        except OSError:
            same = False
        if not same:
            message = f"The live revision does not have {file.path!r:.200} with this content."
            raise BaseChanged(message, remedy=_FULL_REMEDY)
        path.chmod(0o755 if file.executable else 0o644)


def _listed(staged: Path) -> FileDigests:
    listed = staged / KEPT_FILE
    try:
        text = listed.read_bytes()
        if why := excess(text):
            raise _invalid(f"it has {why}")
        found = FileDigests.model_validate_json(text)
    except OSError as error:
        raise _invalid(error) from None
    except ValidationError as error:
        raise _invalid(first_errors(error, 1)[0]["msg"]) from None
    listed.unlink()
    return found


def _invalid(why: object) -> CodeError:
    return CodeError(f"The upload has no valid {KEPT_FILE}: {why}.", remedy=_FULL_REMEDY)


def _has(code: Path, file: CodeFileDigest, gone: threading.Event) -> bool:
    try:
        with _opened(code, checked_path(file.path, file.path)) as source:
            return _hash(source, gone=gone) == file.sha256
    except OSError:
        return False


def _hash(source: IO[bytes], target: IO[bytes] | None = None, gone: threading.Event | None = None) -> str:
    """Return the SHA-256 of a file. If `target` is given, also copy the file to `target`. Stop once `gone` is set, and
    return the SHA-256 of the part that was read.
    """
    digest = hashlib.sha256()
    while (gone is None or not gone.is_set()) and (data := source.read(BUFFER_BYTES)):
        digest.update(data)
        if target is not None:
            target.write(data)
    return digest.hexdigest()


@contextmanager
def _opened(folder: Path, path: str) -> Iterator[IO[bytes]]:
    """Open a regular file in `folder`. Follow no link. Raise OSError if that is not possible."""
    with ExitStack() as stack:

        def enter(name: str, flags: int, within: int | None) -> int:
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, dir_fd=within)
            stack.callback(os.close, descriptor)
            return descriptor

        *above, name = path.split("/")
        place = enter(str(folder), os.O_DIRECTORY, None)
        for part in above:
            place = enter(part, os.O_DIRECTORY, place)
        descriptor = enter(name, 0, place)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(name)
        yield stack.enter_context(os.fdopen(os.dup(descriptor), "rb"))
