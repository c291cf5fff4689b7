"""Writes the build context of a function's image: a folder from which any engine builds the image without options.

The folder holds the Containerfile, the requirements, a wheel of this pilotflame, and the function's files. The files of
an unchanged function get the same bytes and times in every build, so that engines find the layers in their cache.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import os
import shutil
import subprocess
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import tomli_w
from packaging.utils import canonicalize_name

from ...._version import __version__
from ....errors import BuildFailed, RequirementsError, SettingsError
from ....handlers.dialect import Requirements
from ....handlers.recognise import installed_dialects
from ....snapshot.sources.location import shown
from ....snapshot.sources.schemes import scheme_of
from ...ground.settings.function_settings import (
    SETTINGS_FILE,
    FunctionSettings,
    Image,
    read_settings,
    setting_of,
)
from ...ground.settings.validation import validate
from ...node.functions.deploy import function_requirements
from ...node.packaging import code
from ...node.packaging.requirements import RequirementLine, parse_requirements
from .recipe import (
    CODE_FOLDER,
    CONSTRAINTS,
    CONTAINERFILE,
    FUNCTION_PATH,
    REQUIREMENTS,
    WEIGHTS_FOLDER,
    Recipe,
)

LOCK_FILE = "uv.lock"
PROJECT_FILE = "pyproject.toml"
UV_TIMEOUT_S = 60.0
# All files get this time, the start of 1980. A zip file cannot hold an earlier time.
FILE_TIME_S = 315_532_800
_ZIP_TIME = (1980, 1, 1, 0, 0, 0)
# The files that an installer adds to the *.dist-info folder of a wheel.
_INSTALLERS_OWN = frozenset({"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"})


@dataclass(frozen=True, slots=True)
class BuildContext:
    """The build context of a function's image, and facts about it."""

    folder: Path
    recipe: Recipe
    code_digest: str
    notices: tuple[str, ...]
    """Sentences for the user about weights that are not in the image."""


def write_context(
    source: Path, target: Path, *, overrides: Mapping[str, Any] | None = None, with_weights: bool = False
) -> BuildContext:
    """Write the build context of the function in the folder `source` into `target`, which must be empty.

    Raise SettingsError, CodeError, RequirementsError or BuildFailed if the context cannot be written.
    """
    settings = read_settings(source, overrides=overrides)
    needs = installed_dialects().requirements(source, settings.handler)
    weights = settings.snapshot_paths(source)
    inside = {name: found for name, path in weights.items() if (found := _path_inside(source, path))}
    if with_weights:
        _check_weights(settings, weights, inside)
    code.make_empty(target)
    code.copy_folder(source, target / CODE_FOLDER, exclude=weights.values())
    _write_settings(target / CODE_FOLDER, settings, inside)
    wanted = _wanted(source, needs)
    extras = _own_extras(wanted) | _extras_of(settings)
    lines = [line for line in wanted if not _is_own(line)]
    _write_requirements(target, lines)
    recipe = Recipe(
        function=settings.name, uv_version=metadata.version("uv"), wheel=_write_wheel(target),
        extras=tuple(sorted(extras)), base=settings.image.base,
        packages=(*settings.image.packages, *_system_packages(needs)), requirements=bool(lines),
        hashes=any(line.hashes for line in lines), weights=with_weights and bool(inside),
    )  # fmt: skip
    (target / CONTAINERFILE).write_text(recipe.containerfile(), encoding="utf-8")
    digest = code.code_digest(target / CODE_FOLDER)
    _settle(target)
    notices = () if with_weights else tuple(_notices(weights, inside))
    # Place the weights after `_settle`: they are hard links where possible, so new times would also change the user's
    # own files.
    if recipe.weights:
        for path in _outermost(inside.values()):
            _place(source.resolve() / path, target / WEIGHTS_FOLDER / path)
    return BuildContext(target, recipe, digest, notices)


