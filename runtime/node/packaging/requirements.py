"""Parses the requirements.txt of a function, and checks which of its lines are met.

Only lines that name a package, with versions, extras, markers and hashes, are accepted. Whether such a line
is met can be checked, and its meaning does not change over time. Options, links and references to other files
are refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from packaging.markers import UndefinedComparison, UndefinedEnvironmentName
from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from ....errors import RequirementsError
from ...ground.telemetry.refusals import Operation, refusal

FILE = "requirements.txt"
MAX_CHARS, MAX_LINE_CHARS, MAX_LINES = 256 << 10, 1000, 2000
"""The largest numbers of characters of a file, of characters of a line without its hashes, and of lines. The length of
a line is limited because its parser is recursive.
"""
_MOST_FAULTS = 20
_HASH = re.compile(r"\s--hash[= ]([A-Za-z0-9]+:[A-Fa-f0-9]+)")
# Patterns of refused lines, and the reasons. They are matched after the hashes are removed. The first match counts.
_REFUSED = (
    (r"-(r|-requirement\b)", "another file is named; put its lines here"),
    (r"-(c|-constraint\b)", "a constraints file is named; put the versions here"),
    (r"-(e|-editable\b)", "an editable install changes under a revision; name a released version"),
    (r"-|.*\s--?[a-zA-Z]", "options make revisions differ; set the gateway's PIP_* or UV_* variables"),
    (
        r"(?i)[a-z0-9+.-]+://|git\+|\.{0,2}/|file:|~/|[^;]*\.(whl|zip|tar\.gz)\s*(;|$)|.*@\s*\S",
        "a link cannot be checked and may change under a revision; name a released version",
    ),
)


class RequirementLine(NamedTuple):
    """One requirement, and the number of the line in requirements.txt at which it begins."""

    number: int
    requirement: Requirement
    hashes: tuple[str, ...]

    @property
    def normal(self) -> str:
        """The requirement in a form that does not depend on spacing, order, case and comments."""
        name, marker = canonicalize_name(self.requirement.name), self.requirement.marker
        extras = ",".join(sorted(map(canonicalize_name, self.requirement.extras)))
        versions = ",".join(sorted(map(str, self.requirement.specifier)))
        hashes = "".join(f" --hash={item}" for item in self.hashes)
        return f"{name}[{extras}]{versions}{f';{marker}' if marker else ''}{hashes}"


def parse_requirements(text: str, file: str = FILE) -> list[RequirementLine]:
    """Return the requirements in `text`. Raise RequirementsError, which names all lines that are refused.

    `file` is the text's name in error messages.
    """
    if len(text) > MAX_CHARS:
        message = f"{file} has more than {MAX_CHARS} characters."
        raise RequirementsError(message, remedy="Name only the packages that the function imports.")
    lines: list[RequirementLine] = []
    refused: list[str] = []
    found = list(islice(_logical_lines(text), MAX_LINES + 1))
    if len(found) > MAX_LINES:
        message = f"{file} has more than {MAX_LINES} lines."
        raise RequirementsError(message, remedy="Name only the packages that the function imports.")
    for number, line in found:
        # Skip this option, which uv enforces during the installation. Afterwards, nobody can check whether it was met.
        if line == "--require-hashes":
            continue
        try:
            lines.append(_parsed(number, line))
        except InvalidRequirement as error:
            refused.append(f"line {number}, {line[:MAX_LINE_CHARS]!r}: {str(error).splitlines()[0]}")
        if len(refused) == _MOST_FAULTS:
            break
    if refused:
        problems = "; ".join(refused)
        raise RequirementsError(f"{file} is refused: {problems}.", remedy="Correct those lines.")
    return lines


def check_requirements(
    text: str,
    installed: Mapping[str, str] | None = None,
    *,
    file: str = FILE,
    stood_in: Collection[str] = (),
) -> None:
    """Raise RequirementsError, which names all unmet lines of `text`, if there are any.

    `installed` are the versions of the installed packages by name. Without `installed`, the packages of this
    interpreter are used, and the dependencies that extras add are checked too. A package of `stood_in` that is not
    installed meets any requirement: workers have a stand-in for it.
    """
    if not (lines := parse_requirements(text, file)):
        return
    if installed is None:
        # Without this call, Python may not see a package that was installed since it last read the folder.
        importlib.invalidate_caches()
    present = installed_versions() if installed is None else installed
    versions = {str(canonicalize_name(name)): version for name, version in present.items()}
    absent = set(stood_in) - versions.keys()
    unmet: dict[int, list[str]] = {}
    wanted: list[str] = []
    for line in lines:
        for requirement in _with_extras(line.requirement, follow=installed is None):
            if canonicalize_name(requirement.name) in absent:
                continue
            if problem := _unmet(requirement, versions):
                unmet.setdefault(line.number, []).append(problem)
                wanted.append(f"'{requirement.name}{requirement.specifier}'")
    if unmet and installed is None and not Path(sys.executable).exists():
        refused = refusal(Operation.PYTHON, errno.ENOENT)
        raise RequirementsError(f"{sys.executable} is missing: {refused.why}.", remedy=refused.remedy)
    if unmet:
        shown = islice(unmet.items(), _MOST_FAULTS)
        problems = "; ".join(f"line {number}: {', '.join(found)}" for number, found in shown)
        install = f"pip install {' '.join(islice(dict.fromkeys(wanted), _MOST_FAULTS))}"
        remedy = f"Run `{install}`, or deploy with `pilotflame deploy --install`."
        raise RequirementsError(f"{file} is not met: {problems}.", remedy=remedy)


def requirements_digest(text: str) -> str:
    """Return a SHA-256, in hex, which is the same for all texts with the same requirements."""
    lines = {line.normal for line in parse_requirements(text)}
    if any(line == "--require-hashes" for _, line in _logical_lines(text)):
        lines.add("--require-hashes")
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def installed_versions(paths: list[str] | None = None) -> dict[str, str]:
    """Return the versions of the packages on `paths` by name. Without `paths`, use sys.path.

    If a package is on several paths, the first of them counts, as in an import.
    """
    found: dict[str, str] = {}
    for distribution in metadata.distributions() if paths is None else metadata.distributions(path=paths):
        # Read `metadata` only once, because each access parses the package's whole description.
        fields = distribution.metadata
        # An interrupted installation can leave a *.dist-info folder without the package's name.
        if name := fields["Name"]:
            found.setdefault(canonicalize_name(name), fields["Version"])
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each line that is not empty, with its number. Comments are removed.

    A line that ends with a backslash is joined with the next line. A joined line has the number of its first line.
    """
    start, joined = 0, ""
    for number, raw in enumerate([*text.removeprefix("\ufeff").splitlines(), ""], 1):
        start = start if joined else number
        if raw.endswith("\\") and not raw.lstrip().startswith("#"):
            joined += raw[:-1] + " "
            continue
        line = _without_comment(joined + raw).strip()
        joined = ""
        if line:
            yield start, line


