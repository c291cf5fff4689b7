"""Keeps the code that torch.compile, Triton and CUDA compile for a function, so that later processes can load it.

    <state dir>/compiled/<function>/<key>/inductor/ triton/ cuda/ vllm/

Each compiler has its own keys for compiled code. The key of the folder covers the facts that those keys leave out. For
example, inductor compiles for the processor that it runs on, but its keys do not name this processor. The zygote
prepares the folder with the rights of the function. If the base has imported torch, the zygote prepares the folder before
it runs any of the function's code, else after it has imported the handler.

A zygote and its workers hold a shared lock on their folder. A process removes something from a folder only while it
holds the exclusive lock.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from ....snapshot.caching.flock import lock_folder, try_lock
from ..link.worker_spec import CompiledCode

# The variables that set the compilers' folders, and the names of the folders.
FOLDERS = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "VLLM_CACHE_ROOT": "vllm",
}
# Keep this many folders of other keys beside the folder in use, because a rollback uses the older folder again.
KEPT_OTHERS = 1
# Inductor makes a folder with this ending beside a library or header while a compiler writes the file.
_UNFINISHED = "_CxxBuild"
_LIBRARIES = (".so", ".o", ".gch")
# /proc/cpuinfo has one block of lines for each processor. The first block is enough, and fits into this number of bytes.
_CPUINFO, _CPUINFO_BYTES = Path("/proc/cpuinfo"), 8192
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "Features")
_NVIDIA = Path("/proc/driver/nvidia")
# The file in each folder that holds the id of the machine's boot in which the folder was used last.
_BOOT, _BOOT_ID = "boot", Path("/proc/sys/kernel/random/boot_id")
# The longest time for which written data may be in memory only. By default, the kernel looks every 5 s for data that is
# older than 30 s, and writes it to the disk.
WRITTEN_BACK_S = 120.0


def keep_compiled_code(kept: CompiledCode) -> dict[str, str]:
    """Prepare the folder of this process's key, and return the environment variables that make compilers use it.

    If the folder is new, remove the folders of older keys, except KEPT_OTHERS and the folders in use. If no other process
    uses the folder, empty it if it is larger than the limit, or if a crash of the machine may have damaged it. Return no
    variables if the folder cannot be used.
    """
    folder = kept.folder / _key(kept)
    try:
        if not folder.is_dir():
            _make(folder)
        _take(folder, kept.limit_bytes)
        # Set the folder's time to its last use. `_on_disk` and `_remove_others` read this time in later processes.
        os.utime(folder)
    except OSError as error:
        sys.stderr.write(f"compiled code is not kept: {error}\n")
        return {}
    return {variable: str(folder / name) for variable, name in FOLDERS.items()}


def note_end(kept: CompiledCode) -> None:
    """At the end of a process, set its folder's time, so that `_on_disk` knows that the machine still ran then."""
    with contextlib.suppress(OSError):
        os.utime(kept.folder / _key(kept))


def prepare() -> None:
    """Compute cached facts in a base, so that its zygotes inherit them."""
    platform()
    _boot()


@functools.cache
def platform() -> str:
    """Return a digest of the facts about this interpreter and machine that compiled code depends on."""
    facts = (sys.version, *os.uname()[4:], _libc(), *_packages(), *_processor(), *_gpus())
    return hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]


def _key(kept: CompiledCode) -> str:
    return f"{kept.code}-{platform()}"


def _libc() -> str:
    with contextlib.suppress(OSError, ValueError):
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    return ""


def _packages() -> Iterator[str]:
    """Yield digests of the version files of torch, Triton and vLLM. Importing the packages would take seconds."""
    for package, file in (("torch", "version.py"), ("triton", "__init__.py"), ("vllm", "_version.py")):
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            with contextlib.suppress(OSError):
                yield hashlib.sha256(Path(folder, file).read_bytes()).hexdigest()


def _processor() -> Iterator[str]:
    with contextlib.suppress(OSError), _CPUINFO.open("rb", buffering=0) as file:
        for line in file.read(_CPUINFO_BYTES).decode(errors="replace").partition("\n\n")[0].splitlines():
            if line.partition(":")[0].strip() in _CPU_FIELDS:
                yield line