def _path_inside(source: Path, weights: Path) -> str:
    """Return the path of the weights in the function's folder, or "" if they are elsewhere or are the whole folder."""
    root = source.resolve()
    if weights == root or not weights.is_relative_to(root):
        return ""
    return weights.relative_to(root).as_posix()


def _outermost(paths: Iterable[str]) -> set[str]:
    """Return the paths that are not inside another of these paths."""
    found = set(paths)
    return {
        path for path in found if not found & {parent.as_posix() for parent in PurePosixPath(path).parents}
    }


def _check_weights(settings: FunctionSettings, weights: dict[str, Path], inside: dict[str, str]) -> None:
    """Raise SettingsError if some of the weights cannot be put into the image."""
    for name, url in settings.snapshot_urls.items():
        remedy = "Build without --with-weights: the image fetches them, or `pilotflame snapshot` copies them."
        raise SettingsError(f"{setting_of(name)} is {shown(url)}, not a folder.", remedy=remedy)
    for name, path in weights.items():
        if not path.exists():
            raise SettingsError(
                f"{setting_of(name)}: {path} does not exist.", remedy="Put the weights there."
            )
        if name not in inside:
            remedy = "Move them into the function's folder, or build without --with-weights and mount them."
            raise SettingsError(f"{setting_of(name)}: {path} is not in the function's folder.", remedy=remedy)


def _notices(weights: dict[str, Path], inside: dict[str, str]) -> Iterator[str]:
    for name, path in weights.items():
        if name in inside:
            where = f"mount them at {FUNCTION_PATH}/{inside[name]}, or build with --with-weights"
            yield f"the weights in {inside[name]} are not in the image; where it runs alone, {where}"
        else:
            yield f"the weights in {path} are not in the image; where it runs alone, mount them at that path"


def _write_settings(folder: Path, settings: FunctionSettings, inside: dict[str, str]) -> None:
    """Write the effective settings, which options of the command line may have changed.

    Omit `image`, because an image cannot name itself. Omit `resources`, because the platform limits a function that
    runs without a gateway.
    """
    fields = settings.with_snapshots(inside).model_dump(
        mode="json", exclude_unset=True, exclude_none=True, exclude={"image", "resources"}
    )
    (folder / SETTINGS_FILE).write_text(tomli_w.dumps(fields), encoding="utf-8")


def _extras_of(settings: FunctionSettings) -> set[str]:
    """Return the extras of pilotflame that the function needs to read its queues and its weights."""
    queues = {source.extra for source in settings.source if source.extra}
    schemes = (scheme_of(url) for url in settings.snapshot_urls.values())
    return queues | {scheme.extra for scheme in schemes if scheme is not None and scheme.extra}


def _system_packages(needs: Requirements) -> tuple[str, ...]:
    """Return the system packages in a platform's file. Raise SettingsError if a name is not valid for Debian."""
    packages = {"packages": list(needs.system_packages)}
    return validate(Image, packages, [], needs.file, f"Correct {needs.file}.").packages


# -- requirements


def _wanted(source: Path, needs: Requirements) -> list[RequirementLine]:
    """Return the requirements that a deploy would install. If there are none, return the packages of uv.lock."""
    text, name = function_requirements(source, needs)
    if not text and (source / LOCK_FILE).is_file() and (source / PROJECT_FILE).is_file():
        text, name = _exported(source), LOCK_FILE
    return parse_requirements(text, name)


def _is_own(line: RequirementLine) -> bool:
    """Return True if a line requires pilotflame.

    Such lines are not installed from an index, where others may own the name. The image gets pilotflame from the wheel.
    """
    return canonicalize_name(line.requirement.name) == "pilotflame"


def _own_extras(lines: list[RequirementLine]) -> set[str]:
    """Return the required extras of pilotflame. Raise RequirementsError if a line requires another version of it."""
    own = [line for line in lines if _is_own(line)]
    for number, requirement, _ in own:
        if not requirement.specifier.contains(__version__, prereleases=True):
            message = f"Line {number} requires {requirement}, but the image gets pilotflame {__version__}."
            raise RequirementsError(message, remedy="Correct that line, or build with that version.")
    return {extra for line in own for extra in line.requirement.extras}


