"""Puts the parts of a snapshot that a revision needs into the revision's folder:
manifest, signature, assets, and versions of local shards.

If the gateway requires signatures, this module checks them, at a deploy and for stored revisions.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from ....errors import SignatureInvalid, SnapshotChanged, SnapshotCorrupt, SnapshotError, SourceError
from ....snapshot.handle import subject_of
from ...ground.access.deploy_policy import DeployPolicies
from ...ground.settings.function_settings import SnapshotPart
from .environment import WriteLine

if TYPE_CHECKING:
    from ....snapshot.format.manifest import Manifest
    from ....snapshot.sources.source import ReportProgress, Source

MANIFEST_FILE = "manifest.json"
# Holds the files of a snapshot that are not weights, such as config and tokenizer. For a local snapshot, it also has
# links to the weights and to the other files beside the weights.
ASSETS_FOLDER = "assets"
# Has the versions of local shards whose bytes a deploy has compared with the manifest, by the names of the shards.
VERSIONS_FILE = "versions.json"
# Holds a folder for each named snapshot, with its manifest and assets. The manifest and the assets of a single unnamed
# snapshot are in the revision's folder itself.
SNAPSHOTS_FOLDER = "snapshots"
# Has the state of a local snapshot's files when they were last compared with signed digests.
COMPARED_FILE = "compared"
DESCRIBE_S = 300.0
"""A deploy reads the manifest and the assets of a remote snapshot for at most this time, because it holds a thread."""

# The functions below import parts of the snapshot engine only when they are called, so that deploys without weights do
# not wait for these imports.


@dataclass(frozen=True, slots=True)
class SourceRules:
    """The secrets of a function, and the policies of the key that deploys it. Both decide how the function's snapshots
    are fetched.
    """

    secrets: Mapping[str, str]
    policies: DeployPolicies
    key_id: str


def describe_local(
    snapshot: Path,
    folder: Path,
    part: SnapshotPart,
    log: WriteLine,
    rules: SourceRules,
    *,
    earlier: Path | None,
    stored: bool,
) -> None:
    """Write a manifest of the weights into `folder`: the manifest beside the weights, if there is one, or else a new
    manifest. Also write the versions of the weights that were compared with the manifest. Unless the weights are
    `stored` with the revision, also write copies of the assets.

    `earlier` is the folder of the same snapshot in the live revision. A file that was compared for the live revision,
    and has not changed since, is not read again. Raise SignatureInvalid if a signature is required and missing, and
    SnapshotCorrupt if the manifest describes another file.
    """
    from ....snapshot.fetching.assets import fetch_assets  # noqa: PLC0415
    from ....snapshot.format.compared import file_version  # noqa: PLC0415
    from ....snapshot.format.create import create  # noqa: PLC0415
    from ....snapshot.format.layout import SUFFIX  # noqa: PLC0415
    from ....snapshot.format.manifest import MANIFEST_NAME, read_manifest  # noqa: PLC0415
    from ....snapshot.sources.folder import FolderSource  # noqa: PLC0415

    root = _root_of(snapshot)
    source = FolderSource(root)
    found = read_manifest(source) if (root / MANIFEST_NAME).is_file() else None
    _keep_signature(source, found, folder, log, rules)
    if found is None:
        log(f"making a manifest of {snapshot}")
        # `create` reads these versions of the files, or later ones. Files with a later version are compared below.
        versions = {
            file.name: file_version(file.stat()) for file in root.glob(f"*{SUFFIX}") if file.is_file()
        }
        manifest = _needed(create(snapshot), part, log)
    else:
        manifest = _needed(found, part, log)
        versions = _compared_earlier((found, manifest), earlier)
    manifest.write(folder / MANIFEST_FILE)
    remedy = f"Make the manifest again: pilotflame snapshot create {root}" if found else "Deploy again."
    _write_versions(root, manifest, versions, folder, remedy)
    if not stored:
        (folder / ASSETS_FOLDER).mkdir()
        fetch_assets(manifest, source, folder / ASSETS_FOLDER)
        _link_rest(root, folder / ASSETS_FOLDER)
    _enlarge_pages(root, manifest)


def _write_versions(
    root: Path, manifest: Manifest, versions: Mapping[str, str], folder: Path, remedy: str
) -> None:
    """Compare the shards whose versions are not in `versions`, and write the versions of all shards into `folder`."""
    from ....snapshot.format.compared import ComparedShards  # noqa: PLC0415

    shards = ComparedShards(root, manifest, versions)
    try:
        shards.check()
    except SnapshotChanged as error:
        raise SnapshotCorrupt(error.message, remedy=remedy, details=error.details) from error
    known = {name: version for name, version in shards.versions.items() if version}
    (folder / VERSIONS_FILE).write_bytes(orjson.dumps(known))


def compare_received(snapshot: Path, folder: Path) -> None:
    """Compare the weights in a revision's code, which came from another gateway, with the manifest in `folder`. Write
    the versions of the weights into `folder`.

    Raise SnapshotCorrupt if they differ.
    """
    from ....snapshot.format.manifest import Manifest  # noqa: PLC0415

    root, manifest = _root_of(snapshot), Manifest.read(folder / MANIFEST_FILE)
    _write_versions(root, manifest, {}, folder, "Deploy again.")
    _enlarge_pages(root, manifest)


def _compared_earlier(manifests: Iterable[Manifest], folder: Path | None) -> dict[str, str]:
    """Return the versions of the shards that were compared for the revision in `folder`, if its manifest is one of
    `manifests`; otherwise return nothing.
    """
    from ....snapshot.format.manifest import Manifest  # noqa: PLC0415

    with contextlib.suppress(OSError, SnapshotError):
        # Use the versions only if the manifests are equal. If the live revision needs only another part of the
        # snapshot, its manifest differs, because only the bytes of that part were compared.
        if folder is not None:
            earlier = Manifest.read(folder / MANIFEST_FILE).digest
            if any(earlier == manifest.digest for manifest in manifests):
                return read_versions(folder)
    return {}


def read_versions(folder: Path) -> dict[str, str]:
    """Return the versions of local shards in a revision's folder. A revision of an earlier release has none: then each zygote
    reads the weights and compares them with the manifest.
    """
    try:
        found = orjson.loads((folder / VERSIONS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    right = isinstance(found, dict) and all(isinstance(one, str) for one in found.values())
    return found if right else {}


def _link_rest(root: Path, folder: Path) -> None:
    """Make a link in `folder` to each file and folder of `root` that `folder` lacks. A subfolder that contains assets
    already exists in `folder`, so make links in it.
    """
    for path in root.iterdir():
        here = folder / path.name
        if here.is_dir():
            _link_rest(path, here)
        elif not here.exists():
            here.symlink_to(path.absolute())


def describe_remote(url: str, folder: Path, part: SnapshotPart, log: WriteLine, rules: SourceRules) -> str:
    """Fetch a remote snapshot's manifest and assets into `folder`. The zygote needs them before the weights.

    Return the URL from which the revision's weights are fetched. If `url` names a branch, the returned URL names the
    branch's present commit. Raise SignatureInvalid if a signature is required and missing, and SourceError if a web
    server needs more than DESCRIBE_S.
    """
    from ....snapshot.fetching.assets import fetch_assets  # noqa: PLC0415
    from ....snapshot.format.discover import find_manifest  # noqa: PLC0415
    from ....snapshot.sources.locate import open_source, weights_file  # noqa: PLC0415
    from ....snapshot.sources.location import shown  # noqa: PLC0415
    from ....snapshot.sources.realm import realm_of  # noqa: PLC0415
    from ....snapshot.sources.source import Pinnable  # noqa: PLC0415

    log(f"reading the manifest of {shown(url)}")
    secrets = rules.secrets
    access = replace(rules.policies.access(url, rules.key_id), until_s=time.monotonic() + DESCRIBE_S)
    source, file = open_source(url, secrets, access), weights_file(url)
    if isinstance(source, Pinnable):
        url = source.pinned()
        source = open_source(url, secrets, access)
        log(f"the weights come from {url}")
    manifest = find_manifest(source, file)
    _keep_signature(source, manifest, folder, log, rules)
    if manifest.observed is not None:
        log(f"{shown(url)} has no manifest: the first fetch makes one")
    needed = _needed(manifest, part, log).with_realm(realm_of(url, secrets, access))
    needed.write(folder / MANIFEST_FILE)
    (folder / ASSETS_FOLDER).mkdir()
    fetch_assets(manifest, source, folder / ASSETS_FOLDER)
    return url


def folder_of(revision: Path, name: str) -> Path:
    """Return the folder of a revision that holds the manifest and the assets of a snapshot."""
    return revision / SNAPSHOTS_FOLDER / name if name else revision


def check_signatures(
    revision: Path, places: Mapping[str, str | Path], signers: Sequence[str], progress: ReportProgress | None
) -> bool:
    """Check that one of `signers` has signed each snapshot of a stored revision, whose folder is `revision`.

    `places` maps the names of the snapshots to URLs and paths. A fetch compares the weights at a URL. Other weights are
    compared here, except if they have not changed since they were compared for any revision of the function. If
    `progress` is None, no weights are read, and the result is False if some weights should be read. Raise
    SignatureInvalid, SnapshotCorrupt or another SnapshotError.
    """
    complete = True
    for name, place in places.items():
        try:
            complete &= _check_signed(revision, name, place, signers, progress)
        except SnapshotError as error:
            raise error.about(subject_of(name)) from error
    return complete


def _check_signed(
    revision: Path, name: str, place: str | Path, signers: Sequence[str], progress: ReportProgress | None
) -> bool:
    from ....snapshot.format.discover import find_signature  # noqa: PLC0415
    from ....snapshot.format.manifest import Manifest  # noqa: PLC0415
    from ....snapshot.format.signature import check_signature  # noqa: PLC0415
    from ....snapshot.sources.folder import FolderSource  # noqa: PLC0415
    from ....snapshot.sources.location import shown  # noqa: PLC0415

    folder = folder_of(revision, name)
    manifest = Manifest.read(folder / MANIFEST_FILE)
    text = find_signature(FolderSource(folder), manifest)
    check_signature(manifest, text, signers, shown(str(place)))
    if isinstance(place, str):
        return True
    try:
        earlier = revision.parent.glob(str(folder_of(Path("*"), name) / COMPARED_FILE))
        state = _compare(_root_of(place), manifest, _compared(earlier), progress)
    except OSError as error:
        fault = f"{place} cannot be checked: {error.strerror}."
        raise SnapshotError(fault, remedy="Check the rights of this folder.") from error
    # Ignore a failure, for example because the disk is full. The next check then reads the weights again.
    with contextlib.suppress(OSError):
        (folder / COMPARED_FILE).write_text(state)
    return bool(state)


def _compared(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        # Old revisions can be removed meanwhile.
        with contextlib.suppress(OSError):
            yield file.read_text()


def _compare(root: Path, manifest: Manifest, compared: Iterable[str], progress: ReportProgress | None) -> str:
    """Compare the weights in `root` with their signed manifest, and return the state of the files.

    Weights whose state is in `compared` are not read. If `progress` is None, return "" instead of reading weights.
    """
    from ....snapshot.format.verify import verify  # noqa: PLC0415

    _refuse_unsigned(root, manifest)
    state = _state_of(root, manifest)
    if state in compared:
        return state
    if progress is None:
        return ""
    verify(root, manifest, progress)
    if _state_of(root, manifest) != state:
        raise SnapshotChanged(f"{root} was written to while it was compared.", remedy="Try again.")
    return state


def _state_of(root: Path, manifest: Manifest) -> str:
    """Return a digest of the manifest and of its files' inodes, sizes and times. A write to a file changes it."""
    from ....snapshot.sources.folder import FolderSource  # noqa: PLC0415

    source, state = FolderSource(root), hashlib.sha256(manifest.digest.encode())
    for file in manifest.files:
        descriptor = source.open(file.name)
        try:
            found = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        facts = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        state.update(repr(facts).encode())
    return state.hexdigest()


