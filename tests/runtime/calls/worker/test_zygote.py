"""The zygote and its forks: shared and separate state, and which processes end after which deaths."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from live import gateway_here, gateway_process, gone
from pilotflame.runtime.calls.worker.zygote import MemoryKills, first_that_tells

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_what_build_made_is_shared_and_forks_differ(deploy):
    source = """
import os, random
import numpy
made = []
def build(context):
    made.append(os.getpid())
    return {"big": bytes(1 << 20)}
def handler(event, context):
    return {"pid": os.getpid(), "ppid": os.getppid(), "made": made, "big": len(context.state["big"]),
            "random": random.random(), "numpy": float(numpy.random.random()), "function": context.function}
"""
    function = await deploy(source, {"scale.idle_timeout_s": 0})
    answers = []
    for _ in range(3):
        answers.append(await function.answer())
        await gone(answers[-1]["pid"])
        await function.settled(ready=0)
    assert {answer["ppid"] for answer in answers} == {answers[0]["made"][0]}
    assert all(answer["big"] == 1 << 20 for answer in answers)
    for key in ("pid", "random", "numpy"):
        assert len({answer[key] for answer in answers}) == 3


async def test_a_zygote_holds_one_thread(deploy):
    torch_or_not = "try:\n    import torch\nexcept ImportError:\n    pass\n"
    function = await deploy(torch_or_not + "import os\ndef handler(event):\n    return os.getppid()")
    zygote = psutil.Process(await function.answer())
    assert zygote.num_threads() == 1
    assert zygote.parent().num_threads() == 1


async def test_the_kernel_ends_functions_before_the_gateway(deploy):
    """When memory runs out, the kernel kills the process with the highest score. Workers inherit the score of their parent."""
    function = await deploy(
        "from pathlib import Path\ndef handler(event):\n    return Path('/proc/self/oom_score_adj').read_text()"
    )
    own = int(Path("/proc/self/oom_score_adj").read_text())
    rows = (await function.status(memory=True))["processes"]
    scores = [int(Path(f"/proc/{row['pid']}/oom_score_adj").read_text()) for row in rows]
    assert min(scores, default=0) > own
    assert int(await function.answer()) > own


async def test_all_processes_end_with_a_killed_gateway(state):
    async with gateway_process(state) as gateway:
        source = "import gate, os\ndef handler(event):\n    return os.getpid()"
        functions = [await gateway.deploy(source, {"scale.min": 2}) for _ in range(2)]
        for function in functions:
            await function.settled(ready=2)
        assert gateway.process is not None
        processes = psutil.Process(gateway.process.pid).children(recursive=True)
        assert len(processes) >= 1 + 2 * 3
        gateway.process.kill()
        for process in processes:
            await gone(process.pid)
    async with gateway_here(state) as gateway:  # the next gateway can use the state
        assert isinstance(await gateway.function(functions[0].name).answer(), int)


async def test_running_workers_end_with_a_killed_gateway(state):
    async with gateway_process(state) as gateway:
        function = await gateway.deploy("import time\ndef handler(event):\n    time.sleep(3600)", check=False)
        await function.client.post(f"/v2/{function.name}/warmup")
        await function.settled(ready=1)
        (worker,) = await function.pids("worker")
        writer = await _send_and_forget(gateway, function.path)
        await function.settled(ready=1, in_flight=1)
        assert gateway.process is not None
        os.kill(gateway.process.pid, signal.SIGKILL)
        await gone(worker)
        writer.close()


async def _send_and_forget(gateway, path: str):
    _, writer = await asyncio.open_connection(*gateway.address)
    writer.write(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n1".encode())
    return writer


async def test_weights_and_progress_bars_at_import_are_forked_and_the_log_says_how_to_share_them(deploy):
    """Make a torch module at import, with a progress bar, as `AutoModel.from_pretrained` does."""
    pytest.importorskip("torch")
    source = """
import os, torch
from tqdm import tqdm
for _ in tqdm(range(2), disable=False):
    model = torch.nn.Linear(2048, 2048)
def handler(event):
    return os.getppid()
