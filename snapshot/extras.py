"""Raises an error that names the missing optional package and the command that installs it.

If the package is installed while the process runs, the next attempt finds it without a restart.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..errors import PackageMissing

# Maps each package to the extra of pilotflame that installs it.
EXTRAS = {
    "boto3": "s3",
    "confluent_kafka": "kafka",
    "cryptography": "signing",
    "fastdigest": "statistics",
    "google.auth": "clouds",
    "grpc": "oip",
    "numpy": "torch",
    "obstore": "clouds",
    "peft": "transformers",
    "pyarrow": "parquet",
    "safetensors": "torch",
    "tensorizer": "tensorizer",
    "torch": "torch",
}


@contextmanager
def needs(subject: str, *packages: str) -> Iterator[None]:
    """Let the block import modules that need `packages`. Raise PackageMissing if an import fails.

    The error says that `subject` needs the first of `packages`.
    """
    if not all(package in sys.modules for package in packages):
        # Python caches the contents of folders. Without this call, it may not find a package that was installed later.
        importlib.invalidate_caches()
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing(subject, packages[0], error) from error


def is_installed(package: str) -> bool:
    """Return whether a package can be imported now, without importing it."""
    importlib.invalidate_caches()
    return sys.modules.get(package) is not None or importlib.util.find_spec(package) is not None


def require(packages: Mapping[str, str]) -> None:
    """Raise PackageMissing if one of `packages` is not installed. The keys are the subjects that need the packages."""
    for subject, package in packages.items():
        if not is_installed(package):
            raise missing(subject, package)


def missing(subject: str, package: str, cause: ModuleNotFoundError | None = None) -> PackageMissing:
    """Return the error for `subject`, which needs a package that is not installed."""
    found = (cause.name or "").partition(".")[0] if cause is not None else ""
    also = f" ({found} is missing)" if found and found != package else ""
    # A plugin may need a package that no extra of pilotflame installs. Then the remedy names the package itself.
    extra = EXTRAS.get(found) or EXTRAS.get(package, "")
    wanted = f"'pilotflame[{extra}]'" if extra else package
    return PackageMissing(
        f"{subject} needs {package}, which is not installed{also}.",
        remedy=f"Run `pip install {wanted}` with {sys.executable}, and try again; no restart is needed.",
        details={"package": found or package, "extra": extra},
    )
