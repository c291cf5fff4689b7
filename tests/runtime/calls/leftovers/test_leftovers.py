"""The search for leftovers of an import, its messages, and libraries that leave nothing. Each import runs in a fork."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from interpreter import program
from pilotflame.runtime.node.launching.process_launcher import SINGLE_THREADED

# Imports each module of the folder in a fork, and prints {module: reason}.
IMPORTS = """
import gc, json, os, sys, tempfile
os.environ.update(json.loads(sys.argv[1]))
gc.disable()
sys.path.insert(0, "")
import numpy
from pathlib import Path
from pilotflame.runtime.calls.leftovers import descriptors, leftovers
from pilotflame.runtime.calls.leftovers.generators import Generators
from pilotflame.runtime.calls.leftovers.working_folder import CACHES
found, generators = {}, Generators()
generators.keep()
for name in sys.argv[2:]:
    read, write = os.pipe()
    if os.fork() == 0:
        os.environ.update(dict.fromkeys(CACHES, tempfile.mkdtemp()))
        os.environ["TMPDIR"], tempfile.tempdir = tempfile.mkdtemp() + "/tmp", None
        os.mkdir(os.environ["TMPDIR"])
        with leftovers.watch(generators) as watch:
            module = __import__(name)
        reason = watch.find(Path.cwd(), Path(os.environ["TMPDIR"]), getattr(module, "STATE", None), Path.cwd() / "kept").reason(1.5)
        os.write(write, reason.encode())
        os._exit(0)
    os.close(write)
    with open(read) as file:
        found[name] = file.read()
    os.wait()
