"""Build contexts: what is in them, what is left out, and that the same function gives the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import uv
from pilotflame._version import __version__
from pilotflame.errors import CodeError, RequirementsError, SettingsError
from pilotflame.runtime.node.packaging.requirements import parse_requirements
from pilotflame.runtime.plugins.images.build_context import write_context
from wheels import write_wheel

HANDLER = "def handler(event):\n    return event\n"


@pytest.fixture
def function(tmp_path: Path) -> Path:
    folder = tmp_path / "hello"
    folder.mkdir()
    (folder / "handler.py").write_text(HANDLER)
    return folder


def digest(folder: Path) -> str:
    """A digest of the names, contents, modes and times below a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        facts = path.stat()
        found.update(f"{path.relative_to(folder)} {facts.st_mode} {facts.st_mtime}".encode())
        found.update(path.read_bytes() if path.is_file() else b"")
    return found.hexdigest()


def test_the_same_function_gives_the_same_files_whatever_the_umask(function: Path, tmp_path: Path) -> None:
    (function / "requirements.txt").write_text("numpy>=2\n")
    (function / "lib").mkdir()
    (function / "lib" / "a.py").write_text("A = 1\n")
    first = write_context(function, tmp_path / "first")
    os.utime(function / "handler.py", (1, 1))
    before = os.umask(0o077)
    try:
        second = write_context(function, tmp_path / "second")
    finally:
        os.umask(before)
    assert digest(first.folder) == digest(second.folder)
    assert first.code_digest == second.code_digest


def test_ignored_files_and_credentials_are_left_out(function: Path, tmp_path: Path) -> None:
    for name in (".env", "notes.txt", "kept.txt"):
        (function / name).write_text("x")
    (function / ".pilotflameignore").write_text("notes.txt\n")
    found = write_context(function, tmp_path / "context").folder / "function"
    names = {path.name for path in found.iterdir()}
    assert names == {"handler.py", "kept.txt", "pilotflame.toml", ".pilotflameignore"}


def test_the_image_has_the_settings_in_force_but_not_its_own_name(function: Path, tmp_path: Path) -> None:
    (function / "pilotflame.toml").write_text(
        '[image]\nname = "x@sha256:1"\nbase = "cuda"\n[resources]\nnetwork = "host"\n[env]\nMODE = "slow"\n'
    )
    overrides = {"env.MODE": "fast", "scale.max": "8", "name": "greeter"}
    written = write_context(function, tmp_path / "context", overrides=overrides)
    assert tomllib.loads((written.folder / "function" / "pilotflame.toml").read_text()) == {
        "name": "greeter",
        "env": {"MODE": "fast"},
        "scale": {"max": 8},
    }
    assert written.recipe.base == "cuda"


def test_weights_are_left_out_with_a_notice_or_linked(function: Path, tmp_path: Path) -> None:
    weights = function / "models" / "weights"
    weights.mkdir(parents=True)
    (weights / "model.safetensors").write_bytes(b"w" * 1000)
    (weights / "model.safetensors").chmod(0o600)
    mtime = (weights / "model.safetensors").stat().st_mtime
    (function / "pilotflame.toml").write_text('snapshot = "models/weights"\n')
    without = write_context(function, tmp_path / "without")
    assert not list(without.folder.rglob("*.safetensors"))
    (notice,) = without.notices
    assert "/function/models/weights" in notice
    assert "--with-weights" in notice
    having = write_context(function, tmp_path / "having", with_weights=True)
    (copied,) = having.folder.rglob("*.safetensors")
    assert copied.relative_to(having.folder) == Path("weights/models/weights/model.safetensors")
    assert copied.stat().st_ino == (weights / "model.safetensors").stat().st_ino
    # The copy is a hard link: a new mode or time of the copy would also change the user's file.
    assert copied.stat().st_mtime == mtime
    assert copied.stat().st_mode & 0o777 == 0o600
    assert having.notices == ()
    assert having.recipe.weights


