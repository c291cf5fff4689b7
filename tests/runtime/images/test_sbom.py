"""The software bill of materials: what is installed, with versions, licenses and dependencies."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from pilotflame.runtime.images.sbom import bill_of_materials, main

DPKG = """\
Package: libc6
Status: install ok installed
Architecture: amd64
Version: 2.36-9+deb12u10
Description: a library
 Version: of no package

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1.0
"""


def test_it_lists_python_packages_with_their_dependencies() -> None:
    found = bill_of_materials("hello", metadata.distributions())
    by_name = {component["name"].lower(): component for component in found["components"]}
    httpx = metadata.distribution("httpx")
    assert by_name["httpx"]["purl"] == f"pkg:pypi/httpx@{httpx.version}"
    assert by_name["httpx"]["licenses"]
    needed = next(
        row["dependsOn"] for row in found["dependencies"] if row["ref"] == by_name["httpx"]["bom-ref"]
    )
    assert by_name["httpcore"]["bom-ref"] in needed
    # Only an extra of httpx requires it.
    assert not any("brotli" in ref for ref in needed)
    references = [component["bom-ref"] for component in found["components"]]
    assert len(set(references)) == len(references)


def test_it_lists_debian_packages_that_are_installed() -> None:
    found = bill_of_materials("hello", (), DPKG, "ubuntu")["components"]
    assert [component["purl"] for component in found] == ["pkg:deb/ubuntu/libc6@2.36-9%2Bdeb12u10?arch=amd64"]


def test_the_same_packages_give_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        main("hello", str(tmp_path / name / "sbom.json"))
    first, second = ((tmp_path / name / "sbom.json").read_bytes() for name in ("a", "b"))
    assert first == second
    assert json.loads(first)["bomFormat"] == "CycloneDX"
