"""A deploy, up to where processes start: from a folder or an archive to a revision's files, checked. Blocking."""

from __future__ import annotations

import ast
import os
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
from .store import RevisionFields, RevisionRecord, Staging, Store

MANIFEST_FILE = "manifest.json"
ASSETS_FOLDER = "assets"  # what lies beside fetched weights: config, tokenizer
REQUIREMENTS_FILE = "requirements.txt"
# Imports worth sharing between functions: seconds of work, many megabytes, and no threads of their own.
HEAVY = ("numpy", "torch", "transformers")


def _anybody_may(_function: str) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Deployment:
    """What somebody wants deployed: a folder on this node, or an uploaded archive (tar.gz)."""

    path: Path | None = None
    archive: bytes | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    install: bool = False
    check: bool = True
    may: Callable[[str], None] = _anybody_may
    """Raises if whoever ordered it may not deploy a function of this name."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """Files in staging, and what is known of them."""

    staging: Staging
    fields: RevisionFields


def prepare(store: Store, environments: Path, order: Deployment, say: Callable[[str], None]) -> Prepared:
    """Copies, checks and describes. Raises CodeError, SettingsError, RequirementsError, SnapshotError."""
    staging = store.stage("upload")
    try:
        folder = _take(order, staging)
        settings = read_settings(folder, overrides=order.overrides)
        order.may(settings.name)
        staging.name = settings.name
        _check_sources(settings)
        snapshot = _snapshot_root(settings, folder)
        if order.path is not None:
            code.copy_folder(folder, staging.code, exclude=snapshot)
        python, digest = _environment(staging.code, environments, order, say)
        if snapshot is not None:
            _write_manifest(snapshot, staging.path / MANIFEST_FILE, say)
        if (url := settings.snapshot_url) is not None:
            _fetch_manifest(url, staging.path, say)
        return Prepared(
            staging,
            RevisionFields(
                code_digest=code.code_digest(staging.code),
                settings=settings,
                snapshot_root=_portable(snapshot, staging.code),
                snapshot_url=url,
                python=python,
                requirements_digest=digest,
            ),
        )
    except BaseException:
        staging.discard()
        raise


def worker_spec(store: Store, record: RevisionRecord, cache: Path) -> WorkerSpec:
    """What zygotes and workers of a stored revision are told; `cache` is where fetched snapshots lie."""
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
    """Threads of each of so many workers: the processors shared out, since threads that wait for each other's processor
    are far worse than few (MiniLM, 2 cores under load: 476 ms a forward with 2 threads, 11 ms with 1)."""
    return max(1, len(os.sched_getaffinity(0)) // workers)


def heavy_imports(file: Path) -> tuple[str, ...]:
    """Which of the heavy packages a handler's file imports, read without running it; none if it does not parse."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return ()  # importing it in the zygote says what is wrong, with the line
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    if "transformers" in found:
        found.add("torch")
    return tuple(name for name in HEAVY if name in found)


def _take(order: Deployment, staging: Staging) -> Path:
    """The folder to read from: the one pointed at, or the archive unpacked in staging."""
    if order.archive is not None:
        unpack(order.archive, staging.code)
        return staging.code
    if order.path is None:
        raise SettingsError("The deploy names neither a path nor an archive.", remedy="Send one of them.")
    if not order.path.is_absolute():
        raise SettingsError(
            f"path is {str(order.path)!r}, which is not absolute.", remedy="Give the whole path."
        )
    return order.path


def _check_sources(settings: FunctionSettings) -> None:
    if settings.source and (problem := missing_package()):
        raise SettingsError(f"The sources of {settings.name!r} cannot be asked: {problem}.")


def _snapshot_root(settings: FunctionSettings, folder: Path) -> Path | None:
    path = settings.snapshot_path(folder)
    if path is not None and not path.exists():
        raise SnapshotError(
            f"snapshot is {settings.snapshot!r}, and {path} does not exist.",
            remedy="Put the weights there, or set `snapshot` (or --snapshot) to where they are.",
        )
    return path


def _portable(snapshot: Path | None, staged_code: Path) -> Path | None:
    """Weights that were uploaded with the code are named relative to it: the folder moves when it is published."""
    if snapshot is not None and snapshot.is_relative_to(staged_code.resolve()):
        return snapshot.relative_to(staged_code.resolve())
    return snapshot


def _environment(folder: Path, root: Path, order: Deployment, say: Callable[[str], None]) -> tuple[Path, str]:
    file = folder / REQUIREMENTS_FILE
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    digest = requirements.requirements_digest(text)
    try:
        requirements.check_requirements(text)
    except RequirementsError:
        if not order.install:
            raise
        return ensure_environment(root, text, say).python, digest
    return Path(sys.executable), digest  # what is here suffices: its zygote shares this environment's base


def _write_manifest(snapshot: Path, target: Path, say: Callable[[str], None]) -> None:
    """The manifest beside the weights if there is one, else a new one, kept with the revision."""
    from ...snapshot.format.create import create  # noqa: PLC0415  only functions with weights pay for it
    from ...snapshot.format.manifest import MANIFEST_NAME, Manifest  # noqa: PLC0415

    beside = (snapshot if snapshot.is_dir() else snapshot.parent) / MANIFEST_NAME
    if beside.is_file():
        manifest = Manifest.read(beside)
    else:
        say(f"making a manifest of {snapshot}")
        manifest = create(snapshot)
    manifest.write(target)


def _fetch_manifest(url: str, folder: Path, say: Callable[[str], None]) -> None:
    """The manifest of a snapshot that lies elsewhere, and its assets: the zygote needs them before there are weights."""
    from ...snapshot.fetching.assets import fetch_assets  # noqa: PLC0415  see _write_manifest
    from ...snapshot.format.manifest import read_manifest  # noqa: PLC0415
    from ...snapshot.sources.locate import open_source  # noqa: PLC0415
    from ...snapshot.sources.location import shown  # noqa: PLC0415

    say(f"reading the manifest of {shown(url)}")
    source = open_source(url)
    manifest = read_manifest(source)
    manifest.write(folder / MANIFEST_FILE)
    (folder / ASSETS_FOLDER).mkdir()
    fetch_assets(manifest, source, folder / ASSETS_FOLDER)
