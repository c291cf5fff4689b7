"""Prepares a deploy: makes the checked files of a revision from a folder or an archive.

`Preparation.run` and `worker_spec` read and write files, so they block. They start no process of the function, but
`run` may start uv to install the function's requirements.
"""

from __future__ import annotations

import contextlib
import functools
import math
import shutil
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....errors import BaseChanged, RequirementsError, SettingsError, SnapshotError
from ....handlers.dialect import OWN, Entry, Requirements, parse_reference
from ....handlers.recognise import Dialects
from ....handlers.source_file import SourceFile
from ....machine import processors
from ....snapshot.extras import require
from ....snapshot.handle import subject_of
from ....snapshot.sources.access import Access
from ...calls.link.worker_spec import Weights, WorkerSpec
from ...ground.access.deploy_policy import DeployPolicies
from ...ground.settings.function_settings import (
    FunctionSettings,
    SnapshotPart,
    read_settings,
    setting_of,
    setting_origins,
)
from ..packaging import code, requirements
from ..packaging.archive import unpack
from ..packaging.environment import WriteLine, ensure_environment
from ..packaging.reuse import ReusedRevision, take
from ..packaging.snapshots import (
    ASSETS_FOLDER,
    MANIFEST_FILE,
    SourceRules,
    describe_local,
    describe_remote,
    folder_of,
    read_versions,
)
from .function_folder import CODE_FOLDER
from .progress import DeployProgress
from .revision_record import RevisionFields, RevisionRecord, StoredSnapshot
from .store import Store

REQUIREMENTS_FILE = "requirements.txt"
# Modules that a base zygote imports once for all functions that import the package. The imports take seconds and many
# megabytes. They start no threads, so the base zygote can fork afterwards. `transformers` imports its submodules on first
# use: without this entry, each function's zygote would import the submodules of models for itself.
HEAVY = ("numpy", "torch", "transformers.modeling_utils", "vllm.v1.engine.core")


