"""Change modules of the product one place at a time, and count the changes that the mirrored tests catch: make mutants.

    python infra/mutants.py                               # 140 changes in 28 modules, drawn by a new seed, which is printed
    python infra/mutants.py --seed 7                      # the same draw again
    python infra/mutants.py runtime/calls/batching/queue  # the mutants of one module

The tests of a module import a copy of the installed package, in which one mutant at a time is put. A mutant that the mirrored
test file does not catch is tried with the files of `tests_of`, too. equal_mutants.toml lists the mutants that behave as the
original. They do not count. Exit code 1 if the tests catch too few.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cosmic_ray.testing import run_tests
from cosmic_ray.work_item import TestOutcome
from mutant_sample import Mutant, drawn

ROOT = Path(__file__).resolve().parents[1]
INSTALLED = Path(sysconfig.get_path("purelib")) / "pilotflame"
EQUAL = ROOT / "infra" / "equal_mutants.toml"
DRAWN, EACH, LEAST = 28, 5, 0.9
"""The modules of a draw, the mutants of each, and the share that the tests must catch."""
MOST_OTHERS, OTHER_S = 3, 60.0
"""How many other test files are tried with the mutants that the mirrored one does not catch, and how long each may take."""
OUTCOMES = ("by a test", "by time", "at import", "by others", "survived", "equal")
PYTEST = "-m pytest -p no:cacheprovider -p no:schemathesis -p no:xdist -x -q --hypothesis-seed=0 --hypothesis-profile=no-shrinking"


def tested() -> list[str]:
    """Return the modules that have a mirrored test file."""
    modules = (path.relative_to(INSTALLED).with_suffix("") for path in sorted(INSTALLED.rglob("*.py")))
    return [f"{one}" for one in modules if (ROOT / "tests" / one.parent / f"test_{one.name}.py").is_file()]


def mutants_of(modules: Sequence[str]) -> list[Mutant]:
    return [
        mutant
        for module in modules
        for mutant in drawn(module, (INSTALLED / f"{module}.py").read_text(), EACH)
    ]


def tests_of(module: str) -> list[str]:
    """Return the mirrored test file of a module, and then the MOST_OTHERS shortest of the other test files that import it."""
    folder, _, name = module.rpartition("/")
    mirrored = ROOT / "tests" / folder / f"test_{name}.py"
    parent = ".".join(("pilotflame", *filter(None, folder.split("/"))))
    imports = re.compile(rf"from {parent}\.{name} import|from {parent} import [^\n]*\b{name}\b")
    importing = [one for one in (ROOT / "tests").rglob("test_*.py") if imports.search(one.read_text())]
    others = sorted({*importing} - {mirrored}, key=lambda one: (one.stat().st_size, one))[:MOST_OTHERS]
    return [f"{one.relative_to(ROOT)}" for one in (mirrored, *others)]


def check(module: str, mutants: Sequence[Mutant], package: Path) -> None:
    """Run the tests of a module against each of its mutants, in a copy of the package."""
    mirrored, *others = tests_of(module)
    run_file(module, mirrored, mutants, package, 300.0)
    for other in others:
        if left := [one for one in mutants if one.outcome == "survived"]:
            run_file(module, other, left, package, OTHER_S)
            for one in left:
                one.outcome = one.outcome if one.outcome == "survived" else "by others"


def run_file(module: str, file: str, mutants: Sequence[Mutant], package: Path, most_s: float) -> None:
    """Set the outcomes of mutants with a test file. Do nothing if another file than the mirrored one does not pass within `most_s`."""
    tests, target = f"{sys.executable} {PYTEST} {file}", package / f"{module}.py"
    for compiled in target.parent.glob(f"__pycache__/{target.stem}.*.pyc"):
        compiled.unlink()
    original, began_s = target.read_text(), time.monotonic()
    outcome, said = run_tests(tests, most_s)
    if outcome is not TestOutcome.SURVIVED:
        if most_s == OTHER_S:
            return
        sys.exit(f"{file} fails without any change:\n{said}")
    # Limit the time, because tests hang with some mutants. With others, or with other load on the machine,
    # they are only slower.
    limit_s = 20.0 + 3.0 * (time.monotonic() - began_s)
    for mutant in mutants:
        target.write_text(mutant.code)
        began_s = time.monotonic()
        outcome, said = run_tests(tests, limit_s)
        if outcome is TestOutcome.INCOMPETENT:
            sys.exit(f"The tests did not run:\n{said}")
        hung, at_import = said == "timeout", "during collection" in said or not said
        caught = "by time" if hung else "at import" if at_import else "by a test"
        mutant.outcome = "survived" if outcome is TestOutcome.SURVIVED else caught
        took = f"{file}: {mutant.outcome}, {time.monotonic() - began_s:.1f} s"
        print(f"{mutant.id} {module}.py:{mutant.line} {mutant.operator}, {took}", file=sys.stderr, flush=True)
    target.write_text(original)


def score(mutants: Sequence[Mutant]) -> dict[str, float]:
    """Return the counts by outcome, and the share of caught mutants among those that are not equal."""
    by = Counter(mutant.outcome for mutant in mutants)
    counted = len(mutants) - by["equal"]
    share = round(1 - by["survived"] / counted, 3) if counted else 1.0
    return {"mutants": len(mutants), **{outcome: by[outcome] for outcome in OUTCOMES}, "share": share}


def run(mutants: Sequence[Mutant]) -> None:
    """Set the outcome of each mutant that has none."""
    # Exit by an exception on SIGTERM, so that the copy is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        package = Path(shutil.copytree(INSTALLED, Path(folder) / "pilotflame"))
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = folder
        where = [sys.executable, "-c", "import pilotflame; print(pilotflame.__file__)"]
        if subprocess.check_output(where, text=True).strip() != str(package / "__init__.py"):
            sys.exit("Python imports another package than the copy.")
        for module in dict.fromkeys(one.module for one in mutants):
            if left := [one for one in mutants if one.module == module and not one.outcome]:
                check(module, left, package)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("modules", nargs="*", help="modules (default: a draw)")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 30), help="of the draw")
    parser.add_argument("--list", action="store_true", help="run no tests; print the mutants")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    equal, modules = tomllib.loads(EQUAL.read_text()), options.modules
    if not modules:
        print(f"seed {options.seed}", file=sys.stderr, flush=True)
        modules = sorted(random.Random(options.seed).sample(tested(), DRAWN))
    mutants = mutants_of(modules)
    for mutant in mutants:
        mutant.outcome = "equal" if mutant.id in equal else ""
    if options.list:
        print(*mutants, sep="\n")
        return 0
    run(mutants)
    table = {module: score([one for one in mutants if one.module == module]) for module in modules}
    table["all"] = score(mutants)
    print(f"{'module':32}" + "".join(f"{name:>11}" for name in table["all"]))
    for module, row in table.items():
        if row["mutants"]:
            print(f"{module:32}" + "".join(f"{value:>11}" for value in row.values()))
    print("", *(mutant for mutant in mutants if mutant.outcome == "survived"), sep="\n")
    if options.json:
        options.json.write_text(json.dumps({"table": table, "mutants": list(map(vars, mutants))}, indent=1))
    return int(table["all"]["share"] < LEAST)


if __name__ == "__main__":
    sys.exit(main())
