"""`make bench-gpu` on a machine that has Python and torch, but no network and no package index.

    python infra/bench/borrowed.py collect [--python 3.12]      here: build/carried gets all wheels but torch's
    python3 infra/bench/borrowed.py run [arguments of gpu.py]   there, in a copy of this folder

`run` installs the wheels into an environment of their own, which has the packages of the machine's `python3` too. It needs
the standard library and pip alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
CARRIED = _ROOT / "build" / "carried"
ENVIRONMENT = _ROOT / "build" / "borrowed"
# Beside what pilotflame needs: the tests' runner, and loaders to compare with.
PACKAGES = ("fastsafetensors", "pytest", "runai-model-streamer")
# The machine has torch. uv is large, and only installs requirements of functions.
LEFT_OUT = ("torch", "uv")
# The wheels run with this glibc and later ones.
_GLIBC = 35


def collect(python: str) -> None:
    """Put the wheels for a version of Python on x86-64 into build/carried."""
    shutil.rmtree(CARRIED, ignore_errors=True)
    CARRIED.mkdir(parents=True)
    (CARRIED / "packages.in").write_text("\n".join(PACKAGES))
    (CARRIED / "left_out.in").write_text("".join(f'{name} ; sys_platform == "never"\n' for name in LEFT_OUT))
    _resolve(python)
    platforms = [f"manylinux_2_{number}_x86_64" for number in range(5, _GLIBC + 1)]
    platforms += ["manylinux1_x86_64", "manylinux2010_x86_64", "manylinux2014_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", "--implementation=cp", f"--python-version={python}"]
    options += [f"--platform={one}" for one in platforms]
    _pip("download", *options, "--dest", CARRIED, "-r", CARRIED / "packages.txt")
    # Files of an earlier build would be in the wheel too.
    shutil.rmtree(_ROOT / "build" / "lib", ignore_errors=True)
    _pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", CARRIED, _ROOT)
    wheels = list(CARRIED.glob("*.whl"))
    megabytes = sum(path.stat().st_size for path in wheels) / 1e6
    print(f"{CARRIED}: {len(wheels)} wheels for Python {python}, {megabytes:.1f} MB")


def _resolve(python: str) -> None:
    """Write the names and versions of all packages to packages.txt."""
    sys.path.append(str(_ROOT / "infra"))
    import install  # noqa: PLC0415  the borrowed machine has no use for it

    command: list[str | Path] = [
        Path(sys.executable).with_name("uv"), "pip", "compile", "--quiet", "--no-header", "--no-annotate",
        "--extra=gpu", "--extra=torch", f"--constraint={_ROOT / 'constraints.txt'}",
        f"--override={CARRIED / 'left_out.in'}", f"--python-version={python}",
        f"--python-platform=x86_64-manylinux_2_{_GLIBC}", f"--output-file={CARRIED / 'packages.txt'}",
        _ROOT / "pyproject.toml", CARRIED / "packages.in",
    ]  # fmt: skip
    environment = install.uv_environment(install.pip_settings(), os.environ)
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)


def _pip(*arguments: str | Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments], check=True
    )


def install_carried() -> Path:
    """Install the wheels, unless a run before did, and return the interpreter that has them."""
    python = ENVIRONMENT / "bin" / "python"
    libraries = Path(sysconfig.get_path("purelib", "venv", {"base": str(ENVIRONMENT)}))
    others = libraries / "machine.pth"
    if not others.exists():
        venv.create(ENVIRONMENT, clear=True, symlinks=True, with_pip=False)
        wheels = sorted(CARRIED.glob("*.whl"))
        _pip("--python", python, "install", "--no-index", "--no-deps", *wheels)
        # `system_site_packages` would leave out the packages of a virtual environment, if `python3` is in one.
        # This file is written last: it marks a complete installation, and pip must not find these packages.
        others.write_text("".join(f"{folder}\n" for folder in sys.path if folder.endswith("-packages")))
    return python


def main(arguments: list[str]) -> int:
    if arguments[:1] == ["collect"]:
        collect(arguments[2] if arguments[1:2] == ["--python"] else "3.12")
        return 0
    if arguments[:1] != ["run"]:
        print(__doc__)
        return 2
    benchmark: list[str | Path] = [install_carried(), Path(__file__).with_name("gpu.py"), *arguments[1:]]
    return subprocess.run(benchmark, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
