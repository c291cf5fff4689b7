"""Install packages into this interpreter's environment with uv, and refuse files that differ from hashes.txt.

    .venv/bin/python infra/install.py -c constraints.txt '.[test]'

`uv pip install` gets the arguments, and says what it downloads and how long that takes. A package without a line in hashes.txt is not compared. pip is no
substitute if uv fails: as soon as one requirement has a hash, pip demands hashes of all, and a folder has none.

uv does not read pip's configuration, so pip's package sources, certificates and timeout become uv's environment
variables. Without a source of your own, torch comes from PyTorch's CPU index: PyPI's torch requires gigabytes of CUDA
packages. `UV_TORCH_BACKEND=auto` installs the build for this machine's GPU.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HASHES = Path(__file__).with_name("hashes.txt")
# By setting of pip: uv's variable, and the separator of its values.
VARIABLES = {
    "cert": ("SSL_CERT_FILE", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "default-timeout": ("UV_HTTP_TIMEOUT", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "timeout": ("UV_HTTP_TIMEOUT", " "),
    "trusted-host": ("UV_INSECURE_HOST", " "),
}
SOURCES = {"extra-index-url", "find-links", "index-url"}
# Sections of pip's configuration; each overrides the one before.
SECTIONS = ("global", "install", ":env:")
PIP = [sys.executable, "-m", "pip"]


def main(arguments: Sequence[str]) -> int:
    """Run uv, and return its exit code."""
    uv = Path(sys.executable).with_name("uv")
    options = ["--python", sys.executable, "--verify-hashes", "--constraint", str(HASHES)]
    environment = uv_environment(pip_settings(), os.environ)
    return subprocess.run(
        [uv, "pip", "install", *options, *arguments], env=environment, check=False
    ).returncode


def pip_settings() -> dict[str, str]:
    """Return pip's settings for `pip install`, from its files and its environment variables."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=True).stdout
    return parse_settings(listed)


def parse_settings(listed: str) -> dict[str, str]:
    """Return the settings in the output of `pip config list`. Its lines are `section.name='value'`."""
    found = dict[str, dict[str, str]]()
    for line in listed.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        found.setdefault(section, {})[name] = ast.literal_eval(value)
    return {name: value for section in SECTIONS for name, value in found.get(section, {}).items()}


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with pip's settings as uv's variables. Variables that are already set stay."""
    passed = {
        variable: separator.join(settings[name].split())
        for name, (variable, separator) in VARIABLES.items()
        if name in settings
    }
    # Compile at the installation, as pip does. With PYTHONDONTWRITEBYTECODE, each process would otherwise
    # compile the modules that it imports.
    passed["UV_COMPILE_BYTECODE"] = "1"
    if SOURCES & settings.keys():
        # Choose the best version of all indexes, as pip does, and not the best of the first index that has
        # the package.
        passed["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    else:
        passed["UV_TORCH_BACKEND"] = "cpu"
    return {**passed, **environment}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