print(json.dumps(found))
"""

# Each case: the text of a module, and a part of the reason why the module cannot be forked; "" if it can be.
CASES = {
    "nothing": ("X = 1", ""),
    "read": ("F = open(__file__)\nF.readline()", ""),
    "removed": ("import os\nF = open('gone', 'w')\nF.close()\nF = open('gone')\nos.remove('gone')", ""),
    "folder": ("import os\nF = os.open('.', os.O_RDONLY)", ""),
    "own": ("import fcntl\nF = open('kept/lock', 'w')\nfcntl.flock(F, fcntl.LOCK_SH)", ""),
    "append": ("F = open('log', 'a')", ""),
    "null": ("import os\nF = open(os.devnull, 'r+b', 0)\nG = open('/dev/urandom', 'rb')", ""),
    "closed": ("import socket\nclass A: pass\na = A()\na.a = a\na.s = socket.socket()\ndel a", ""),
    "tidy": ("import tempfile\nwith tempfile.TemporaryDirectory() as D: pass", ""),
    "ended": ("import subprocess\nsubprocess.run(['true'])", ""),
    "forgotten": ("import os, subprocess\nos.waitid(os.P_PID, subprocess.Popen(['true']).pid, os.WEXITED | os.WNOWAIT)", ""),
    "session": ("import http.client\nC = http.client.HTTPConnection('127.0.0.1', 9)", ""),
    "chosen": ("import random\nrandom.seed(1)\nR = random.Random('text')\nS = random.Random()", ""),
    "restored": ("import random\nS = random.getstate()\nrandom.seed(b'x')\nrandom.setstate(S)", ""),
    "restored_numpy": ("from numpy import random\nS = random.get_state()\nrandom.seed(2**32 - 1)\nrandom.set_state(S)", ""),
    "written": ("F = open('out', 'w')", "`F` in written.py holds {}/out, open for writing. Each start"),
    "locked": ("import fcntl\nF = open(__file__)\nfcntl.flock(F, fcntl.LOCK_SH)", "`F` in locked.py holds a lock of {}/locked.py"),
    "socket_": ("import socket\nclass A:\n    s = socket.socket()", "`A` in socket_.py holds a socket"),
    "dialled": (
        "import socket\nS = socket.create_server(('127.0.0.1', 0))\nC = [{'c': socket.create_connection(S.getsockname())}]",
        "`C` in dialled.py holds a connection to 127.0.0.1:",
    ),
    "built": ("import select\nSTATE = {'e': select.epoll()}", "`STATE` in built.py holds a selector"),
    "pipe": ("import os\nos.pipe()", "importing pipe left a pipe"),
    "outer": ("import pipe", "importing pipe left a pipe"),
    "loop": ("import asyncio\nL = asyncio.new_event_loop()", "`L` in loop.py holds a selector, a socket"),
    "child": ("import subprocess\nP = subprocess.Popen(['cat'], stdin=-1, stdout=-3, stderr=-3)", "the process cat"),
    "waited": (
        "import os, subprocess\nP = subprocess.Popen(['true'])\nos.waitid(os.P_PID, P.pid, os.WEXITED | os.WNOWAIT)",
        "`P` in waited.py holds a process that has ended",
    ),
    "memory": ("import mmap\nM = mmap.mmap(-1, 9)", "left shared memory"),
    "semaphore": ("import multiprocessing\nL = multiprocessing.Lock()", "left shared memory"),
    "temporary": ("import tempfile\nD = tempfile.mkdtemp()", "left the temporary file or folder "),
    "path": ("import os\nC = {'out': [os.environ['TMPDIR'] + '/x']}", "`C` in path.py holds the path "),
    "variable": ("import os\nos.environ['OUT'] = os.environ['TMPDIR'] + '/x'", "the environment variable OUT holds the path "),
    "copied": ("import os\nE = dict(os.environ)", ""),
    "replaced": ("import os\nOUT = os.environ['TMPDIR'] + '/x'", ""),
    "liar": ("class Liar:\n    @property\n    def __class__(self): raise RuntimeError('no')\nL = [Liar()]", ""),
    "lazy": ("import sys, types\nclass Lazy(types.ModuleType):\n    def __getattr__(self, name): raise ImportError(name)\nsys.modules['lazy_one'] = Lazy('lazy_one')", ""),
    "unhashable": ("import random\nclass R(random.Random):\n    __hash__ = None\nG = R()", "cannot be searched (TypeError"),
    "timer": ("import signal\nsignal.setitimer(signal.ITIMER_REAL, 100)", "left a timer"),
    "thread": ("import threading\nthreading.Thread(target=threading.Event().wait, daemon=True, name='waits').start()", "importing thread started threads"),
    "clock": ("import random, time\nR = random.Random(time.time())", "`R` in clock.py holds a seed that may differ at each import (Random)"),
    "seconds": ("import random, time\nrandom.seed(int(time.time()))", "a seed that may differ"),
    "process": ("import os, numpy\nnumpy.random.seed(os.getpid())", "a seed that may differ"),
    "entropy": ("import secrets, numpy\nR = numpy.random.default_rng(secrets.randbits(128))", "`R` in entropy.py holds a seed"),
    "sequence": ("import numpy\nS = numpy.random.SeedSequence()", "`S` in sequence.py holds a seed"),
}  # fmt: skip


def test_reasons_name_the_variable_the_thing_and_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for name, (text, _) in CASES.items():
        (tmp_path / f"{name}.py").write_text(text)
    found = program(IMPORTS, json.dumps(SINGLE_THREADED), *CASES, cwd=tmp_path)
    for name, (_, expected) in CASES.items():
        assert expected.format(tmp_path) in found[name], (name, found[name])
        assert bool(expected) is bool(found[name]), (name, found[name])
    assert found["written"].endswith(
        "Each start of a worker imports and builds again, which took 1.50 s here."
        " To have them forked, put what makes `F` into setup(context) instead"
    )
    assert "put `import pipe` into setup(context) instead" in found["outer"]


# Libraries that many handlers import. The test skips libraries that are not installed.
LIBRARIES = (
    "PIL.Image", "accelerate", "aiohttp", "boto3", "cryptography", "fastapi", "flask", "google.auth", "grpc", "httpx", "huggingface_hub",
    "jinja2", "joblib", "matplotlib.pyplot", "networkx", "numpy", "onnx", "onnxruntime", "openai", "orjson", "pandas", "peft", "polars",
    "prometheus_client", "pyarrow", "pydantic", "redis", "requests", "runpod", "safetensors.torch", "scipy.stats", "sentence_transformers",
    "sentry_sdk", "sklearn.ensemble", "sqlalchemy", "starlette", "sympy", "tokenizers", "torch", "tqdm.auto", "transformers.pipelines",
    "urllib3", "uvloop", "websockets", "yaml",
)  # fmt: skip


def installed(name: str) -> bool:
    return importlib.util.find_spec(name.partition(".")[0]) is not None


@pytest.mark.slow
def test_libraries_leave_nothing_that_keeps_workers_from_being_forked(tmp_path: Path) -> None:
    names = [name for name in LIBRARIES if installed(name)]
    assert len(names) >= 20
    found = program(IMPORTS, json.dumps(SINGLE_THREADED), *names, cwd=tmp_path)
    assert found == dict.fromkeys(names, "")
