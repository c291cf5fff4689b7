"""Change the core modules one place at a time, and count the changes that the mirrored tests catch: make mutants.

    python infra/mutants.py                         # the sample of 200
    python infra/mutants.py runtime/calls/batching/queue  # the mutants of one module
    python infra/mutants.py 3f0c9a1b2d              # one mutant, after a test for it was added

Each module gives the same number of mutants (mutant_sample.py). The tests of a module import a copy of the installed package, in which
one mutant at a time is put. equal_mutants.toml lists the mutants that behave as the original. They do not count. Exit code 1 if the tests
catch too few.
"""

from __future__ import annotations

import argparse
import json
import os
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
# The core modules whose mirrored tests take seconds; the first ones give one mutant more if the division leaves a rest.
MODULES = (
    "fair_queue", "runtime/ground/access/aws_signature", "runtime/ground/access/keyring", "runtime/calls/batching/queue",
    "runtime/jobs/stored/transitions", "runtime/calls/link/connection", "runtime/node/scaling/allocation", "runtime/node/scaling/keep_alive",
    "runtime/node/scaling/placement", "runtime/calls/serving/dispatcher", "snapshot/fetching/ranges", "snapshot/format/header",
    "snapshot/format/manifest", "snapshot/restoring/plan",
)  # fmt: skip
SAMPLE, LEAST = 200, 0.85
OUTCOMES = ("by a test", "by time", "at import", "survived", "equal")
PYTEST = "-m pytest -p no:cacheprovider -p no:schemathesis -p no:xdist -x -q --hypothesis-seed=0 --hypothesis-profile=no-shrinking"


def sampled() -> list[Mutant]:
    """Return the sample of all modules."""
    each, rest = divmod(SAMPLE, len(MODULES))
    counts = {module: each + (number < rest) for number, module in enumerate(MODULES)}
    return [
        mutant
        for module, count in counts.items()
        for mutant in drawn(module, (INSTALLED / f"{module}.py").read_text(), count)
    ]


def check(module: str, mutants: Sequence[Mutant], package: Path) -> None:
    """Run the tests of a module against each of its mutants, in a copy of the package."""
    folder, _, name = module.rpartition("/")
    tests = f"{sys.executable} {PYTEST} tests/{folder}/test_{name}.py"
    target = package / f"{module}.py"
    for compiled in target.parent.glob(f"__pycache__/{name}.*.pyc"):
        compiled.unlink()
    original, began_s = target.read_text(), time.monotonic()
    outcome, said = run_tests(tests, 300.0)
    if outcome is not TestOutcome.SURVIVED:
        sys.exit(f"The tests of {module} fail without any change:\n{said}")
    # With some mutants, the tests hang. With others, they are slower, or the machine has other load.
    limit_s = 20.0 + 3.0 * (time.monotonic() - began_s)
    for mutant in mutants:
        target.write_text(mutant.code)
        began_s = time.monotonic()
        outcome, said = run_tests(tests, limit_s)
        if outcome is TestOutcome.INCOMPETENT:
            sys.exit(f"The tests did not run:\n{said}")
        caught = (
            "by time"
            if said == "timeout"
            else "at import"
            if "during collection" in said or not said
            else "by a test"
        )
        mutant.outcome = "survived" if outcome is TestOutcome.SURVIVED else caught
        took = f"{time.monotonic() - began_s:.1f} s"
        print(
            f"{mutant.id} {module}.py:{mutant.line} {mutant.operator}: {mutant.outcome}, {took}",
            file=sys.stderr,
            flush=True,
        )
    target.write_text(original)


def score(mutants: Sequence[Mutant]) -> dict[str, float]:
    """Return the counts by outcome, and the share of the mutants that count that were caught."""
    by = Counter(mutant.outcome for mutant in mutants)
    counted = len(mutants) - by["equal"]
    share = round(1 - by["survived"] / counted, 3) if counted else 1.0
    return {"mutants": len(mutants), **{outcome: by[outcome] for outcome in OUTCOMES}, "share": share}


def run(mutants: Sequence[Mutant]) -> None:
    """Set the outcome of each mutant that has none."""
    # Remove the copy also after a kill.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        package = Path(shutil.copytree(INSTALLED, Path(folder) / "pilotflame"))
        os.chdir(ROOT)
        os.environ["PYTHONPATH"] = folder
        where = [sys.executable, "-c", "import pilotflame; print(pilotflame.__file__)"]
        if subprocess.check_output(where, text=True).strip() != str(package / "__init__.py"):
            sys.exit("Python imports another package than the copy.")
        for module in MODULES:
            if left := [one for one in mutants if one.module == module and not one.outcome]:
                check(module, left, package)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="modules, or ids of mutants (default: all)")
    parser.add_argument("--list", action="store_true", help="run no tests; print the sample")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args()
    sample, equal = sampled(), tomllib.loads(EQUAL.read_text())
    if gone := equal.keys() - {mutant.id for mutant in sample}:
        print(f"{EQUAL.name} lists mutants that are not in the sample: {', '.join(sorted(gone))}")
    mutants = [one for one in sample if not options.only or {one.id, one.module} & {*options.only}]
    for mutant in mutants:
        mutant.outcome = "equal" if mutant.id in equal else ""
    if options.list:
        print(*mutants, sep="\n")
        return 0
    run(mutants)
    table = {module: score([one for one in mutants if one.module == module]) for module in MODULES}
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