def _refuse_unsigned(root: Path, manifest: Manifest) -> None:
    """Raise SignatureInvalid if `root` has a file that would be an asset, and the signed manifest does not name it."""
    from ....snapshot.format.layout import is_asset  # noqa: PLC0415
    from ....snapshot.format.manifest import MAX_ASSET_BYTES  # noqa: PLC0415
    from ....snapshot.sources.folder import FolderSource  # noqa: PLC0415

    source, named = FolderSource(root), {file.name for file in manifest.files}
    for name in source.names():
        if name not in named and is_asset(name) and source.stat(name).size_bytes <= MAX_ASSET_BYTES:
            fault = f"{root} has the file {name}, which the signed manifest does not name."
            remedy = "Take the file away. Or make the manifest again, and sign it."
            raise SignatureInvalid(fault, remedy=remedy)


def _keep_signature(
    source: Source, manifest: Manifest | None, folder: Path, log: WriteLine, rules: SourceRules
) -> None:
    """Copy the signature that is beside the manifest at `source` into `folder`, if there is a signature. Check the
    signature if signatures are required.
    """
    from ....snapshot.format.discover import find_signature  # noqa: PLC0415
    from ....snapshot.format.manifest import SIGNATURE_NAME  # noqa: PLC0415
    from ....snapshot.format.signature import check_signature  # noqa: PLC0415
    from ....snapshot.sources.folder import FolderSource  # noqa: PLC0415
    from ....snapshot.sources.location import shown  # noqa: PLC0415

    signers, text = rules.policies.snapshot_signers, None
    try:
        text = find_signature(source, manifest)
    except SourceError as error:
        if signers:
            raise
        log(f"the signature was not copied: {error.message}")
    if signers:
        check_signature(manifest, text, signers, shown(source.url))
    if text is not None:
        FolderSource(folder).put(SIGNATURE_NAME, text)


def _root_of(snapshot: Path) -> Path:
    """Return the folder of the weights. `snapshot` is the folder or a file in it."""
    return snapshot if snapshot.is_dir() else snapshot.parent


def _enlarge_pages(root: Path, manifest: Manifest) -> None:
    """Read the weights into large pages of the page cache, so that workers map them in a fraction of the time."""
    from ....snapshot.caching.memory import enlarge_cached_pages  # noqa: PLC0415

    # A failure is ignored: workers can map small pages too, and if a file cannot be read, the first worker reports
    # this.
    with contextlib.suppress(OSError, SnapshotError):
        enlarge_cached_pages(root, manifest)


def _needed(manifest: Manifest, part: SnapshotPart, log: WriteLine) -> Manifest:
    """Return the manifest of the part of the snapshot that the function needs."""
    if not part.tensors and not part.slices:
        return manifest
    from ....snapshot.format.slices import part_of  # noqa: PLC0415

    needed = part_of(manifest, part.tensors, part.slices)
    log(f"of {manifest.total_bytes:,} bytes of weights, {needed.needed_bytes:,} are needed")
    return needed