@dataclass(frozen=True, slots=True)
class Deployment:
    """A request to deploy a function.

    The function's code is the folder `path` on this node, or an uploaded `archive`, which is a tar.gz. `overrides` are
    settings that take precedence over pilotflame.toml. With `install`, the deploy installs requirements that are not
    met. With `check`, it starts a worker and waits until the worker is ready. A `standalone` function runs in a
    container that a platform has started and scales, so its [image] and [resources] do not count.
    """

    path: Path | None = None
    archive: bytes | None = None
    folder_name: str = ""
    """The name of the folder that was packed into `archive`."""
    base: ReusedRevision | None = None
    """The live revision from which the deploy copies the files that `archive` lists but does not contain."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    install: bool = False
    check: bool = True
    standalone: bool = False
    owner: str = ""
    """The id of the API key that deploys the function; "" without a key."""
    deployer: str = ""
    """The name of that key."""
    authorize: Callable[[str], None] | None = None
    """`Preparation` calls this with the function's name. It raises Forbidden if the caller may not deploy that function."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """Makes the checked files of a new revision for one deploy request. `run` blocks."""

    store: Store
    environments: Path
    """The folder of the Python environments."""
    dialects: Dialects
    request: Deployment
    log: WriteLine
    secrets_of: Callable[[str], Mapping[str, str]]
    """Returns the secrets of a function."""
    progress: DeployProgress
    check: Callable[[FunctionSettings, Mapping[str, str]], None]
    """Raises an error if the deploy is refused. `run` calls it before it builds anything, with the settings, and with the URLs and paths of the snapshots outside the code."""
    policies: DeployPolicies
    """Say whether a folder of this machine may be deployed, from where snapshots may be fetched, and which keys sign them."""

    def run(self) -> tuple[Path, RevisionFields]:
        """Copy and check the files of a new revision. Return its staged folder and the fields of its record.

        If an error is raised, the staged folder has been removed.
        """
        request, staged = self.request, self.store.stage()
        code_folder = staged / CODE_FOLDER
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, staged, ignore_errors=True)
            if request.path is not None:
                self.policies.check_path(request.owner)
            with self.progress.step("code"):
                folder = self._source_folder(code_folder)
                settings, needs = self._settings(folder)
                self.check(settings, _outside(settings, folder, uploaded=request.path is None))
                local = _local_snapshots(settings, folder)
                if settings.source and (form := self.dialects.message(folder, settings.handler)):
                    self.progress.note(f"Each message of its sources must be {form}.")
                    self.log(f"Each message of its sources must be {form}.")
                if request.path is not None:
                    code.copy_folder(folder, code_folder, exclude=local.values())
                self.store.weights.share(code_folder, local.values())
            with self.progress.step("packages"):
                python, digest = self._environment(code_folder, settings, needs)
            with self.progress.step("weights") if settings.all_snapshots else contextlib.nullcontext():
                snapshots = self._snapshots(staged, settings, local)
                code_digest = code.code_digest(code_folder)
            origins = {f"env.{variable}": needs.file for variable in needs.env}
            origins |= setting_origins(folder, overrides=request.overrides)
            undo.pop_all()
        return staged, RevisionFields(
            code_digest=code_digest, settings=settings, setting_origins=origins, snapshots=snapshots,
            python=python, requirements_digest=digest, deployed_by=request.owner, deployer=request.deployer,
        )  # fmt: skip

    def _source_folder(self, code_folder: Path) -> Path:
        """Return the folder that the request names. If the request has an archive, unpack the archive into `code_folder`,
        and return `code_folder`.
        """
        request = self.request
        if request.archive is not None:
            unpack(request.archive, code_folder)
            if request.base is not None:
                self._reuse(request.base, code_folder)
            # Remove credentials and caches. Archives that other programs have packed may contain them.
            code.remove_ignored(code_folder)
            return code_folder
        if request.path is None:
            raise SettingsError("The deploy has neither a path nor an archive.", remedy="Send one of them.")
        if not request.path.is_absolute():
            raise SettingsError(f"path is relative: {str(request.path)!r}.", remedy="Give an absolute path.")
        return request.path

    def _reuse(self, base: ReusedRevision, code_folder: Path) -> None:
        """Copy from the live revision the files that the upload lists but does not contain. Raise BaseChanged if the
        live revision is not `base`.
        """
        if self.request.authorize is not None:
            self.request.authorize(base.function)
        live = self.store.function(base.function).current()
        if live is None or live.revision != base.revision:
            message = f"{base.revision[:40]!r} is not the live revision of {base.function!r}."
            raise BaseChanged(message, remedy="Upload the whole folder.")
        take(self.store.code(live), code_folder)

    def _settings(self, folder: Path) -> tuple[FunctionSettings, Requirements]:
        """Return the settings of the function in `folder`, and the requirements that the file of the handler's platform
        declares.

        Raise Forbidden if the caller may not deploy the function, and SettingsError if the function cannot be deployed with
        these settings.
        """
        request = self.request
        uploaded = request.archive is not None
        settings = read_settings(
            folder, overrides=request.overrides, place="the uploaded folder" if uploaded else "",
            standalone=request.standalone, folder_name=request.folder_name if uploaded else None,
        )  # fmt: skip
        needs = self.dialects.requirements(folder, settings.handler)
        update: dict[str, Any] = {"env": dict(needs.env) | dict(settings.env)}
        if "concurrency" not in settings.model_fields_set:
            update["concurrency"] = self.dialects.concurrency(folder, settings.handler)
        settings = settings.model_copy(update=update)
        if request.authorize is not None:
            # A function with `after` starts workers when an upstream function is called, so its deployer can see these
            # calls. So the deployer must also have the right to deploy the upstream functions.
            for name in (settings.name, *settings.after):
                request.authorize(name)
        if request.base is not None and request.base.function != settings.name:
            message = f"An upload of {settings.name!r} cannot reuse files of {request.base.function!r}."
            raise BaseChanged(message, remedy="Upload the whole folder.")
        if settings.image.unbuilt:
            raise _unbuilt(settings)
        require(settings.packages)
        return settings, needs

    def _environment(
        self, code_folder: Path, settings: FunctionSettings, needs: Requirements
    ) -> tuple[Path, str]:
        """Return the path of the Python that runs the function, and the digest of its requirements.

        If the function has an image, do not check the requirements: the image must contain the packages. Otherwise,
        raise RequirementsError if the requirements are not met and the request does not ask to install them, or if
        their installation fails.
        """
        install = self.request.install
        build = (
            functools.partial(ensure_environment, self.environments, progress=self.log) if install else None
        )
        stood_in = frozenset[str]() if install else self.dialects.stands_in
        return choose_python(code_folder, settings, needs, stood_in, build)

    def _snapshots(
        self, staged: Path, settings: FunctionSettings, local: Mapping[str, Path]
    ) -> dict[str, StoredSnapshot]:
        """Put the snapshots' manifests and assets into the staged folder. Return where the weights of each snapshot
        are, by the snapshot's name.
        """
        rules = SourceRules(self.secrets_of(settings.name), self.policies, self.request.owner)
        live = self.store.function(settings.name).current()
        earlier = None if live is None else self.store.code(live).parent
        found = {}
        for name in settings.all_snapshots:
            try:
                found[name] = self._snapshot(staged, settings, name, local.get(name), rules, earlier)
            except SnapshotError as error:
                raise error.about(subject_of(name)) from error
        for name in found:
            assets = folder_of(staged, name) / ASSETS_FOLDER
            self.store.weights.share(assets, [assets])
        return found

    def _snapshot(
        self, staged: Path, settings: FunctionSettings, name: str, root: Path | None, rules: SourceRules,
        earlier: Path | None,
    ) -> StoredSnapshot:  # fmt: skip
        """Put the manifest and the assets of a snapshot into the staged folder. Return where its weights are.

        `root` is the path of the weights on this node; None if they are at a URL. `earlier` is the folder of the live
        revision; None if there is none.
        """
        folder = folder_of(staged, name)
        part = settings.snapshot_part if not name else SnapshotPart()
        folder.mkdir(parents=True, exist_ok=True)
        if root is None:
            url = describe_remote(settings.all_snapshots[name], folder, part, self.log, rules)
            return StoredSnapshot(url=url)
        stored = root.is_relative_to(uploaded := (staged / CODE_FOLDER).resolve())
        before = None if earlier is None else folder_of(earlier, name)
        describe_local(root, folder, part, self.log, rules, earlier=before, stored=stored)
        # Store the path of uploaded weights relative to the code, because the staged folder is moved later.
        return StoredSnapshot(root=root.relative_to(uploaded) if stored else root)


