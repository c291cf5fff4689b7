"""Keeps one copy of weights that several revisions contain, even if several deploys have uploaded them.

    <state dir>/weights/<SHA-256> a file that is hard-linked into the code of each revision that has it; an executable
    file has the ending -x

Weights are the files of a snapshot inside the function's folder, files whose names end as weights usually do (ENDINGS),
and copies of the assets of a snapshot outside that folder. Their names and times do not matter. The digest is computed
from the bytes, never taken from a manifest, so no deploy can obtain a file that it did not contain. A shared file is
read-only, because a change in place would change all revisions that have it. If it has only one hard link, no revision
has it any more.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
from collections.abc import Collection, Iterator
from pathlib import Path

FOLDER = "weights"
"""The name of the folder in the state folder."""
# Smaller files are not shared.
MIN_BYTES = 1 << 20
ENDINGS = frozenset(
    (
        ".bin",
        ".ckpt",
        ".gguf",
        ".h5",
        ".msgpack",
        ".npy",
        ".npz",
        ".onnx",
        ".pt",
        ".pth",
        ".safetensors",
        ".tensors",
    )
)


class SharedWeights:
    """The shared files in `folder`. Its methods are safe to call from several threads and processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def share(self, code: Path, snapshots: Collection[Path]) -> None:
        """Replace the weights in the folder `code`, a staged copy, by hard links to the shared files.

        `snapshots` are the files or folders of the function's snapshots.
        """
        for path in _weights(code, snapshots):
            # OSError: the file system has no hard links, or allows no further hard link to this file. The copy stays.
            with contextlib.suppress(OSError):
                self._share(path)

    def _share(self, path: Path) -> None:
        executable = bool(path.stat().st_mode & stat.S_IXUSR)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        shared = self._folder / (f"{digest}-x" if executable else digest)
        self._folder.mkdir(exist_ok=True, mode=0o700)
        _protect(path)
        try:
            os.link(path, shared)
        except FileExistsError:
            # Make the link under another name, and rename it. So the revision's file exists at every moment.
            link = path.with_name(f".{secrets.token_hex(8)}")
            os.link(shared, link)
            link.replace(path)

    def protect(self) -> None:
        """Make all files read-only. The files of a restored backup are not read-only."""
        with contextlib.suppress(FileNotFoundError):
            for path in self._folder.iterdir():
                _protect(path)

    def discard_unused(self) -> None:
        """Remove the files that no revision has any more."""
        with contextlib.suppress(FileNotFoundError):
            for path in list(self._folder.iterdir()):
                if path.lstat().st_nlink == 1:
                    path.unlink(missing_ok=True)


def _protect(path: Path) -> None:
    path.chmod(0o555 if path.stat().st_mode & stat.S_IXUSR else 0o444)


def _weights(code: Path, snapshots: Collection[Path]) -> Iterator[Path]:
    for path in sorted(code.rglob("*")):
        facts = path.lstat()
        named = path.suffix in ENDINGS or any(path.is_relative_to(snapshot) for snapshot in snapshots)
        if named and stat.S_ISREG(facts.st_mode) and facts.st_size >= MIN_BYTES:
            yield path