"""
    function = await deploy(source)
    assert function.described["warnings"] == []
    (zygote,) = await function.pids("zygote")
    assert await function.answer() == zygote
    lines = [line["text"] for line in await function.lines()]
    (at,) = [
        number for number, line in enumerate(lines) if line.startswith("`model` in handler.py holds 16 MiB")
    ]
    assert lines[at + 3 : at + 8] == [
        "    def build(context):",
        "        with context.snapshot.skeleton():",
        "            model = Linear(...).eval()",
        "        context.snapshot.restore(model)",
        "        return model",
    ]


async def test_a_model_of_transformers_that_is_loaded_at_import_is_forked(deploy, tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        num_hidden_layers=1, hidden_size=256, num_attention_heads=2, vocab_size=9000
    )
    await asyncio.to_thread(transformers.BertModel(config).save_pretrained, tmp_path)
    source = f"""
import os
from transformers import AutoModel
model = AutoModel.from_pretrained({str(tmp_path)!r})
def handler(event):
    return [os.getppid(), model.config.hidden_size]
"""
    function = await deploy(source, {"timeout_s": 120.0})
    assert function.described["warnings"] == []
    assert await function.answer() == [*await function.pids("zygote"), 256]
    text = "\n".join(line["text"] for line in await function.lines())
    assert text.count("were loaded at import") == 1
    assert "model = AutoModel.from_config(AutoConfig.from_pretrained(context.snapshot.path)).eval()" in text


async def test_each_kill_of_the_kernel_explains_one_end(tmp_path: Path):
    counter = tmp_path / "vmstat"
    counter.write_text("nr_free_pages 3\noom_kill 4\n")
    assert first_that_tells((str(tmp_path / "none"), str(counter), "/proc/vmstat")) == str(counter)
    kills = MemoryKills(str(counter))
    assert not kills.explain()
    # Two children were killed before the first was reaped.
    counter.write_text("nr_free_pages 3\noom_kill 6\n")
    assert [kills.explain() for _ in range(3)] == [True, True, False]
    counter.write_text("nr_free_pages 3\noom_kill 7\n")
    assert [kills.explain() for _ in range(2)] == [True, False]
    assert not MemoryKills(str(tmp_path / "none")).explain()


async def test_a_kill_by_somebody_else_is_not_taken_for_the_kernels(deploy):
    function = await deploy("import os\ndef handler(event):\n    os.kill(os.getpid(), 9)")
    error = await function.error()
    assert "SIGKILL" in error["message"]
    assert error["type"] == "worker_died"
    # The kernel may have killed a process of another test meanwhile. Then the message names memory only as a possible cause.
    assert "memory" not in error["message"] or "perhaps" in error["message"]


FORKING = """
import os, socket

def forked(context):
    global threads, sockets, child, kept
    threads = len(os.listdir("/proc/self/task"))
    links = [f"/proc/self/fd/{one}" for one in os.listdir("/proc/self/fd") if int(one) > 2]
    sockets = [os.readlink(link) for link in links if os.path.exists(link) and "socket:" in os.readlink(link)]
    kept, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        kept.close()
        # Ends with the worker.
        theirs.recv(1)
        os._exit(0)

def handler(event):
    return {"threads": threads, "sockets": sockets, "child": child, "pid": os.getpid()}
"""


async def test_the_hook_forked_runs_in_each_worker_before_its_threads_and_its_connection(deploy):
    function = await deploy(FORKING)
    first = await function.answer()
    assert (first["threads"], first["sockets"]) == (1, [])
    assert await function.answer() == first
    os.kill(first["pid"], signal.SIGKILL)
    await gone(first["child"])
    second = await function.answer()
    assert second["child"] != first["child"]


async def test_a_hook_forked_that_fails_is_told_at_the_deploy(deploy):
    why = r"forked\(context\) failed at handler.py, line 3: ValueError: no room"
    with pytest.raises(AssertionError, match=why):
        await deploy("def handler(event): pass\ndef forked():\n    raise ValueError('no room')\n")


async def test_a_package_that_the_base_cannot_import_fails_the_handlers_import_by_name(deploy):
    """Functions that import vLLM share a base that imports vLLM. This test needs an environment without vLLM."""
    with pytest.raises(
        AssertionError, match=r"handler.py, line 1: ModuleNotFoundError: No module named 'vllm'"
    ):
        await deploy("import vllm\ndef handler(event): pass\n")
