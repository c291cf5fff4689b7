"""The path of the README in the environments that people have: each step works, or one sentence says what is missing and what to do.

`serve`, `init`, `test`, `deploy`, `invoke`, a job, a restart of the gateway, and `invoke` again. No step may print a traceback,
end by a signal or hang.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.timeout(600)
COMMAND = (sys.executable, "-m", "pilotflame.runtime.cli")
EVENT, ANSWER = '{"name": "Zoë → Ada 🔥"}', {"greeting": "Hello, Zoë → Ada 🔥."}
LIMIT_S = 60.0
# The user 12345 has no passwd entry, and none of the rights of root. Files of this process belong to this user.
UNPRIVILEGED = ("unshare", "-U", "--map-user=12345", "--map-group=0")
# Use a separate user, because the kernel counts the processes of each user. The user may read this Python environment.
ALONE = ("setpriv", "--reuid=54321", "--clear-groups", "--inh-caps=+dac_override,+fowner", "--ambient-caps=+dac_override,+fowner")  # fmt: skip
FULL = 'mkdir -p "{root}/state" && mount -t tmpfs -o size={size} none "{root}/state" && exec "$@"'
IPV6 = "ip link set lo up && ip addr del 127.0.0.1/8 dev lo && ip -6 addr show lo | grep -q ::1 && echo made && exec cat"
PAST = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *at) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, at);
    if (clock == CLOCK_REALTIME) at->tv_sec -= 800000000;
    return failed;
}
time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
"""
Preparation = Callable[[Path, contextlib.ExitStack], str]


def _prints_at_start(root: Path, _stack: contextlib.ExitStack) -> str:
    site = root / "site"
    site.mkdir()
    text = "import sys\nprint('a line of the cluster', flush=True)\nprint('another line', file=sys.stderr)\n"
    (site / "sitecustomize.py").write_text(text)
    return str(site)


def _read_only(root: Path, _stack: contextlib.ExitStack) -> str:
    folder = root / "read-only"
    folder.mkdir(mode=0o555)
    return str(folder)


def _of_another_user(root: Path, _stack: contextlib.ExitStack) -> str:
    """Give the folder of the test to the user of `ALONE`."""
    if os.geteuid() == 0:
        root.parent.chmod(0o711)
        os.chown(root, 54321, -1)
        os.chown(root / "work", 54321, -1)
    return ""


def _long(root: Path, _stack: contextlib.ExitStack) -> str:
    folder = root / ("job" * 40)
    folder.mkdir()
    return str(folder)


def _clock(root: Path, _stack: contextlib.ExitStack) -> str:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler is installed")
    library, source = root / "past.so", root / "past.c"
    source.write_text(PAST)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    return str(library)