def test_named_weights_are_put_into_the_image_at_their_paths(function: Path, tmp_path: Path) -> None:
    for name in ("base", "adapters/style"):
        (function / name).mkdir(parents=True)
        (function / name / "model.safetensors").write_bytes(name.encode())
    toml = '[snapshots]\nbase = "base"\nstyle = "./adapters/style"\n'
    (function / "pilotflame.toml").write_text(toml)
    having = write_context(function, tmp_path / "having", with_weights=True)
    assert having.recipe.weights
    for name in ("base", "adapters/style"):
        assert (having.folder / "weights" / name / "model.safetensors").read_bytes() == name.encode()
        assert not (having.folder / "function" / name).exists()
    written = tomllib.loads((having.folder / "function" / "pilotflame.toml").read_text())
    assert written["snapshots"] == {"base": "base", "style": "adapters/style"}
    assert len(write_context(function, tmp_path / "without").notices) == 2
    # One folder of weights may be inside another, and two names may mean the same folder. Each file is copied once.
    more = {"snapshots.all": "adapters", "snapshots.same": "base"}
    having = write_context(function, tmp_path / "more", overrides=more, with_weights=True)
    weights = sorted(
        file.relative_to(having.folder).as_posix() for file in having.folder.rglob("*.safetensors")
    )
    assert weights == ["weights/adapters/style/model.safetensors", "weights/base/model.safetensors"]
    remote = {"snapshots.style": "hf://org/style"}
    with pytest.raises(SettingsError, match=r"snapshots\.style is hf://org/style, not a folder"):
        write_context(function, tmp_path / "c", overrides=remote, with_weights=True)


def test_adapters_are_put_into_the_image_too(function: Path, tmp_path: Path) -> None:
    for name in ("base", "lora"):
        (function / name).mkdir()
        (function / name / "model.safetensors").write_bytes(name.encode())
    (function / "pilotflame.toml").write_text('snapshot = "./base"\n[adapters]\nstyle = "./lora"\n')
    having = write_context(function, tmp_path / "having", with_weights=True)
    weights = sorted(file.parent.name for file in having.folder.rglob("*.safetensors"))
    assert weights == ["base", "lora"]
    written = tomllib.loads((having.folder / "function" / "pilotflame.toml").read_text())
    assert (written["snapshot"], written["adapters"]) == ("base", {"style": "lora"})
    remote = {"snapshot": "hf://org/base"}
    written_file = (
        write_context(function, tmp_path / "remote", overrides=remote).folder / "function" / "pilotflame.toml"
    )
    assert tomllib.loads(written_file.read_text())["adapters"] == {"style": "lora"}


