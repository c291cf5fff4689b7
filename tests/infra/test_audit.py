"""infra/audit.py: a vulnerability with a fix fails, and without data the audit is skipped. A stand-in answers for pip-audit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INFRA = Path(__file__).parents[2] / "infra"
sys.path.append(str(INFRA))

import audit  # noqa: E402

FOUND = {"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["2.0"], "description": ""}
# OSV reports vulnerabilities. PyPI reports none, as a mirror of PyPI does that has only the files.
ANSWERS = """\
import json, sys

if "pypi" in sys.argv:
    print(json.dumps({"dependencies": [{"name": "requests", "skip_reason": "not found"}]}))
elif "constraints.txt" in " ".join(sys.argv):
    print(json.dumps({"dependencies": FOUND}))
else:
    print(json.dumps({"dependencies": [{"name": "requests", "version": "2.19.0", "vulns": [{}]}]}))
"""


def run(tmp_path: Path, stand_in: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "pip_audit.py").write_text(stand_in)
    return subprocess.run(
        [sys.executable, str(INFRA / "audit.py"), *arguments],
        env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip


@pytest.mark.parametrize(("fixes", "code", "remedy"), [(["2.0"], 1, "fixed in 2.0"), ([], 0, "no fix yet")])
def test_only_a_vulnerability_with_a_fix_fails(
    tmp_path: Path, fixes: list[str], code: int, remedy: str
) -> None:
    package = {"name": "lamp", "version": "1.0", "vulns": [FOUND | {"fix_versions": fixes}]}
    packages = [package, {"name": "torch", "skip_reason": "not found"}]
    done = run(tmp_path, ANSWERS.replace("FOUND", repr(packages)))
    assert done.stdout.splitlines() == [
        f"lamp 1.0: PYSEC-1, CVE-1, {remedy}", "Audited 1 packages. Not known to the service: torch.",
    ]  # fmt: skip
    assert done.returncode == code, done.stderr


def test_an_exception_is_named_by_any_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "EXCEPTIONS", {"CVE-1": "not called"})
    found = audit.vulnerabilities([{"name": "lamp", "version": "1.0", "vulns": [FOUND]}])
    assert list(found) == [("lamp 1.0: PYSEC-1, CVE-1, excepted: not called", False)]


@pytest.mark.parametrize(
    ("stand_in", "reason"),
    [
        ("import sys; sys.exit('ConnectionError: refused')", "ConnectionError: refused"),
        ("import threading; threading.Event().wait()", "no answer in time"),
        ("print('{\"dependencies\": []}')", "has no vulnerabilities of requests==2.19.0"),
        ("print('Found no problem')", "pip-audit printed no report: 'Found no problem'"),
        ("print('{\"error\": 1}')", "pip-audit printed no report: '{\"error\": 1}'"),
        ("print('[]')", "pip-audit printed no report: '[]'"),
    ],
)
def test_without_data_the_audit_is_skipped_in_one_line(tmp_path: Path, stand_in: str, reason: str) -> None:
    done = run(tmp_path, stand_in, "--timeout-s", "2")
    assert done.stdout.startswith(f"The audit was skipped. pypi: {reason}; osv: ")
    assert (done.stdout.count("\n"), done.returncode) == (1, 0), done.stderr


def test_a_service_that_does_not_answer_leaves_time_for_the_other(tmp_path: Path) -> None:
    hangs = ANSWERS.replace("    print", "    import threading; threading.Event().wait()\n    print", 1)
    package = {"name": "lamp", "version": "1.0", "vulns": []}
    done = run(tmp_path, hangs.replace("FOUND", repr([package])), "--timeout-s", "4")
    assert done.stdout.startswith("Audited 1 packages."), done.stdout