def _ipv6_only(_root: Path, stack: contextlib.ExitStack) -> str:
    """Return the id of a process in a network with IPv6 only, which stays until the end of the test."""
    words = ["unshare", "-n", "sh", "-c", IPV6]
    holder = stack.enter_context(subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    if holder.stdout is None or not holder.stdout.readline():
        pytest.skip("this machine gives the test no network of its own")
    return str(holder.pid)


class Environment(NamedTuple):
    """How each process of the path starts, and which steps are refused.

    In texts, `{root}` is the folder of the test, and `{made}` is the text that `prepare` has returned.
    """

    name: str
    variables: Mapping[str, str | None] = {}
    """None: the variable is not set."""
    code: str = ""
    """Python that runs in each process before the command."""
    words: tuple[str, ...] = ()
    """The words before each command."""
    serve: tuple[str, ...] = ("--state-dir", "{root}/state")
    prepare: Preparation = lambda _root, _stack: ""
    refused: Mapping[str, str] = {}
    """For each step that is refused, a pattern of its error message."""


def closed(*numbers: int) -> str:
    return "; ".join(f"os.close({number})" for number in numbers)


def mounted(size: str) -> tuple[str, ...]:
    return "unshare", "-rm", "sh", "-c", FULL.replace("{size}", size), "sh"


def limited(what: str, value: int) -> str:
    return f"resource.setrlimit(resource.RLIMIT_{what}, ({value}, {value}))"


NO_HOME = {"HOME": None, "XDG_CACHE_HOME": None, "XDG_STATE_HOME": None, "USER": None, "LOGNAME": None}
OF_A_CLUSTER = {
    "PYTHONPATH": "{made}", "LD_PRELOAD": "/gone/library.so libm.so.6", "SSL_CERT_FILE": "/gone/cert.pem", "SSL_CERT_DIR": "/gone",
    "NO_PROXY": None, "no_proxy": None,
    **dict.fromkeys(("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"),
}  # fmt: skip
GONE = "os.mkdir(f'{root}/{os.getpid()}'); os.chdir(f'{root}/{os.getpid()}'); os.rmdir(os.getcwd())"
SIGNALS = (
    "signal.signal(signal.SIGCHLD, signal.SIG_IGN); signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGPIPE, signal.SIGCHLD, signal.SIGTERM})"
)
OTHER_NETWORK = ("nsenter", "--net=/proc/{made}/ns/net")
ENVIRONMENTS = [
    Environment("stdout and stderr are closed", code=closed(1, 2)),
    Environment("stderr is closed", code=closed(2)),
    Environment("stdin, stdout and stderr are closed", code=closed(0, 1, 2)),
    Environment("a uid without a passwd entry, no HOME", NO_HOME, words=UNPRIVILEGED),
    Environment(
        "the same, and no folder is named", NO_HOME, words=UNPRIVILEGED, serve=(),
        refused={"serve": "Set HOME or PILOTFLAME_STATE_DIR"},
    ),
    Environment(
        "HOME and the current folder are read-only", {"HOME": "{made}"}, words=UNPRIVILEGED, code="os.chdir('{made}')",
        prepare=_read_only,
    ),
    Environment(
        "HOME is read-only, and no folder is named", {"HOME": "{made}"}, words=UNPRIVILEGED, serve=(),
        prepare=_read_only, refused={"serve": "Permission denied. Set PILOTFLAME_STATE_DIR to a folder"},
    ),
    Environment("the variables of a cluster, half of them gone", OF_A_CLUSTER, prepare=_prints_at_start),
    Environment("64 open files", code=limited("NOFILE", 64)),
    Environment("256 open files, umask 077", code=limited("NOFILE", 256) + "; os.umask(0o077)"),
    Environment(
        "6 processes and threads", code=limited("NPROC", 6), words=ALONE, prepare=_of_another_user,
        refused={"serve": "ulimit -u", "test": "ulimit -u"},
    ),
    Environment(
        "100 MB of addresses", code=limited("AS", 100 << 20), refused={"serve": "ulimit -v", "test": "ulimit -v"}
    ),
    # By default, glibc reserves addresses for each processor.
    Environment("3 GB of addresses", {"MALLOC_ARENA_MAX": "2"}, code=limited("AS", 3 << 30)),
    Environment("TMPDIR is long", {"TMPDIR": "{made}"}, prepare=_long, refused={"test": "a shorter TMPDIR"}),
    Environment(
        "a state folder with other letters, no TMPDIR, umask 000", {"TMPDIR": "/gone"}, code="os.umask(0)",
        serve=("--state-dir", "{root}/the state, ‘größer’"),
    ),
    Environment("nohup in the locale POSIX", {"LANG": "C", "LC_ALL": "POSIX", "PYTHONUTF8": None}, words=("nohup",)),
    Environment("a terminal without Unicode", {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}),
    Environment("a current folder that is gone", code=GONE),
    Environment("a full state folder", words=mounted("64k"), refused={"serve": "full"}),
    Environment("a small state folder", words=mounted("32m"), refused={"deploy": "full"}),
    Environment("IPv6 only", words=OTHER_NETWORK, prepare=_ipv6_only, refused={"serve": "Use --host ::1"}),
    Environment(
        "IPv6 only, and --host ::1", words=OTHER_NETWORK, prepare=_ipv6_only,
        serve=("--host", "::1", "--state-dir", "{root}/state"),
    ),
    Environment("a clock in the past", {"LD_PRELOAD": "{made}"}, prepare=_clock),
    Environment("signals that the parent blocks or ignores", code=SIGNALS),
    Environment(
        "setsid, a terminal that can do nothing, optimized Python",
        {"TERM": "dumb", "COLUMNS": "1", "PYTHONOPTIMIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"}, words=("setsid",),
    ),
    Environment("no variables at all", dict.fromkeys(os.environ)),
]  # fmt: skip


class Walk:
    """The steps of the path, in an environment."""

    def __init__(self, environment: Environment, root: Path, made: str) -> None:
        self._environment, self._root, self._made = environment, root, made
        self.folder = root / "work" / "greeter"
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PILOTFLAME_")}
        given = {**kept, "TMPDIR": str(root), **environment.variables}
        self.variables = {name: self._filled(value) for name, value in given.items() if value is not None}

    def _filled(self, text: str) -> str:
        return text.replace("{root}", str(self._root)).replace("{made}", self._made)

    def command(self, *words: object) -> list[str]:
        environment, last = self._environment, [*COMMAND, *map(str, words)]
        if environment.code:
            code = f"import os, resource, signal, sys\nroot = {str(self._root)!r}\n{environment.code}\nos.execv(sys.argv[1], sys.argv[1:])"
            last = [sys.executable, "-I", "-S", "-c", code.replace("{made}", self._made), *last]
        return [*map(self._filled, environment.words), *last]

    def run(self, step: str, *words: object) -> str | None:
        """Return what a step prints on standard output; None if it is refused, as expected, or prints nothing that can be seen."""
        done = subprocess.run(
            self.command(step, *words), cwd=self.folder.parent, env=self.variables, stdin=subprocess.DEVNULL,
            capture_output=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
        if self.is_as_expected(step, done.returncode, done.stderr.decode()):
            return None
        return (
            done.stdout.decode(self.variables.get("PYTHONIOENCODING") or "utf-8")
            if "close(1)" not in self._environment.code
            else None
        )

    def is_as_expected(self, step: str, code: int, said: str) -> bool:
        """Check how a step has ended. Return True if it was refused."""
        assert "Traceback" not in said, said
        pattern = self._environment.refused.get(step)
        if pattern is None:
            assert code == 0, f"{step}: {code}: {said}"
            return False
        assert code in (1, 3), f"{step}: {code}: {said}"
        assert re.search(pattern, said), f"{step}: {said}"
        assert len(said.strip().splitlines()) == 1, said
        return True

    @contextlib.contextmanager
    def gateway(self) -> Iterator[str]:
        """Run the gateway, and yield its URL; "" if it is refused. At the end, let it drain."""
        said = self._root / "said"
        reading, writing = os.pipe()
        where = map(self._filled, self._environment.serve)
        words = self.command("serve", "--port", 0, "--url-fd", writing, "--drain", 5, *where)
        with said.open("wb") as errors, os.fdopen(reading, "rb") as announced:
            process = subprocess.Popen(
                words, cwd=self.folder.parent, env=self.variables, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, stderr=errors, pass_fds=(writing,),
            )  # fmt: skip
            os.close(writing)
            try:
                ready, _, _ = select.select([announced], [], [], LIMIT_S)
                assert ready, f"no answer from serve: {said.read_text()}"
                url = announced.readline().decode().strip()
                if url:
                    self.variables["PILOTFLAME_URL"] = url
                    assert "serve" not in self._environment.refused
                yield url
                if url:
                    process.terminate()
                code = process.wait(LIMIT_S)
                assert self.is_as_expected("serve", code, said.read_text()) is not bool(url)
            finally:
                process.kill()
                process.wait()

    def calls(self) -> None:
        answer = self.run("invoke", "greeter", EVENT)
        assert answer is None or json.loads(answer.splitlines()[-1]) == ANSWER

    def all(self) -> None:
        if self.run("init", self.folder) is None and not self.folder.exists():
            subprocess.run([*COMMAND, "init", self.folder], check=True, capture_output=True)
        with ThreadPoolExecutor(1) as threads, self.gateway() as url:
            tried = threads.submit(self.run, "test", self.folder)
            if url:
                self.run("deploy", self.folder)
                if "deploy" not in self._environment.refused:
                    self.calls()
                    job = self.run("run", "greeter", EVENT, "--wait")
                    assert job is None or json.loads(job.splitlines()[-1]) == ANSWER
            tried.result()
        if url and "deploy" not in self._environment.refused:
            with self.gateway():
                self.calls()


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=lambda one: one.name.replace(" ", "-"))
def test_the_path_of_the_readme(environment: Environment, short_tmp: Path) -> None:
    root = short_tmp / str(ENVIRONMENTS.index(environment))
    (root / "work").mkdir(parents=True)
    with contextlib.ExitStack() as stack:
        made = environment.prepare(root, stack)
        walk = Walk(environment, root, made)
        if environment.words:
            probe = [word.replace("{root}", str(root)).replace("{made}", made) for word in environment.words]
            if (
                shutil.which(probe[0]) is None
                or subprocess.run([*probe, "true"], capture_output=True, check=False).returncode
            ):
                pytest.skip("this machine cannot make the environment")
        walk.all()
