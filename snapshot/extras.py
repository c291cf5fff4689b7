"""Says in one sentence which optional package is missing, wherever one is needed.

The packages of an extra may be installed while a process runs: they are found at the next attempt.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import PackageMissing

# By package: the extra of pilotflame that brings it.
EXTRAS = {
    "boto3": "s3",
    "google.auth": "clouds",
    "numpy": "torch",
    "obstore": "clouds",
    "safetensors": "torch",
    "tensorizer": "tensorizer",
    "torch": "torch",
}


@contextmanager
def needs(subject: str, *packages: str) -> Iterator[None]:
    """Let the block import what needs `packages`. Raise PackageMissing if one cannot be imported.

    `subject` says in the error what needs them.
    """
    if not all(package in sys.modules for package in packages):
        # Otherwise Python may not see a package that was installed since it last looked into the folder.
        importlib.invalidate_caches()
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(subject, packages[0], error) from error


def is_installed(package: str) -> bool:
    """Return whether a package can be imported now, without importing it."""
    importlib.invalidate_caches()
    return package in sys.modules or importlib.util.find_spec(package) is not None


def missing(subject: str, package: str, cause: ModuleNotFoundError | None = None) -> PackageMissing:
    """Return the error that `subject` needs a package that is not installed."""
    found = (cause.name or "").partition(".")[0] if cause is not None else ""
    also = f" ({found} is missing)" if found and found != package else ""
    # A plugin of another package may need one that no extra of ours brings.
    extra = EXTRAS.get(found) or EXTRAS.get(package, "")
    wanted = f"'pilotflame[{extra}]'" if extra else package
    return PackageMissing(
        f"{subject} needs {package}, which is not installed{also}.",
        remedy=f"Run `pip install {wanted}` with {sys.executable}, and try again; no restart is needed.",
        details={"package": found or package, "extra": extra},
    )
