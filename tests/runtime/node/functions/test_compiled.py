"""What torch.compile makes for a function is reused by its later workers, and by no other function. The compiler is real."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from live import Gate, Gateway, gateway_here, gateway_process, gone
from pilotflame.runtime.calls.worker.confinement import landlock_version

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: install g++"),
]

# Without vector instructions, inductor need not find out which of them the compiler has. This saves 8 of 18 s.
COMPILES = """
import os, torch
def setup(context):
    import torch._inductor.config as config
    config.cpp.simdlen = 1
    config.cpp_cache_precompile_headers = False
    compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()).eval())
    with torch.inference_mode():
        compiled(torch.zeros(2, 8))
def handler(event):
    from torch._dynamo.utils import counters
    found = counters["inductor"]
    return [found["fxgraph_cache_miss"], found["fxgraph_cache_hit"], os.environ["TORCHINDUCTOR_CACHE_DIR"]]
"""
FILES = """
import os, pathlib, torch
def handler(event):
    own = pathlib.Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    own.mkdir(exist_ok=True)
    if event.get("do") == "write":
        pathlib.Path(event.get("path") or own / "mine").write_text("x")
    elif event.get("do") == "list":
        return sorted(os.listdir(event.get("path") or own))
    return [str(own), os.environ["TRITON_CACHE_DIR"], os.environ["CUDA_CACHE_PATH"]]
"""
# Compiles as g++ does, but leaves the first kernel with only a part of its bytes, like a linker that is killed.
HALF_COMPILER = """#!{python} -S
import os, socket, subprocess, sys
arguments = sys.argv[1:]
code = subprocess.call(["{gxx}", *arguments])
target = arguments[arguments.index("-o") + 1] if "-o" in arguments else ""
if target.endswith(".main.so") and not os.path.exists("{mark}"):
    os.truncate(target, 1000)
    open("{mark}", "w").close()
    with socket.socket(socket.AF_UNIX) as link:
        link.connect(os.environ["GATE"])
        link.sendall(f"{{os.getpid()}} half\\n".encode())
        link.recv(1)
sys.exit(code)
"""


def patient(gateway: Gateway) -> Gateway:
    """Let deploys take as long as a compiler does on a busy machine."""
    gateway.client.timeout = 300
    return gateway


async def test_what_was_compiled_is_there_after_a_restart_and_nothing_of_a_killed_compiler(
    state: Path, gate: Gate, tmp_path: Path
) -> None:
    compiler = tmp_path / "g++"
    places = {"python": sys.executable, "gxx": shutil.which("g++"), "mark": tmp_path / "mark"}
    compiler.write_text(HALF_COMPILER.format(**places))
    compiler.chmod(0o755)
    settings = {"env.CXX": str(compiler), "scale.min": 1}
    async with gateway_process(state) as gateway:
        function = await patient(gateway).deploy(COMPILES, settings, name="f", gate=gate, check=False)
        arrival = await gate.next("half", limit_s=300)
        (library,) = (state / "compiled" / "f").rglob("*.main.so")
        assert gateway.process is not None
        # Kill all processes at once, as when a container ends. The worker is first, because it would see the end of its compiler.
        ends = [*await function.pids("worker"), arrival.pid, gateway.process.pid]
        for pid in ends:
            os.kill(pid, signal.SIGKILL)
        await gateway.process.wait()
        for pid in ends[:-1]:
            await gone(pid)
    assert library.exists()
    async with gateway_here(state, drain_s=1.0) as gateway:
        misses, hits, folder = await patient(gateway).function("f").answer()
        assert (misses, hits) == (1, 0)
        assert library.is_relative_to(folder)
        assert Path(folder).parents[1] == state / "compiled" / "f"
    async with gateway_here(state, drain_s=1.0) as gateway:
        function = patient(gateway).function("f")
        assert await function.answer() == [0, 1, folder]
        assert (await gateway.client.delete("/v1/functions/f")).is_success
        assert not list((state / "compiled").iterdir())


async def test_another_code_starts_empty_and_the_same_code_does_not(gateway: Gateway) -> None:
    first = await gateway.deploy(FILES)
    (folder, *_) = await first.answer({"do": "write"})
    assert await first.answer({"do": "list"}) == ["mine"]
    for code, found in ((f"{FILES}\n# changed", []), (FILES, ["mine"])):
        again = await gateway.deploy(code, name=first.name)
        assert await again.answer({"do": "list"}) == found
        assert ((await again.answer({}))[0] == folder) is bool(found)
    other = await gateway.deploy(FILES)
    assert await other.answer({"do": "list"}) == []


async def test_the_owner_may_choose_other_folders(gateway: Gateway, tmp_path: Path) -> None:
    function = await gateway.deploy(FILES, {"env.TRITON_CACHE_DIR": str(tmp_path)})
    inductor, triton, cuda = await function.answer({})
    assert triton == str(tmp_path)
    assert Path(inductor).parent == Path(cuda).parent
    assert Path(inductor).is_relative_to(gateway.state / "compiled" / function.name)


@pytest.mark.skipif(not landlock_version(), reason="this kernel has no Landlock")
async def test_private_functions_have_no_folder_and_reach_no_others(gateway: Gateway) -> None:
    one = await gateway.deploy(FILES)
    (folder, *_) = await one.answer({"do": "write"})
    other = await gateway.deploy(
        "import os\ndef handler(event):\n"
        "    return [os.environ.get('TORCHINDUCTOR_CACHE_DIR'), os.listdir(event)]",
        {"resources.files": "private"},
    )
    for path in (folder, str(gateway.state / "compiled")):
        assert "Permission denied" in (await other.error(path))["message"]
    assert "compiled" not in Path((await other.answer("/usr"))[0]).parts


async def test_a_function_without_torch_has_no_folder(gateway: Gateway) -> None:
    handler = "import os\ndef handler(event):\n    return os.environ.get('TORCHINDUCTOR_CACHE_DIR')"
    function = await gateway.deploy(handler)
    assert Path(await function.answer()).parent.name == "caches"
    assert not (gateway.state / "compiled" / function.name).exists()


async def test_torch_may_be_imported_by_another_module(gateway: Gateway) -> None:
    handler = "from other import *\n"
    function = await gateway.deploy(handler, files={"other.py": FILES})
    (folder, *_) = await function.answer({"do": "write"})
    assert Path(folder).is_relative_to(gateway.state / "compiled" / function.name)
    assert (Path(folder).parent / "boot").exists()


async def test_a_first_deploy_that_fails_leaves_no_folder(gateway: Gateway) -> None:
    failing = f"{FILES}\ndef setup(context):\n    handler({{'do': 'write'}})\n    raise ValueError('no')"
    response = await gateway.send(failing, name="failing")
    assert response.json()["error"]["type"] == "handler_setup_failed", response.text
    assert not (gateway.state / "compiled" / "failing").exists()
