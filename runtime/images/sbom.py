"""Writes the software bill of materials of the image that it runs in, as CycloneDX JSON.

    python -m pilotflame.runtime.images.sbom NAME FILE

It lists what is installed, not what was asked for: Python packages from their metadata, and Debian packages from
dpkg's database. The same image always gives the same bytes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import NormalizedName, canonicalize_name

from ..._version import __version__

SPEC_VERSION = "1.6"
DPKG_STATUS = Path("/var/lib/dpkg/status")
OS_RELEASE = Path("/etc/os-release")


def bill_of_materials(
    name: str, distributions: Iterable[metadata.Distribution], dpkg: str = "", os_name: str = "debian"
) -> dict[str, Any]:
    """Return a CycloneDX document about the component `name`.

    `distributions` are its Python packages, and `dpkg` is the content of dpkg's database on the system `os_name`.
    """
    found = {
        canonicalize_name(item.metadata["Name"]): item for item in distributions if item.metadata["Name"]
    }
    python = {name: _python_component(found[name]) for name in sorted(found)}
    tool = {"type": "application", "name": "pilotflame", "version": __version__}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPEC_VERSION,
        "version": 1,
        "metadata": {
            "tools": {"components": [tool]},
            "component": {"type": "container", "bom-ref": name, "name": name},
        },
        "components": [*python.values(), *_debian_components(dpkg, os_name)],
        "dependencies": [
            {"ref": python[name]["bom-ref"], "dependsOn": sorted(_needed(found[name], python))}
            for name in python
        ],
    }


def _python_component(distribution: metadata.Distribution) -> dict[str, Any]:
    facts = distribution.metadata
    name, version = str(canonicalize_name(facts["Name"])), distribution.version
    purl = f"pkg:pypi/{name}@{quote(version, safe='.')}"
    component = {"type": "library", "bom-ref": purl, "name": facts["Name"], "version": version, "purl": purl}
    if "License-Expression" in facts:
        return component | {"licenses": [{"expression": facts["License-Expression"]}]}
    license_name = facts["License"].strip() if "License" in facts else ""
    # Some packages have the whole text of their license in this field.
    if license_name and "\n" not in license_name:
        return component | {"licenses": [{"license": {"name": license_name}}]}
    return component


def _needed(
    distribution: metadata.Distribution, present: Mapping[NormalizedName, dict[str, Any]]
) -> set[str]:
    """Return the references of the packages among `present` that a package requires without extras."""
    needed: set[str] = set()
    for line in distribution.requires or []:
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        name = canonicalize_name(requirement.name)
        if name in present and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            needed.add(present[name]["bom-ref"])
    return needed


def _debian_components(dpkg: str, os_name: str) -> Iterator[dict[str, Any]]:
    for paragraph in dpkg.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Status|Version|Architecture): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed") and {"Package", "Version"} <= fields.keys():
            name, version = fields["Package"], fields["Version"]
            arch = f"?arch={fields['Architecture']}" if "Architecture" in fields else ""
            purl = f"pkg:deb/{os_name}/{quote(name)}@{quote(version)}{arch}"
            yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def _os_name() -> str:
    found = re.search(r'^ID="?([a-z0-9._-]+)', _text(OS_RELEASE), re.MULTILINE)
    return found[1] if found else "debian"


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def main(name: str, file: str) -> None:
    """Write the document about this interpreter's packages, and the system's, to `file`."""
    document = bill_of_materials(name, metadata.distributions(), _text(DPKG_STATUS), _os_name())
    target = Path(file)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
