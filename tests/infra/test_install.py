"""infra/install.py: packages are installed by uv from pip's own sources, unless they differ from infra/hashes.txt."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from wheels import write_wheel

INFRA = Path(__file__).parents[2] / "infra"
sys.path.append(str(INFRA))

import install  # noqa: E402

CONSTRAINTS = INFRA.with_name("constraints.txt")


def pins(file: Path) -> dict[str, str]:
    """Return the versions in a file of requirements, by canonical name."""
    lines = (line.removesuffix(" \\").partition("==") for line in file.read_text().splitlines())
    return {canonicalize_name(name): version for name, mark, version in lines if mark}


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Install into tmp_path/target, with a folder of wheels that only pip's configuration names.

    The wheels are `lamp`, which has no hash in hashes.txt, and an `iniconfig` whose content differs from its hash there.
    """
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "lamp", "1.0", "def main(): ...")
    write_wheel(tmp_path / "wheels", "iniconfig", pins(CONSTRAINTS)["iniconfig"], "def main(): ...")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    environment |= {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_FIND_LINKS": str(tmp_path / "wheels"),
        "UV_CACHE_DIR": str(tmp_path / "cache"),
    }
    return subprocess.run(
        [sys.executable, str(INFRA / "install.py"), "--no-index", "--target", str(tmp_path / "target"), *arguments],
        env=environment, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


def test_uv_installs_from_the_sources_of_pips_configuration(tmp_path: Path) -> None:
    done = run(tmp_path, "lamp")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "target/lamp-1.0.dist-info/INSTALLER").read_text().strip() == "uv"


def test_what_uv_cannot_install_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path, "candle").returncode != 0


def test_a_file_with_another_hash_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "iniconfig")
    assert done.returncode != 0
    assert "Hash mismatch for `iniconfig==" in done.stderr
    assert not (tmp_path / "target/iniconfig.py").exists()


def test_each_version_but_torchs_has_hashes() -> None:
    expected = pins(CONSTRAINTS)
    del expected["torch"]
    assert pins(install.HASHES) == expected, "run `make hashes`"
    # Each requirement must continue on the next line, which has its hashes.
    assert [line for line in install.HASHES.read_text().splitlines() if re.search(r"==[^\\]*$", line)] == []


def test_each_package_that_the_tests_need_is_pinned() -> None:
    seen, wanted = set[tuple[str, str]](), {("pilotflame", ""), ("pilotflame", "test")}
    while wanted:
        seen |= wanted
        wanted = {pair for one in wanted for pair in requirements(*one)} - seen
    assert {name for name, _ in seen} - pins(CONSTRAINTS).keys() == {"pilotflame"}


def requirements(name: str, extra: str) -> Iterator[tuple[str, str]]:
    """Yield what an installed package with `extra` requires, as pairs of a name and an extra or ""."""
    for one in map(Requirement, metadata.requires(name) or []):
        if one.marker is None or one.marker.evaluate({"extra": extra}):
            yield from ((canonicalize_name(one.name), wanted) for wanted in ("", *one.extras))


LISTED = """\
:env:.find-links='/wheels'
global.extra-index-url='https://one/simple https://two/simple'
global.find-links='/old'
global.index-url='https://first/simple'
install.cert='/certificates.pem'
list.format='columns'
"""


def test_pips_variables_override_its_files() -> None:
    assert install.parse_settings(LISTED) == {
        "cert": "/certificates.pem",
        "extra-index-url": "https://one/simple https://two/simple",
        "find-links": "/wheels",
        "index-url": "https://first/simple",
    }


def test_uv_takes_pips_settings_unless_its_own_are_set() -> None:
    settings = install.parse_settings(LISTED) | {"find-links": "\n/one\n/two"}
    found = install.uv_environment(settings, {"UV_INDEX": "https://mine/simple"})
    assert found == {
        "SSL_CERT_FILE": "/certificates.pem",
        "UV_COMPILE_BYTECODE": "1",
        "UV_DEFAULT_INDEX": "https://first/simple",
        "UV_FIND_LINKS": "/one,/two",
        "UV_INDEX": "https://mine/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
    }


@pytest.mark.parametrize(("environment", "backend"), [({}, "cpu"), ({"UV_TORCH_BACKEND": "auto"}, "auto")])
def test_without_sources_torch_is_the_cpu_build(environment: dict[str, str], backend: str) -> None:
    found = install.uv_environment({}, environment)
    assert found == {"UV_COMPILE_BYTECODE": "1", "UV_TORCH_BACKEND": backend}
