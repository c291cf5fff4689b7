"""Look up known vulnerabilities of the versions in constraints.txt: python infra/audit.py [--timeout-s SECONDS].

pip-audit asks PyPI, or OSV if PyPI cannot be reached. A mirror may answer without the vulnerabilities, so each service
is first asked about a version that has some. Exits with 1 if a vulnerability has a fix and is not in EXCEPTIONS, and
with 0 if the data cannot be reached.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CONSTRAINTS = Path(__file__).resolve().parents[1] / "constraints.txt"
SERVICES = ("pypi", "osv")
VULNERABLE = "requests==2.19.0"
"""A version with vulnerabilities in the data of each service."""
EXCEPTIONS: Mapping[str, str] = {}
"""By id of a vulnerability, such as a CVE: why pilotflame is not affected."""


class NoDataError(Exception):
    """A service gave no data about vulnerabilities."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Look up known vulnerabilities of the versions in constraints.txt."
    )
    parser.add_argument(
        "--timeout-s", type=float, default=60, help="time for all requests, half of it for each service"
    )
    share_s = parser.parse_args().timeout_s / len(SERVICES)
    reasons = []
    for service in SERVICES:
        deadline = time.monotonic() + share_s
        try:
            check_data(service, deadline)
            return judge(ask(service, CONSTRAINTS, deadline))
        except NoDataError as error:
            reasons.append(f"{service}: {error}")
    print("The audit was skipped.", "; ".join(reasons))
    return 0


def check_data(service: str, deadline: float) -> None:
    """Raise NoDataError unless `service` knows vulnerabilities of VULNERABLE."""
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        requirements = Path(folder) / "requirements.txt"
        requirements.write_text(VULNERABLE)
        audited = ask(service, requirements, deadline)
    if not any(package.get("vulns") for package in audited):
        raise NoDataError(f"has no vulnerabilities of {VULNERABLE}")


def ask(service: str, requirements: Path, deadline: float) -> list[dict[str, Any]]:
    """Return pip-audit's report of each package in `requirements`.

    `deadline` is a time of `time.monotonic`, in seconds. Raise NoDataError if there is no report by then.
    """
    options = [
        "--no-deps",
        "--disable-pip",
        "--format",
        "json",
        "--progress-spinner",
        "off",
        "--timeout",
        "10",
    ]
    command = [sys.executable, "-m", "pip_audit", "-s", service, "-r", str(requirements), *options]
    left_s = max(deadline - time.monotonic(), 0)
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=left_s)
    except subprocess.TimeoutExpired as error:
        raise NoDataError("no answer in time") from error
    # pip-audit ends with 1 for vulnerabilities and for errors alike. After an error, it prints no report.
    if not ended.stdout:
        raise NoDataError(
            (ended.stderr.strip().splitlines() or [f"pip-audit ended with {ended.returncode}"])[-1]
        )
    try:
        packages: list[dict[str, Any]] = json.loads(ended.stdout)["dependencies"]
    except (ValueError, KeyError, TypeError) as error:
        raise NoDataError(f"pip-audit printed no report: {ended.stdout.strip()[:80]!r}") from error
    return packages


def judge(audited: list[dict[str, Any]]) -> int:
    """Print the vulnerabilities, and return the exit code."""
    found = list(vulnerabilities(audited))
    for line, _ in found:
        print(line)
    unknown = [package["name"] for package in audited if "vulns" not in package]
    print(
        f"Audited {len(audited) - len(unknown)} packages. Not known to the service: {', '.join(unknown) or 'none'}."
    )
    return int(any(fails for _, fails in found))


def vulnerabilities(audited: list[dict[str, Any]]) -> Iterator[tuple[str, bool]]:
    """Yield a line for each vulnerability, and whether it fails the audit."""
    for package in audited:
        for vulnerability in package.get("vulns", []):
            ids = [vulnerability["id"], *vulnerability["aliases"]]
            fixes = vulnerability["fix_versions"]
            reason = next((EXCEPTIONS[name] for name in ids if name in EXCEPTIONS), None)
            remedy = (
                f"excepted: {reason}" if reason else f"fixed in {', '.join(fixes)}" if fixes else "no fix yet"
            )
            yield (
                f"{package['name']} {package['version']}: {', '.join(ids)}, {remedy}",
                bool(fixes and not reason),
            )


if __name__ == "__main__":
    sys.exit(main())
