"""Runs Starlette's own tests with a test client that calls apps through pilotflame's parts (infra/starlette_bridge.py).

    make starlette
    python infra/starlette_tests.py --source FOLDER     # with a folder that has the tests already

Without --source, pip downloads the source distribution of the installed version. Only the tests on asyncio run, because workers run
asyncio. The script prints how many tests passed, failed and were skipped, and why each excluded test cannot run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CLIENT = "It tests the test client itself."
DEBUG = "It reads `http.response.debug`, by which the test client looks into the app."
TRAILERS = "It sends trailers, an extension of ASGI that is not offered here, nor by uvicorn."
EXCLUDED = {
    "tests/test_testclient.py": CLIENT,
    "tests/test_templates.py::test_templates": DEBUG,
    "tests/test_templates.py::test_calls_context_processors": DEBUG,
    "tests/test_templates.py::test_template_with_middleware": DEBUG,
    "tests/test_templates.py::test_templates_with_directories": DEBUG,
    "tests/test_templates.py::test_templates_with_environment": DEBUG,
    "tests/middleware/test_gzip.py::test_gzip_trailers": TRAILERS,
    "tests/middleware/test_gzip.py::test_gzip_excluded_content_type_trailers": TRAILERS,
    "tests/test_requests.py::test_request_send_push_promise": "It sends a push promise, which HTTP/1.1 does not have.",
    "tests/test_websockets.py::test_receive_wrong_message_type": "It sends a message that no caller can send.",
    "tests/test_staticfiles.py::test_staticfiles_with_invalid_dir_permissions_returns_401": "It fails for the user root, also"
    " without pilotflame.",
}
"""By the beginning of the names of tests: why they cannot run."""
# Plugins of pytest that would change the tests or the event loop.
WITHOUT = ("asyncio", "schemathesis", "cov", "cacheprovider", "xdist")


def download(version: str, folder: Path) -> Path:
    """Return the unpacked source distribution."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "starlette"]
    subprocess.run([*command, "--dest", str(folder), f"starlette=={version}"], check=True)
    [archive] = folder.glob("starlette-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(folder, filter="data")
    return folder / f"starlette-{version}"


def run(source: Path) -> int:
    """Run the tests, and return pytest's exit status."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-o", "addopts=", "-p", "starlette_bridge"]
    command += [part for name in WITHOUT for part in ("-p", f"no:{name}")]
    command += [
        part
        for name in EXCLUDED
        for part in (f"--ignore={name}" if name.endswith(".py") else f"--deselect={name}",)
    ]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    return subprocess.run(
        [*command, "-k", "not trio", "tests"], cwd=source, env=environment, check=False
    ).returncode


def main() -> int:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--source", type=Path, help="a folder with Starlette's source and tests")
    given = made.parse_args().source
    version = importlib.metadata.version("starlette")
    print(f"Starlette {version}; excluded are:")
    for name, reason in EXCLUDED.items():
        print(f"  {name}: {reason}")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory(prefix="pf-starlette-") as folder:
        return run(given or download(version, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
