"""Preparing a deploy: from a folder or an archive to the checked files of a revision. Blocking; starts no process."""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import RequirementsError, SettingsError, SnapshotError
from ...handlers.dialects.recognise import recognise
from ..link.worker_spec import WorkerSpec
from ..settings.event_source import missing_package
from ..settings.function_settings import FunctionSettings, read_settings
from . import code, requirements
from .archive import unpack
from .environment import ensure_environment
from .store import CODE_FOLDER, RevisionFields, RevisionRecord, Store

MANIFEST_FILE = "manifest.json"
# Files beside fetched weights: config, tokenizer.
ASSETS_FOLDER = "assets"
REQUIREMENTS_FILE = "requirements.txt"
# Imports that functions share in a base zygote: they take seconds and many megabytes, and start no threads.
HEAVY = ("numpy", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A request to deploy a folder on this node, or an uploaded archive (tar.gz)."""

    path: Path | None = None
    archive: bytes | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    install: bool = False
    check: bool = True
    authorize: Callable[[str], None] | None = None
    """Called with the function's name; raises if the caller may not deploy it."""


def prepare(
    store: Store, environments: Path, request: Deployment, log: Callable[[str], None]
) -> tuple[Path, RevisionFields]:
    """Copy and check the code. Return its staged folder, and the fields of its record."""
    staged = store.stage()
    staged_code = staged / CODE_FOLDER
    with contextlib.ExitStack() as undo:
        undo.callback(shutil.rmtree, staged, ignore_errors=True)
        folder = _source_folder(request, staged_code)
        settings = read_settings(folder, overrides=request.overrides)
        if request.authorize is not None:
            request.authorize(settings.name)
        if settings.source and (problem := missing_package()):
            raise SettingsError(f"The [[source]] tables of {settings.name!r} cannot be used: {problem}.")
        snapshot = settings.snapshot_path(folder)
        if snapshot is not None and not snapshot.exists():
            raise SnapshotError(
                f"snapshot is {settings.snapshot!r}, and {snapshot} does not exist.",
                remedy="Put the weights there, or set `snapshot` (or --snapshot) to where they are.",
            )
        if request.path is not None:
            code.copy_folder(folder, staged_code, exclude=snapshot)
        environment = _environment(staged_code, environments, request, log)
        fields = _fields(staged, settings, snapshot, environment, log)
        undo.pop_all()
    return staged, fields


def _fields(
    staged: Path,
    settings: FunctionSettings,
    snapshot: Path | None,
    environment: tuple[Path, str],
    log: Callable[[str], None],
) -> RevisionFields:
    """Put manifest and assets into the staged folder. Return the fields of its record."""
    staged_code = staged / CODE_FOLDER
    if snapshot is not None:
        _write_manifest(snapshot, staged / MANIFEST_FILE, log)
        # Uploaded weights relative to the code, because its folder moves when it is published.
        if snapshot.is_relative_to(uploaded := staged_code.resolve()):
            snapshot = snapshot.relative_to(uploaded)
    if (url := settings.snapshot_url) is not None:
        _fetch_manifest(url, staged, log)
    return RevisionFields(
        code_digest=code.code_digest(staged_code),
        settings=settings,
        snapshot_root=snapshot,
        snapshot_url=url,
        python=environment[0],
        requirements_digest=environment[1],
    )


def worker_spec(store: Store, record: RevisionRecord, cache: Path) -> WorkerSpec:
    """Return what zygotes and workers of a stored revision need; fetched snapshots are in `cache`."""
    settings, folder = record.settings, store.code(record)
    snapshot = folder.parent / ASSETS_FOLDER if record.snapshot_url else record.snapshot_root
    return WorkerSpec(
        function=record.function,
        revision=record.revision,
        code=folder,
        handler=settings.handler,
        python=str(record.python),
        snapshot=folder / snapshot if snapshot is not None else None,
        manifest=folder.parent / MANIFEST_FILE if snapshot is not None else None,
        source=record.snapshot_url or "",
        cache=cache if record.snapshot_url else None,
        concurrency=settings.concurrency,
        threads=settings.threads or fair_threads(settings.scale.max),
        env=settings.env,
        preload=heavy_imports(folder / recognise(folder, settings.handler).file),
    )


def fair_threads(workers: int) -> int:
    """Return the number of threads for each of `workers` workers: each gets the same share of the processors."""
    # More threads than processors are far worse (MiniLM on 2 busy cores: 476 ms a forward with 2 threads, 11 with 1).
    return max(1, len(os.sched_getaffinity(0)) // workers)


def heavy_imports(file: Path) -> tuple[str, ...]:
    """Return which heavy packages a handler's file imports, without running it; none if it does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # The zygote's import reports what is wrong, with the line.
        return ()
    nodes = list(ast.walk(tree))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level]
    found = {name.partition(".")[0] for name in names}
    if "transformers" in found:
        found.add("torch")
    return tuple(name for name in HEAVY if name in found)


def _source_folder(request: Deployment, staged_code: Path) -> Path:
    """Return the folder on this node, or `staged_code` with the archive unpacked in it."""
    if request.archive is not None:
        unpack(request.archive, staged_code)
        return staged_code
    if request.path is None:
        raise SettingsError("The deploy has neither a path nor an archive.", remedy="Send one of them.")
    if not request.path.is_absolute():
        raise SettingsError(f"path is relative: {str(request.path)!r}.", remedy="Give an absolute path.")
    return request.path


def _environment(
    staged_code: Path, environments: Path, request: Deployment, log: Callable[[str], None]
) -> tuple[Path, str]:
    """Return the function's Python and its requirements' digest."""
    file = staged_code / REQUIREMENTS_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    digest = requirements.requirements_digest(text)
    try:
        requirements.check_requirements(text)
    except RequirementsError:
        if not request.install:
            raise
        return ensure_environment(environments, text, log), digest
    # With this interpreter, its zygote shares the base zygote of other functions.
    return Path(sys.executable), digest


def _write_manifest(snapshot: Path, target: Path, log: Callable[[str], None]) -> None:
    """Keep a manifest with the revision: the one beside the weights, or else a new one."""
    # Imported here so that only functions with weights pay for it.
    from ...snapshot.format.create import create  # noqa: PLC0415
    from ...snapshot.format.manifest import MANIFEST_NAME, Manifest  # noqa: PLC0415

    beside = (snapshot if snapshot.is_dir() else snapshot.parent) / MANIFEST_NAME
    if not beside.is_file():
        log(f"making a manifest of {snapshot}")
    manifest = Manifest.read(beside) if beside.is_file() else create(snapshot)
    manifest.write(target)


def _fetch_manifest(url: str, folder: Path, log: Callable[[str], None]) -> None:
    """Fetch a remote snapshot's manifest and assets, which the zygote needs before the weights are here."""
    # Imported here for the same reason as in _write_manifest.
    from ...snapshot.fetching.assets import fetch_assets  # noqa: PLC0415
    from ...snapshot.format.manifest import read_manifest  # noqa: PLC0415
    from ...snapshot.sources.locate import open_source  # noqa: PLC0415
    from ...snapshot.sources.location import shown  # noqa: PLC0415

    log(f"reading the manifest of {shown(url)}")
    source = open_source(url)
    manifest = read_manifest(source)
    manifest.write(folder / MANIFEST_FILE)
    (folder / ASSETS_FOLDER).mkdir()
    fetch_assets(manifest, source, folder / ASSETS_FOLDER)