def _write_requirements(target: Path, lines: list[RequirementLine]) -> None:
    """Write the requirements, if there are any. Also write their versions as constraints for later installations."""
    if lines:
        (target / REQUIREMENTS).write_text("".join(map(_requirement, lines)), encoding="utf-8")
        (target / CONSTRAINTS).write_text("".join(map(_constraint, lines)), encoding="utf-8")


def _requirement(line: RequirementLine) -> str:
    return " \\\n    ".join([str(line.requirement), *(f"--hash={item}" for item in line.hashes)]) + "\n"


def _constraint(line: RequirementLine) -> str:
    wanted = line.requirement
    return f"{wanted.name}{wanted.specifier}{f'; {wanted.marker}' if wanted.marker else ''}\n"


def _exported(source: Path) -> str:
    """Return the packages of the function's uv.lock, with hashes."""
    # Imported here because few functions have a uv.lock.
    import uv  # noqa: PLC0415

    command = [
        uv.find_uv_bin(),
        "export",
        "--frozen",
        "--offline",
        "--no-dev",
        "--no-emit-project",
        "--no-header",
    ]
    try:
        done = subprocess.run(
            [*command, "--no-annotate", "--quiet", "--project", str(source)],
            stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=UV_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        message = f"uv did not export {source / LOCK_FILE} within {UV_TIMEOUT_S:.0f} s."
        raise RequirementsError(message, remedy="Try again, or write a requirements.txt.") from None
    if done.returncode != 0:
        message = f"uv cannot export {source / LOCK_FILE}: {done.stderr.strip()[-500:]}."
        raise RequirementsError(message, remedy="Run `uv lock`, or write a requirements.txt.")
    return done.stdout


# -- the wheel of this pilotflame


def _write_wheel(target: Path) -> str:
    """Write a wheel of the installed pilotflame, made from its files. Return its file name."""
    site_packages = Path(__file__).parents[4]
    found = next(iter(metadata.distributions(name="pilotflame", path=[str(site_packages)])), None)
    files = [] if found is None else [file for file in found.files or () if _is_of_wheel(file)]
    if found is None or not any(file.match("runtime/cli.py") for file in files):
        message = f"pilotflame in {site_packages} is not installed from a wheel, so its files are not known."
        raise BuildFailed(message, remedy="Install it with `pip install .`, not as an editable package.")
    name = f"pilotflame-{found.version}-py3-none-any.whl"
    record = io.StringIO()
    rows = csv.writer(record, lineterminator="\n")
    with zipfile.ZipFile(target / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for file in sorted(files):
            content = Path(str(found.locate_file(file))).read_bytes()
            _add(wheel, file.as_posix(), content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            rows.writerow((file.as_posix(), f"sha256={digest}", len(content)))
        own = f"pilotflame-{found.version}.dist-info/RECORD"
        rows.writerow((own, "", ""))
        _add(wheel, own, record.getvalue().encode())
    return name


def _is_of_wheel(file: PurePosixPath) -> bool:
    """Return True if an installed file came from the wheel, False if the installer added it."""
    return file.suffix != ".pyc" and ".." not in file.parts and file.name not in _INSTALLERS_OWN


def _add(wheel: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, _ZIP_TIME)
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    wheel.writestr(entry, content)


# -- files


def _place(source: Path, target: Path) -> None:
    """Put a folder or a file at `target`. Use hard links, or copies if `target` is on another file system."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, copy_function=_link_or_copy)
    else:
        _link_or_copy(source, target)


def _link_or_copy(source: str | Path, target: str | Path) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)


def _settle(folder: Path) -> None:
    """Give all files and folders modes and times that do not depend on this machine."""
    for path in (folder, *folder.rglob("*")):
        runs = path.is_dir() or path.stat().st_mode & 0o100
        path.chmod(0o755 if runs else 0o644)
        os.utime(path, (FILE_TIME_S, FILE_TIME_S))
