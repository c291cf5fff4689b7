"""infra/install.py: packages are installed by uv from pip's own sources, and by pip if uv fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import write_wheel

INFRA = Path(__file__).parents[2] / "infra"
sys.path.append(str(INFRA))

import install  # noqa: E402


def run(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Install into tmp_path/target, with a folder of wheels that only pip's configuration names."""
    (tmp_path / "wheels").mkdir()
    write_wheel(tmp_path / "wheels", "lamp", "1.0", "def main(): ...")
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


def installer(tmp_path: Path) -> str:
    return (tmp_path / "target" / "lamp-1.0.dist-info" / "INSTALLER").read_text().strip()


def test_uv_installs_from_the_sources_of_pips_configuration(tmp_path: Path) -> None:
    done = run(tmp_path, "lamp")
    assert done.returncode == 0, done.stderr
    assert installer(tmp_path) == "uv"


def test_pip_installs_what_uv_cannot(tmp_path: Path) -> None:
    # pip has this option, and uv does not.
    done = run(tmp_path, "--prefer-binary", "lamp")
    assert done.returncode == 0, done.stderr
    assert installer(tmp_path) == "pip"
    assert "uv ended with 2. pip installs instead." in done.stderr


def test_what_neither_can_install_is_an_error(tmp_path: Path) -> None:
    assert run(tmp_path, "candle").returncode != 0


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
