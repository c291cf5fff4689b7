"""The requirements of a function: is every line of its requirements.txt met, and if not, why.

Only lines that can be checked and that mean the same tomorrow are taken: names with versions, extras, markers
and hashes. Options, links and other files are refused by line.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import NamedTuple

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName, default_environment
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ...errors import RequirementsError

_COMMENT = re.compile(r"(^|\s+)#.*$")  # as pip reads it: a # inside a word is no comment
_HASH = re.compile(r"\s--hash[= ]([A-Za-z0-9]+:[A-Fa-f0-9]+)")
_LINK = re.compile(r"^([a-z0-9+.-]+://|git\+|\.{0,2}/|file:|~/)|\.(whl|zip|tar\.gz)$", re.IGNORECASE)
_REFUSED = {
    "-r": "another file is named; put its lines here",
    "--requirement": "another file is named; put its lines here",
    "-c": "a constraints file is named; put the versions here",
    "--constraint": "a constraints file is named; put the versions here",
    "-e": "an editable install changes under a revision; name a released version",
    "--editable": "an editable install changes under a revision; name a released version",
}
_OPTION = (
    "pip options would make the revision depend on where it is installed; set PIP_* variables for the gateway"
)
_URL = "a link cannot be checked and may change under a revision; name a released version"

# The extra requirements of an installed distribution, by its name.
_Dependencies = Callable[[str], list[str]]


class RequirementLine(NamedTuple):
    """One requirement, and the line it began on."""

    number: int
    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def normal(self) -> str:
        """The line as one would compare it: no spacing, order, case or comment in it."""
        extras = ",".join(sorted(canonicalize_name(extra) for extra in self.requirement.extras))
        versions = ",".join(sorted(str(specifier) for specifier in self.requirement.specifier))
        marker = f";{self.requirement.marker}" if self.requirement.marker else ""
        hashes = "".join(f" --hash={item}" for item in sorted(self.hashes))
        return f"{self.name}[{extras}]{versions}{marker}{hashes}"


def parse_requirements(text: str) -> list[RequirementLine]:
    """The requirements in `text`; a RequirementsError names every line that cannot be taken."""
    lines: list[RequirementLine] = []
    refused: list[str] = []
    for number, line in _logical_lines(text):
        if line == "--require-hashes":  # pip enforces it while installing; nothing to check afterwards
            continue
        if reason := _refusal(line):
            refused.append(f"line {number}, {line!r}: {reason}")
            continue
        try:
            lines.append(_parsed(number, line))
        except InvalidRequirement as error:
            refused.append(f"line {number}, {line!r}: {str(error).splitlines()[0]}")
    if refused:
        raise RequirementsError(
            f"requirements.txt cannot be taken: {'; '.join(refused)}.",
            remedy="Correct or remove those lines.",
        )
    return lines


def check_requirements(
    text: str, installed: Mapping[str, str] | None = None, *, environment: Mapping[str, str] | None = None
) -> None:
    """Raise a RequirementsError that names every unmet line of `text`.

    `installed` maps names to versions (None: this interpreter's own, where what extras need is checked too);
    `environment` are the values for markers that differ from this interpreter's.
    """
    present = installed_versions() if installed is None else installed
    versions: dict[str, str] = {canonicalize_name(name): version for name, version in present.items()}
    dependencies = _own_dependencies if installed is None else _no_dependencies
    markers = {name: str(value) for name, value in {**default_environment(), **(environment or {})}.items()}
    unmet: dict[int, list[str]] = {}
    wanted: list[str] = []
    for line in parse_requirements(text):
        for requirement in _with_extras(line.requirement, markers, dependencies):
            if problem := _unmet(requirement, versions):
                unmet.setdefault(line.number, []).append(problem)
                wanted.append(f"'{requirement.name}{requirement.specifier}'")
    if unmet:
        problems = "; ".join(f"line {number}: {', '.join(found)}" for number, found in unmet.items())
        raise RequirementsError(
            f"requirements.txt is not met: {problems}.",
            remedy=f"Run `pip install {' '.join(dict.fromkeys(wanted))}`, "
            "or deploy with `pilotflame deploy --install`.",
        )


def requirements_digest(text: str) -> str:
    """The same for texts that ask for the same; hex SHA-256."""
    strict = any(line == "--require-hashes" for _, line in _logical_lines(text))
    lines = sorted(
        {line.normal for line in parse_requirements(text)} | ({"--require-hashes"} if strict else set())
    )
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def installed_versions(paths: list[str] | None = None) -> dict[str, str]:
    """Name to version of what lies on `paths` (None: on sys.path); the first found wins, as in an import."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions() if paths is None else metadata.distributions(path=paths):
        name: str | None = distribution.metadata["Name"]
        if name:  # a broken *.dist-info, left by an interrupted pip, has none
            found.setdefault(canonicalize_name(name), distribution.version)
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Lines with continuations joined and comments removed, each with the number it began at."""
    start, held = 0, ""
    for number, raw in enumerate([*text.removeprefix("\ufeff").splitlines(), ""], 1):
        start = start if held else number
        if raw.endswith("\\") and not raw.lstrip().startswith("#"):
            held += raw[:-1] + " "
            continue
        line = _COMMENT.sub("", held + raw).strip()
        held = ""
        if line:
            yield start, line


def _refusal(line: str) -> str | None:
    if line.startswith("-"):
        option = re.split(r"[\s=]", line, maxsplit=1)[0]
        short = option if option.startswith("--") else option[:2]
        return _REFUSED.get(short, _OPTION)
    without_hashes = _HASH.sub("", line)
    if re.search(r"\s--?[a-zA-Z]", without_hashes):
        return _OPTION
    if _LINK.search(without_hashes.partition(";")[0].strip()) or re.search(r"\s*@\s*\S", without_hashes):
        return _URL
    return None


def _parsed(number: int, line: str) -> RequirementLine:
    hashes = tuple(sorted(item.lower() for item in _HASH.findall(line)))
    requirement = Requirement(_HASH.sub("", line).strip())
    if requirement.marker:
        try:
            requirement.marker.evaluate()
        except (UndefinedComparison, UndefinedEnvironmentName) as error:
            raise InvalidRequirement(f"its marker has no meaning: {error}") from error
    return RequirementLine(number, requirement, hashes)


def _with_extras(
    requirement: Requirement, markers: dict[str, str], dependencies: _Dependencies, extra: str = ""
) -> Iterator[Requirement]:
    """The requirement, then what its extras bring, where the markers ask for them."""
    pending = [(requirement, extra)]
    seen: set[tuple[str, str]] = set()
    while pending:
        current, extra = pending.pop(0)
        if current.marker and not current.marker.evaluate({**markers, "extra": extra}):
            continue
        yield current
        for wanted in sorted(current.extras):
            if (canonicalize_name(current.name), wanted) in seen:
                continue
            seen.add((canonicalize_name(current.name), wanted))
            parsed = [Requirement(item) for item in dependencies(current.name)]
            pending += [(item, wanted) for item in parsed if item.marker and "extra" in str(item.marker)]


def _unmet(requirement: Requirement, versions: Mapping[str, str]) -> str | None:
    version = versions.get(canonicalize_name(requirement.name))
    shown = f"{requirement.name}{requirement.specifier}"
    if version is None:
        return f"{shown} is not installed"
    try:
        # What is installed was chosen by somebody: a pre-release counts, as it does for pip.
        met = requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        met = not requirement.specifier
    return None if met else f"{shown} is wanted, {version} is installed"


def _own_dependencies(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return []  # itself unmet, which is reported


def _no_dependencies(name: str) -> list[str]:
    del name
    return []
