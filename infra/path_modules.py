"""List the modules of pilotflame that a cold plain request executes, in gateway, zygote and worker.

    python infra/path_modules.py [--json]

Every interpreter of a new environment installs a hook of `sys.setprofile` at its start, which notes when code of a module was
called last. After one request to a function at zero, each process writes its notes on SIGUSR2. A module counts if its code was
called after the request was sent. Module bodies do not count: they run at imports, before the request.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

HOOK = """
import json, os, signal, sys, threading, time

last, root = {}, os.path.dirname(os.path.abspath(__file__))


def hook(frame, event, _argument):
    if event == "call":
        name = frame.f_globals.get("__name__", "")
        if name.startswith("pilotflame") and frame.f_code.co_name != "<module>":
            last[name] = time.monotonic()


def write(*_):
    sys.setprofile(None)
    path = os.path.join(root, "notes", str(os.getpid()))
    with open(path + ".part", "w") as file:
        json.dump(last, file)
    os.rename(path + ".part", path)


signal.signal(signal.SIGUSR2, write)
threading.setprofile(hook)
sys.setprofile(hook)
"""
HANDLER = "def handler(event):\n    return event\n"
SETTINGS = 'name = "plain"\n[scale]\nidle_timeout_s = 600\nstandby = false\n'
LIMIT_S = 60.0


def environment(folder: Path) -> Path:
    """Make an environment whose interpreters install the hook, with the packages of this one. Return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    packages = folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    (packages / "notes").mkdir()
    (packages / "noting_calls.py").write_text(HOOK)
    (packages / "a.pth").write_text(sysconfig.get_path("purelib"))
    (packages / "b.pth").write_text("import noting_calls\n")
    return folder / "bin" / "python"


def post(url: str, body: object) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as reply:
        found: bytes = reply.read()
    return found


def role_of(process: psutil.Process, gateway: psutil.Process) -> str:
    """Return what a process is, by the title that it has given itself."""
    if process == gateway:
        return "gateway"
    title = " ".join(process.cmdline())
    return next((role for role in ("worker", "zygote", "base", "fetcher") if role in title), title)


def measured(folder: Path) -> dict[str, list[str]]:
    """Send one request to a function at zero. Return the modules by process."""
    python, home = environment(folder / "env"), folder / "plain"
    home.mkdir()
    (home / "handler.py").write_text(HANDLER)
    (home / "pilotflame.toml").write_text(SETTINGS)
    command: list[str | Path] = [
        python,
        "-m",
        "pilotflame.runtime.cli",
        "serve",
        "--port",
        "0",
        "--json",
        "--state-dir",
        folder / "state",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = json.loads(server.stdout.readline())["url"]
            post(f"{url}/v1/functions?check=0", {"path": str(home)})
            time.sleep(2.0)
            sent_s = time.monotonic()
            assert post(f"{url}/invoke/plain", 7) == b"7"
            return read_notes(psutil.Process(server.pid), folder / "env", sent_s)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(LIMIT_S)


def read_notes(gateway: psutil.Process, env: Path, sent_s: float) -> dict[str, list[str]]:
    processes = {each.pid: role_of(each, gateway) for each in (gateway, *gateway.children(recursive=True))}
    notes = next(env.rglob("notes"))
    for pid in processes:
        os.kill(pid, signal.SIGUSR2)
    until_s, found = time.monotonic() + LIMIT_S, dict[str, list[str]]()
    while len(found) < len(processes) and time.monotonic() < until_s:
        time.sleep(0.05)
        for pid, role in processes.items():
            if (notes / str(pid)).exists():
                last = json.loads((notes / str(pid)).read_text())
                found[f"{role} {pid}"] = sorted(name for name, at_s in last.items() if at_s >= sent_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="pilotflame-path-") as folder:
        found = measured(Path(folder))
    if options.json:
        print(json.dumps(found))
        return
    for process, names in found.items():
        print(f"{process}: {len(names)}")
        print("\n".join(f"    {name.removeprefix('pilotflame.')}" for name in names))
    print(f"{len(set().union(*found.values()))} modules")


if __name__ == "__main__":
    main()
