"""Real virtual environments with real wheels, without a network."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from pilotflame.errors import RequirementsError
from pilotflame.runtime.node.packaging import environment
from pilotflame.runtime.node.packaging.environment import discard_unused, ensure_environment, shrink_cache
from pilotflame.runtime.node.packaging.requirements import check_requirements, installed_versions
from wheels import write_wheel


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    write_wheel(folder, "tinything", "1.0", "def main():\n    print('tiny')\n")
    write_wheel(folder, "needy", "1.0", "", ("packaging<1", "pydantic"))
    # This version is older than the current environment's, but an environment that has it must find it first on its path.
    write_wheel(folder, "packaging", "0.1", "def main(): ...\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def run(python: Path, code: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code], env=environ, check=True, capture_output=True, text=True
    ).stdout.strip()


def installed(python: Path) -> dict[str, str]:
    """Return the versions of the packages that a worker with this Python finds, by name."""
    code = "import importlib.metadata as m, json; print(json.dumps([(d.name, d.version) for d in m.distributions()]))"
    found: dict[str, str] = {}
    for name, version in json.loads(run(python, code)):
        found.setdefault(name, version)
    return found


def own_packages(python: Path) -> set[str]:
    return set(installed_versions([str(environment._site_packages(python.parent.parent))]))


def test_an_environment_lies_on_top_of_the_current_one(tmp_path: Path) -> None:
    lines: list[str] = []
    python = ensure_environment(tmp_path / "envs", "tinything\npackaging==0.1\npydantic", lines.append)
    assert run(python, "import tinything; tinything.main()") == "tiny"
    assert str(tmp_path) in run(python, "import packaging; print(packaging.__file__)")
    assert run(python, "import sys; print(sys.prefix)") == str(python.parent.parent)
    assert installed(python)["packaging"] == "0.1"
    assert installed(python)["pydantic"] == installed_versions()["pydantic"]
    assert own_packages(python) == {"tinything", "packaging"}
    check_requirements("tinything==1.0\npackaging==0.1\npydantic>=2", installed(python))
    assert " + tinything==1.0" in lines
    # Scripts contain the path of the environment. They work, because the environment was built in its final folder.
    assert subprocess.check_output([python.parent / "tinything"], text=True) == "tiny\n"
    # The current environment was not touched.
    check_requirements("packaging>=24")

    lines.clear()
    again = "pydantic # again\ntinything\npackaging==0.1"
    assert ensure_environment(tmp_path / "envs", again, lines.append) == python
    assert lines == []


def test_dependencies_are_installed_only_where_the_current_environment_does_not_meet_them(
    tmp_path: Path,
) -> None:
    python = ensure_environment(tmp_path / "envs", "needy", lambda _: None)
    assert own_packages(python) == {"needy", "packaging"}


def test_hashes_are_enforced(tmp_path: Path, index: Path) -> None:
    [file] = index.glob("tinything-*")
    right = hashlib.sha256(file.read_bytes()).hexdigest()
    line = f"tinything==1.0 --hash=sha256:{right}"
    assert own_packages(ensure_environment(tmp_path / "envs", line, lambda _: None)) == {"tinything"}
    for wrong in (
        line.replace(right, "0" * 64),
        f"{line}\nneedy==1.0",
        f"--require-hashes\n{line}\nneedy==1.0",
    ):
        with pytest.raises(RequirementsError, match=r"(?i)hash"):
            ensure_environment(tmp_path / "envs", wrong, lambda _: None)


def test_the_index_is_read_from_pips_configuration_file(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    simple = tmp_path / "simple" / "tinything"
    simple.mkdir(parents=True)
    [file] = index.glob("tinything-*")
    (simple / "index.html").write_text(f'<a href="{file.as_uri()}">{file.name}</a>')
    for text in (f"find-links = {index}\nno-index = true", f"index-url = {simple.parent.as_uri()}"):
        (tmp_path / "pip.conf").write_text(f"[global]\nindex-url = file:///nowhere\n[install]\n{text}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
        root = tmp_path / hashlib.sha256(text.encode()).hexdigest()
        assert own_packages(ensure_environment(root, "tinything", lambda _: None)) == {"tinything"}


def test_the_output_of_uv_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RequirementsError) as caught:
        ensure_environment(tmp_path / "envs", "surely-not-there==1", lambda _: None)
    assert "surely-not-there was not found" in caught.value.message
    assert caught.value.remedy


def test_an_unfinished_environment_is_built_again(tmp_path: Path) -> None:
    python = ensure_environment(tmp_path / "envs", "tinything", lambda _: None)
    folder = python.parent.parent
    (folder / "pilotflame-complete").unlink()
    (folder / "leftover").touch()
    lines: list[str] = []
    assert ensure_environment(tmp_path / "envs", "tinything", lines.append) == python
    assert lines[0] == "removing an environment that is unfinished or was moved"
    assert not (folder / "leftover").exists()


def test_a_package_that_the_current_environment_lost_is_installed(tmp_path: Path) -> None:
    python = ensure_environment(tmp_path / "envs", "tinything", lambda _: None)
    site_packages = environment._site_packages(python.parent.parent)
    for path in (site_packages / "tinything.py", *(site_packages / "tinything-1.0.dist-info").iterdir()):
        path.unlink()
    (site_packages / "tinything-1.0.dist-info").rmdir()
    # A killed deploy leaves such a placeholder, which does not count as the package.
    leftover = site_packages / "tinything-1.0.dist-info"
    leftover.mkdir()
    (leftover / "METADATA").write_text("Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n")
    (leftover / "INSTALLER").write_text("pilotflame-placeholder\n")
    lines: list[str] = []
    assert ensure_environment(tmp_path / "envs", "tinything", lines.append) == python
    assert lines[0].startswith("the gateway's environment has changed")
    assert run(python, "import tinything; tinything.main()") == "tiny"


def test_the_cache_of_uv_is_limited_to_what_environments_use(
    tmp_path: Path, index: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    monkeypatch.setattr(environment, "CACHE_BYTES", 500_000)
    write_wheel(index, "large", "1.0", f"DATA = '{'x' * 1_000_000}'\n")
    environments = tmp_path / "envs"

    def kept() -> list[Path]:
        return list((environments / ".uv-cache").rglob("large.py"))

    def deploy() -> None:
        ensure_environment(environments, "large", lambda _: None)
        shrink_cache(environments)

    shrink_cache(environments)
    deploy()
    # The cache keeps these files: the environment uses the same files, so removing them would free nothing.
    assert len(kept()) == 1
    assert discard_unused(environments, tuple) == 1
    shrink_cache(environments)
    assert kept() == []
    deploy()
    assert len(kept()) == 1


def test_two_deploys_build_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Path] = []
    building, waiting = threading.Event(), threading.Event()

    def build(folder: Path, *_: object) -> None:
        built.append(folder)
        building.set()
        assert waiting.wait(30)
        (folder / "bin").mkdir(parents=True)
        (folder / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(environment, "_build", build)
    monkeypatch.setattr(environment, "_met", lambda *_: True)
    first = threading.Thread(target=ensure_environment, args=(tmp_path, "tinything", lambda _: None))
    second = threading.Thread(
        target=ensure_environment, args=(tmp_path, "tinything", lambda _: waiting.set())
    )
    first.start()
    assert building.wait(30)
    second.start()
    first.join()
    second.join()
    assert len(built) == 1


def slow_uv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    script = tmp_path / "uv"
    script.write_text(f"#!{sys.executable}\n{code}")
    script.chmod(0o755)
    monkeypatch.setattr("uv.find_uv_bin", lambda: str(script))


def test_uv_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The child keeps the pipe open, too, so both processes must be killed.
    slow_uv(
        tmp_path,
        monkeypatch,
        "import subprocess, sys, time\nprint('begun', flush=True)\n"
        f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\ntime.sleep(600)\n",
    )
    with pytest.raises(RequirementsError, match=r"did not finish within 1 s .*\n") as caught:
        ensure_environment(tmp_path / "envs", "tinything", lambda _: None, deadline_s=1)
    assert caught.value.remedy


def test_uv_ends_when_progress_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_uv(tmp_path, monkeypatch, "import time\nprint('begun', flush=True)\ntime.sleep(600)\n")

    def progress(line: str) -> None:
        if line == "begun":
            raise KeyError(line)

    with pytest.raises(KeyError):
        ensure_environment(tmp_path / "envs", "tinything", progress)


def test_without_environments_the_records_of_revisions_are_not_read(tmp_path: Path) -> None:
    assert discard_unused(tmp_path / "envs", lambda: pytest.fail("read")) == 0