def _without_comment(line: str) -> str:
    """Return the line before its comment. As in pip, a # begins a comment only at the start of a line or after a blank."""
    # Not a regular expression: with `\\s+#`, the time for a line of blanks would grow with the square of its length.
    at = line.find("#")
    while at > 0 and not line[at - 1].isspace():
        at = line.find("#", at + 1)
    return line if at < 0 else line[:at]


def _parsed(number: int, line: str) -> RequirementLine:
    text = _HASH.sub("", line)
    if reason := next((reason for pattern, reason in _REFUSED if re.match(pattern, text)), None):
        raise InvalidRequirement(reason)
    if len(text) > MAX_LINE_CHARS:
        raise InvalidRequirement(f"it has more than {MAX_LINE_CHARS} characters")
    try:
        requirement = Requirement(text)
        if requirement.marker:
            requirement.marker.evaluate()
    except (UndefinedComparison, UndefinedEnvironmentName) as error:
        raise InvalidRequirement(f"its marker has no meaning: {error}") from error
    except RecursionError:
        raise InvalidRequirement("its marker has too many parentheses") from None
    return RequirementLine(number, requirement, tuple(sorted(item.lower() for item in _HASH.findall(line))))


def _with_extras(requirement: Requirement, *, follow: bool) -> Iterator[Requirement]:
    """Yield the requirement if its marker applies to this interpreter.

    With `follow`, also yield the dependencies that its extras add, and recursively the dependencies of their extras.
    """
    pending = [(requirement, "")]
    seen: set[tuple[str, str]] = set()
    while pending:
        current, extra = pending.pop(0)
        if current.marker and not current.marker.evaluate({"extra": extra}):
            continue
        yield current
        name = canonicalize_name(current.name)
        for wanted in sorted(current.extras) if follow else ():
            if (name, wanted) not in seen:
                seen.add((name, wanted))
                # If a package is missing, its dependencies are unknown. The package itself is reported as unmet.
                with contextlib.suppress(metadata.PackageNotFoundError):
                    added = map(Requirement, metadata.requires(current.name) or [])
                    pending += [(item, wanted) for item in added if "extra" in str(item.marker)]


def _unmet(requirement: Requirement, versions: Mapping[str, str]) -> str | None:
    shown = f"{requirement.name}{requirement.specifier}"
    if (version := versions.get(canonicalize_name(requirement.name))) is None:
        return f"{shown} is not installed"
    try:
        # Accept an installed pre-release, as pip does.
        met = requirement.specifier.contains(Version(version), prereleases=True)
    except InvalidVersion:
        met = not requirement.specifier
    return None if met else f"{shown} is wanted, {version} is installed"
