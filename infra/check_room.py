"""Check one room while you work on it: lint, types, the facts of the whole tree, and the tests that mirror it, in about a minute.

    python infra/check_room.py runtime/front/api            # make check ROOM=runtime/front/api
    python infra/check_room.py runtime/front/http/guard.py   # a file and its test

The installed package gets the changed files as they are; no wheel is built. Failures are named as they occur. The slowest tests
are left out if all take longer than --seconds; `make test` runs all. Exit code 1 if something is wrong.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("handlers", "runtime", "snapshot", "templates")
BIN = Path(sys.executable).parent
INSTALLED = Path(sysconfig.get_path("purelib")) / "pilotflame"
# Tests run on this number of processes.
PROCESSES = 2
HOUSE = "tests/test_house.py"
# Tests that compare lists and generated texts with the sources. A change in any room can make them fail. They take seconds.
FACTS = (
    "tests/infra/test_pages.py", "tests/infra/test_weight.py", "tests/runtime/ground/settings/test_reference.py",
    "tests/runtime/front/api/test_openapi.py", f"{HOUSE}::test_the_packages_listed_are_the_folders",
    f"{HOUSE}::test_no_room_is_larger_than_one_person_can_hold", f"{HOUSE}::test_the_figures_are_within_their_limits",
    f"{HOUSE}::test_tests_mirror_the_sources", f"{HOUSE}::test_the_files_that_documents_name_exist",
    f"{HOUSE}::test_every_package_says_what_it_is_and_holds_no_code",
)  # fmt: skip


def files_of(root: Path) -> Iterator[Path]:
    """Yield the files of the package below a tree, relative to it."""
    for path in (*root.glob("*.py"), *(file for name in PACKAGES for file in (root / name).rglob("*"))):
        if path.is_file() and path.suffix != ".pyc":
            yield path.relative_to(root)


def install() -> list[Path]:
    """Copy changed files over the installed files, remove files that are gone, and return both.

    If pyproject.toml has changed, install a wheel first, since it may have other entry points.
    """
    stamp = ROOT / ".venv" / "wheel"
    if not INSTALLED.is_dir() or (ROOT / "pyproject.toml").stat().st_mtime > stamp.stat().st_mtime:
        subprocess.run(["make", "--no-print-directory", ".venv/wheel"], cwd=ROOT, check=True)
    ours, theirs = set(files_of(ROOT)), set(files_of(INSTALLED))
    changed = [
        file
        for file in ours
        if file not in theirs or not filecmp.cmp(ROOT / file, INSTALLED / file, shallow=False)
    ]
    for file in changed:
        (INSTALLED / file).parent.mkdir(parents=True, exist_ok=True)
        # Remove the installed file first: it may be a hard link, which other environments share.
        (INSTALLED / file).unlink(missing_ok=True)
        shutil.copy2(ROOT / file, INSTALLED / file)
    gone = [file for file in theirs - ours if file.suffix == ".py"]
    for file in gone:
        (INSTALLED / file).unlink()
    return changed + gone


def tests_of(room: Path) -> Path:
    """Return the folder or the file with the tests of a room, or of a file in it."""
    if room.suffix == ".py":
        return Path("tests", *room.parts[:-1], f"test_{room.name}")
    return Path("tests") / room


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("room", type=Path, help="a folder or a file of the package, as runtime/front/api")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long the tests may take")
    options = parser.parse_args()
    room, tests = options.room, tests_of(options.room)
    if not (ROOT / room).exists():
        parser.error(f"{room} does not exist")
    began_s = time.monotonic()
    print(f"{len(install())} files were copied into the environment", flush=True)
    places = [str(place) for place in (room, tests) if (ROOT / place).exists()]
    checks: list[list[str | Path]] = [
        [BIN / "ruff", "check", "--quiet", *places], [BIN / "ruff", "format", "--check", "--quiet", *places],
        [BIN / "lint-imports"], [BIN / "python", "-m", "mypy", "-p", "pilotflame"],
        [BIN / "python", "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *FACTS],
    ]  # fmt: skip
    wrong = 0
    for command in checks:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            wrong += 1
            print(
                f"{Path(command[0]).name} {' '.join(map(str, command[1:]))}\n{done.stdout}{done.stderr}",
                flush=True,
            )
    if (ROOT / tests).exists():
        budget = ["--budget-s", str(options.seconds * PROCESSES)]
        arguments = ["-q", "-n", str(PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder", *budget]
        wrong += (
            subprocess.run(
                [BIN / "python", "-m", "pytest", *arguments, tests], cwd=ROOT, check=False
            ).returncode
            != 0
        )
    else:
        print(f"there is no {tests}")
    print(f"{'something is wrong' if wrong else 'all is right'}, after {time.monotonic() - began_s:.0f} s")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