def _outside(settings: FunctionSettings, folder: Path, *, uploaded: bool) -> dict[str, str]:
    """Return the URLs and absolute paths of the snapshots that are not in the uploaded code, by name.

    If the deploy reads a folder of this machine, the snapshots in the folder are not copied. So they count as outside
    the code.
    """
    root = folder.resolve()
    paths = settings.snapshot_paths(folder).items()
    outside = {name: str(path) for name, path in paths if not (uploaded and path.is_relative_to(root))}
    return settings.snapshot_urls | outside


def stored_outside(record: RevisionRecord) -> dict[str, str]:
    """Return the URLs and absolute paths of the snapshots that are not in the code of a stored revision, by name."""
    roots = {name: stored.root for name, stored in record.snapshots.items()}
    paths = {name: str(root) for name, root in roots.items() if root is not None and root.is_absolute()}
    return record.settings.snapshot_urls | paths


def _local_snapshots(settings: FunctionSettings, folder: Path) -> dict[str, Path]:
    """Return the paths of the snapshots on this node, by name. Raise SnapshotError if a snapshot does not exist."""
    found = settings.snapshot_paths(folder)
    for name, path in found.items():
        if not path.exists():
            key = setting_of(name)
            fault = f"{key} is {settings.all_snapshots[name]!r}: {path} does not exist."
            option = " (or --snapshot)" if not name else ""
            raise SnapshotError(
                fault, remedy=f"Put the weights there, or set `{key}`{option} to where they are."
            )
    return found


def worker_spec(
    store: Store, record: RevisionRecord, cache: Path, dialects: Dialects, policies: DeployPolicies
) -> WorkerSpec:
    """Return what a revision's zygotes and workers have to know about the revision. `cache` is the node's cache of
    fetched snapshots. `policies` say which credentials and addresses a fetch may use.

    If the dialect of the revision's handler is no longer installed, this function raises no error. The start of a
    worker then fails, with an error that says this.
    """
    settings, folder = record.settings, store.code(record)
    entry = _entry(folder, record, dialects)
    named = settings.all_snapshots
    weights = [
        # Ask the policies about the URL in the settings, as the deploy did. The stored URL may name a commit instead of
        # a branch.
        _weights(folder, name, stored, cache, policies.access(named.get(name, ""), record.deployed_by))
        for name, stored in record.snapshots.items()
    ]
    return WorkerSpec(
        function=record.function, revision=record.revision, code=folder, handler=entry.reference,
        resolver=dialects.resolver(entry), python=str(record.python),
        weights=tuple(weights),
        concurrency=settings.concurrency, threads=settings.threads or fair_threads(settings),
        image=settings.image.name or "", resources=settings.resources, env=settings.env,
        build_timeout_s=settings.build_timeout_s, start_timeout_s=settings.start_timeout_s,
        preload=heavy_imports(folder / entry.file),
        compiled=store.computed.compiled(record), prefixes=store.computed.prefixes(record),
        parks=settings.scale.park_after_s is not None or settings.resources.gpu_memory_mb is not None,
        wait_for_weights=settings.wait_for_weights,
    )  # fmt: skip


