"""Environments: real virtual environments with real wheels, no network."""

import base64
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest
from pilotflame.errors import RequirementsError
from pilotflame.runtime.functions import environment
from pilotflame.runtime.functions.environment import ensure_environment
from pilotflame.runtime.functions.requirements import check_requirements, requirements_digest


def wheel(folder: Path, name: str, version: str, code: str) -> None:
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}={name}:main\n",
    }
    record = "".join(
        f"{path},sha256={base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b'=').decode()},{len(text)}\n"
        for path, text in files.items()
    )
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    wheel(folder, "tinything", "1.0", "def main():\n    print('tiny')\n")
    # Older than the one that the current environment has: its own must win all the same.
    wheel(folder, "packaging", "0.1", "def main(): ...\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def run(python: Path, code: str) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [python, "-c", code], env=environ, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_no_requirements_are_the_current_interpreter(tmp_path: Path) -> None:
    made = ensure_environment(tmp_path / "envs", "# nothing\n", print)
    assert made.python == Path(sys.executable)
    assert made.digest == requirements_digest("")
    assert "pydantic" in made.installed
    assert not (tmp_path / "envs").exists()


def test_an_environment_lies_on_top_of_the_current_one(tmp_path: Path) -> None:
    said: list[str] = []
    made = ensure_environment(tmp_path / "envs", "tinything\npackaging==0.1\npydantic", said.append)
    assert made.digest == requirements_digest("pydantic\npackaging==0.1\ntinything")
    assert run(made.python, "import tinything; tinything.main()") == "tiny"
    assert run(made.python, "import pydantic; print(pydantic.VERSION)") == made.installed["pydantic"]
    assert run(made.python, "import importlib.metadata as m; print(m.version('packaging'))") == "0.1"
    assert str(tmp_path) in run(made.python, "import packaging; print(packaging.__file__)")
    assert run(made.python, "import sys; print(sys.prefix)") == str(made.python.parent.parent)
    assert made.installed["packaging"] == "0.1"
    check_requirements("tinything==1.0\npackaging==0.1\npydantic>=2", made.installed)
    assert any("Successfully installed" in line for line in said)
    # Scripts hold the environment's path: they work because it was built where it stays.
    assert subprocess.check_output([made.python.parent / "tinything"], text=True) == "tiny\n"
    # The current environment was not touched.
    check_requirements("packaging>=24")

    said.clear()
    assert (
        ensure_environment(tmp_path / "envs", "pydantic # again\ntinything\npackaging==0.1", said.append)
        == made
    )
    assert said == []


def test_what_pip_says_is_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(RequirementsError) as caught:
        ensure_environment(tmp_path / "envs", "surely-not-there==1", lambda _: None)
    assert "No matching distribution found for surely-not-there==1" in caught.value.message
    assert caught.value.remedy


def test_an_unfinished_environment_is_built_again(tmp_path: Path) -> None:
    made = ensure_environment(tmp_path / "envs", "tinything", lambda _: None)
    folder = made.python.parent.parent
    (folder / "pilotflame-complete").unlink()
    (folder / "leftover").touch()
    said: list[str] = []
    assert ensure_environment(tmp_path / "envs", "tinything", said.append) == made
    assert said[0] == "removing an environment that was left unfinished"
    assert not (folder / "leftover").exists()


def test_an_environment_that_lost_something_beneath_gets_it_back(tmp_path: Path) -> None:
    made = ensure_environment(tmp_path / "envs", "tinything", lambda _: None)
    site_packages = environment._site_packages(made.python.parent.parent)
    for path in (site_packages / "tinything.py", *(site_packages / "tinything-1.0.dist-info").iterdir()):
        path.unlink()
    (site_packages / "tinything-1.0.dist-info").rmdir()
    said: list[str] = []
    assert ensure_environment(tmp_path / "envs", "tinything", said.append) == made
    assert said[0].startswith("the environment beneath has changed")
    assert run(made.python, "import tinything; tinything.main()") == "tiny"


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


def slow_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{code}")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))
    monkeypatch.setattr(environment.venv.EnvBuilder, "create", lambda _, folder: _fake_venv(Path(folder)))


def _fake_venv(folder: Path) -> None:
    environment._site_packages(folder).mkdir(parents=True)


def test_pip_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The child holds the pipe open too: both must end for the lines to end.
    slow_pip(
        tmp_path,
        monkeypatch,
        "import subprocess, sys, time\nprint('begun', flush=True)\n"
        f"subprocess.Popen([{sys.executable!r}, '-c', 'import time; time.sleep(600)'])\ntime.sleep(600)\n",
    )
    with pytest.raises(RequirementsError, match=r"did not finish .* within 1 s.*\n") as caught:
        ensure_environment(tmp_path / "envs", "tinything", lambda _: None, deadline_s=1)
    assert caught.value.remedy


def test_pip_ends_when_progress_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_pip(tmp_path, monkeypatch, "import time\nprint('begun', flush=True)\ntime.sleep(600)\n")

    def progress(line: str) -> None:
        if line == "begun":
            raise KeyError(line)

    with pytest.raises(KeyError):
        ensure_environment(tmp_path / "envs", "tinything", progress)