def test_weights_elsewhere_cannot_be_put_into_the_image(function: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    overrides = {"snapshot": str(tmp_path / "elsewhere")}
    assert "mount them" in write_context(function, tmp_path / "a", overrides=overrides).notices[0]
    with pytest.raises(SettingsError, match="not in the function's folder"):
        write_context(function, tmp_path / "b", overrides=overrides, with_weights=True)
    with pytest.raises(SettingsError, match="does not exist"):
        write_context(function, tmp_path / "c", overrides={"snapshot": "weights"}, with_weights=True)
    with pytest.raises(SettingsError, match="s3://bucket/weights, not a folder"):
        write_context(
            function, tmp_path / "d", overrides={"snapshot": "s3://bucket/weights"}, with_weights=True
        )


def test_requirements_become_constraints_of_what_follows(function: Path, tmp_path: Path) -> None:
    (function / "requirements.txt").write_text("pillow[xmp]==11.0 ; python_version > '3.8'  # images\n")
    written = write_context(function, tmp_path / "context")
    assert (written.folder / "constraints.txt").read_text() == 'pillow==11.0; python_version > "3.8"\n'
    assert written.recipe.requirements
    assert not written.recipe.hashes
    (function / "requirements.txt").write_text("-r other.txt\n")
    with pytest.raises(RequirementsError, match="another file"):
        write_context(function, tmp_path / "other")


def test_hashes_are_kept(function: Path, tmp_path: Path) -> None:
    hashes = [f"--hash=sha256:{digit * 64}" for digit in "ab"]
    (function / "requirements.txt").write_text(
        f"click==8.2.1 {hashes[0]} \\\n {hashes[1]}\nidna==3.10 {hashes[0]}\n"
    )
    written = write_context(function, tmp_path / "context")
    assert written.recipe.hashes
    given, kept = (
        [line.normal for line in parse_requirements((folder / "requirements.txt").read_text())]
        for folder in (function, written.folder)
    )
    assert given == kept


def test_pilotflame_is_never_taken_from_an_index(function: Path, tmp_path: Path) -> None:
    (function / "requirements.txt").write_text(f"Pilotflame[torch] >= {__version__}\nidna\n")
    written = write_context(function, tmp_path / "context")
    assert (written.folder / "requirements.txt").read_text() == "idna\n"
    assert (written.folder / "constraints.txt").read_text() == "idna\n"
    assert written.recipe.extras == ("torch",)
    (function / "requirements.txt").write_text("pilotflame==99\n")
    with pytest.raises(RequirementsError, match="Line 1 requires pilotflame==99"):
        write_context(function, tmp_path / "other")


def test_a_lock_of_uv_is_used_where_there_is_no_requirements_file(function: Path, tmp_path: Path) -> None:
    write_wheel(tmp_path, "tinything", "1.0", "")
    (function / "pyproject.toml").write_text(
        '[project]\nname = "hello"\nversion = "1"\nrequires-python = ">=3.11"\ndependencies = ["tinything"]\n'
        f'[tool.uv]\nno-index = true\nfind-links = ["{tmp_path}"]\n'
    )
    subprocess.run(
        [uv.find_uv_bin(), "lock", "--offline", "--project", function], check=True, capture_output=True
    )
    written = write_context(function, tmp_path / "context")
    assert (written.folder / "requirements.txt").read_text().startswith("tinything==1.0")
    (function / "uv.lock").write_text("no lock")
    with pytest.raises(RequirementsError, match=r"uv\.lock"):
        write_context(function, tmp_path / "other")


def test_the_packages_of_cog_are_installed(function: Path, tmp_path: Path) -> None:
    (function / "handler.py").unlink()
    (function / "predict.py").write_text(
        "from cog import BasePredictor\nclass Predictor(BasePredictor): ...\n"
    )
    cog = 'predict: "predict.py:Predictor"\nbuild:\n  python_packages: ["numpy>=2"]\n  system_packages: ["{}"]\n'
    (function / "cog.yaml").write_text(cog.format("ffmpeg"))
    (function / "pilotflame.toml").write_text('handler = "predict.py"\n[image]\npackages = ["git"]\n')
    written = write_context(function, tmp_path / "context")
    assert written.recipe.packages == ("git", "ffmpeg")
    assert (written.folder / "requirements.txt").read_text() == "numpy>=2\n"
    (function / "cog.yaml").write_text(cog.format("x; rm"))
    with pytest.raises(SettingsError, match=r"cog\.yaml"):
        write_context(function, tmp_path / "other")


@pytest.mark.parametrize(
    ("snapshot", "extras"),
    [
        ("s3://bucket/w", ("s3",)),
        ("gs://bucket/w", ("clouds",)),
        ("az://container/w", ("clouds",)),
        ("hf://org/net", ()),
        ("https://host/w", ()),
    ],
)
def test_an_image_has_what_reads_its_weights(
    function: Path, tmp_path: Path, snapshot: str, extras: tuple[str, ...]
) -> None:
    written = write_context(function, tmp_path / "context", overrides={"snapshot": snapshot})
    assert written.recipe.extras == extras


def test_the_wheel_is_what_is_installed(function: Path, tmp_path: Path) -> None:
    written = write_context(function, tmp_path / "context", overrides={"snapshot": "s3://bucket/weights"})
    assert written.recipe.extras == ("s3",)
    wheel = written.folder / written.recipe.wheel
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    install = [
        uv.find_uv_bin(),
        "--no-config",
        "pip",
        "install",
        "--offline",
        "--no-deps",
        "--python",
        python,
        wheel,
    ]
    subprocess.run(install, check=True, capture_output=True)
    found = subprocess.run(
        [python, "-c", "import pilotflame; print(pilotflame.__file__)"],
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout.startswith(str(tmp_path))
    assert (tmp_path / "venv" / "bin" / "pilotflame").is_file()


def test_the_target_must_be_empty(function: Path, tmp_path: Path) -> None:
    with pytest.raises(CodeError, match="not empty"):
        write_context(function, tmp_path)