def _entry(folder: Path, record: RevisionRecord, dialects: Dialects) -> Entry:
    """Return where the handler of a stored revision is."""
    # Check both values before their use: the zygote has reported them, and it runs the function's own code.
    dialect, entry = record.handler.get("dialect", OWN), record.handler.get("entry")
    if (
        dialect != OWN
        and isinstance(dialect, str)
        and dialect.isidentifier()
        and dialects.find(dialect) is None
    ):
        found = parse_reference(f"{dialect}:{entry}")
        if (folder / found.file).resolve().is_relative_to(folder.resolve()):
            return found
    return dialects.recognise(folder, record.settings.handler)


def _weights(code_folder: Path, name: str, stored: StoredSnapshot, cache: Path, access: Access) -> Weights:
    folder = folder_of(code_folder.parent, name)
    assets, manifest = folder / ASSETS_FOLDER, folder / MANIFEST_FILE
    if stored.url is not None:
        return Weights(
            name=name, root=assets, manifest=manifest, source=stored.url, cache=cache, access=access
        )
    # `assets` is None if workers find the assets beside the weights: if the weights are in the code, or if an earlier
    # release has made the revision without copies of the assets.
    return Weights(
        name=name, root=code_folder / (stored.root or ""), manifest=manifest, assets=assets if assets.is_dir() else None,
        versions=read_versions(folder),
    )  # fmt: skip


def fair_threads(settings: FunctionSettings) -> int:
    """Return how many threads each worker of a function should use, so that all workers get an equal share of the
    processors.
    """
    # Give all workers together at most as many threads as there are processors. With more threads, they would be far
    # slower. A forward pass of MiniLM took 476 ms with 2 threads, and 11 ms with 1, while 2 processors were busy.
    return max(1, int(min(processors(), settings.resources.cpus or math.inf)) // settings.scale.max)


def heavy_imports(file: Path) -> tuple[str, ...]:
    """Return the modules in `HEAVY` whose packages a handler's file imports. The file is parsed and not run."""
    # Report no error if the file cannot be parsed: the zygote will fail to import it, with an error that names the
    # line.
    source = SourceFile.read(file)
    found = set(source.packages) if source is not None else set()
    if "sentence_transformers" in found or "vllm" in found:
        found.add("transformers")
    if "transformers" in found:
        found.add("torch")
    return tuple(name for name in HEAVY if name.partition(".")[0] in found)


def _unbuilt(settings: FunctionSettings) -> SettingsError:
    remedy = (
        "Run `pilotflame build`, and write the name that it prints into [image], or deploy with"
        " --set image.name=NAME."
    )
    message = f"[image] of {settings.name} says how its image is built, but image.name is not set."
    return SettingsError(message, remedy=remedy, details={"problems": ["image.name is missing"]})


def choose_python(
    code_folder: Path, settings: FunctionSettings, needs: Requirements, stood_in: Collection[str],
    build: Callable[[str], Path] | None,
) -> tuple[Path, str]:  # fmt: skip
    """Return the path of the Python that runs a function, and the digest of its requirements.

    If the requirements are not met, call `build`, which returns the Python of an environment that meets them. If
    `build` is None, raise RequirementsError instead. Do not check the requirements of a function with an image. A
    package in `stood_in` need not be installed, because workers have a stand-in for it.
    """
    text, name = function_requirements(code_folder, needs)
    digest = requirements.requirements_digest(text)
    try:
        if settings.image.name is None:
            requirements.check_requirements(text, file=name, stood_in=stood_in)
    except RequirementsError:
        if build is None:
            raise
        return build(text), digest
    # Use the gateway's interpreter, so that the function's zygote can be forked from the base zygote of other
    # functions.
    return Path(sys.executable), digest


def requirements_of(spec: WorkerSpec, dialects: Dialects) -> str:
    """Return the requirements of a stored revision, from which its environment was made."""
    return function_requirements(spec.code, dialects.requirements(spec.code, spec.handler))[0]


def function_requirements(code_folder: Path, needs: Requirements) -> tuple[str, str]:
    """Return the requirements of a function's code, and the name of their file. Error messages use this name."""
    file = code_folder / REQUIREMENTS_FILE
    try:
        text, name = _beginning(file) if file.is_file() else "", REQUIREMENTS_FILE
    except UnicodeDecodeError:
        message = f"{REQUIREMENTS_FILE} is not UTF-8."
        raise RequirementsError(message, remedy="Save it as UTF-8; PowerShell's > writes UTF-16.") from None
    if more := needs.text:
        name = f"{REQUIREMENTS_FILE}, followed by the packages of {needs.file}," if text else needs.file
        text = f"{text}\n{more}" if text else more
    return text, name


def _beginning(file: Path) -> str:
    """Return the text of a file. Cut a text that is too long for `parse_requirements` one character after its limit, so
    that `parse_requirements` still refuses it.
    """
    with file.open(encoding="utf-8") as text:
        return text.read(requirements.MAX_CHARS + 1)