def _gpus() -> Iterator[str]:
    """Yield the versions of NVIDIA's driver and the names of the GPUs."""
    # A machine without GPUs has no such files.
    with contextlib.suppress(OSError):
        yield (_NVIDIA / "version").read_text()
        facts = [
            line for file in _NVIDIA.glob("gpus/*/information") for line in file.read_text().splitlines()
        ]
        yield from sorted({line for line in facts if line.startswith("Model:")})


def _make(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    (folder / _BOOT).write_text(_boot())
    _remove_others(folder)


def _take(folder: Path, limit_bytes: int) -> None:
    """Lock the folder for this process and its forks. If no other process uses the folder, clean it first."""
    if (descriptor := lock_folder(folder, exclusive=True)) is None:
        lock_folder(folder, exclusive=False)
    else:
        size, written_s = _mended(folder)
        if size > limit_bytes or not _on_disk(folder, written_s):
            for name in FOLDERS.values():
                shutil.rmtree(folder / name, ignore_errors=True)
        try_lock(descriptor, exclusive=False)
    # Leave the descriptor open, so that the lock lasts until this process and its forks have ended.


def _on_disk(folder: Path, written_s: float) -> bool:
    """Return False if the machine may have crashed before the last written files were on its disk.

    Compilers do not wait for the disk, and a damaged file makes inductor fail, or kills the worker. Also record that the
    folder is used in this boot of the machine.
    """
    file = folder / _BOOT
    with contextlib.suppress(FileNotFoundError):
        if file.read_bytes() == _boot().encode():
            return True
    ended_s = folder.stat().st_mtime
    file.write_text(_boot())
    return written_s < ended_s - WRITTEN_BACK_S


@functools.cache
def _boot() -> str:
    with contextlib.suppress(OSError):
        return _BOOT_ID.read_text().strip()
    return ""


def _mended(folder: Path) -> tuple[int, float]:
    """Remove the libraries that a compiler has left unfinished, because inductor would load them, and fail.

    Other files are never unfinished: compilers write them under another name, and then rename them. Return the bytes of
    disk in use, and the time of the last write.
    """
    size, written_s = 0, 0.0
    for entry in (entry for name in FOLDERS.values() for entry in _entries(folder / name)):
        found = entry.stat(follow_symlinks=False)
        size += found.st_blocks * 512
        # Readers also change the times of folders and of empty lock files, so these times do not count.
        if found.st_size and entry.is_file(follow_symlinks=False):
            written_s = max(written_s, found.st_mtime)
        if entry.name.endswith(_UNFINISHED):
            for ending in _LIBRARIES:
                Path(f"{entry.path.removesuffix(_UNFINISHED)}{ending}").unlink(missing_ok=True)
    return size, written_s


def _entries(folder: Path | str) -> Iterator[os.DirEntry[str]]:
    """Yield all files and folders below a folder. In each folder, the files come first."""
    try:
        with os.scandir(folder) as found:
            entries = sorted(found, key=lambda entry: entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        # Nothing was compiled. The compilers make their folders themselves.
        return
    for entry in entries:
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)


def _remove_others(folder: Path) -> None:
    """Remove the unused folders of other keys, except the KEPT_OTHERS that were used last."""
    others = sorted((path for path in folder.parent.iterdir() if path != folder), key=_last_used_s)
    # A name with a dot in front marks a folder whose removal was interrupted.
    interrupted = [path for path in others if path.name.startswith(".")]
    whole = [path for path in others if path not in interrupted]
    for other in (*interrupted, *whole[:-KEPT_OTHERS]):
        if (descriptor := lock_folder(other, exclusive=True)) is not None:
            try:
                # Rename the folder first, so that a process that needs the folder makes a new one.
                gone = other.rename(other.with_name(f".{secrets.token_hex(8)}"))
                shutil.rmtree(gone, ignore_errors=True)
            finally:
                os.close(descriptor)


def _last_used_s(folder: Path) -> float:
    try:
        return folder.stat().st_mtime
    except FileNotFoundError:
        # Another zygote of this function has just removed it.
        return 0.0
