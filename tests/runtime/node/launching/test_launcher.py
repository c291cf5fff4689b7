"""What launched processes get: a clean environment, few descriptors, a shared base."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import psutil
import pytest
from live import gateway_here
from pilotflame.runtime.calls.link.child import Child

pytestmark = pytest.mark.asyncio(loop_scope="module")

LOOK = """
import asyncio
import os
environment = dict(os.environ)
def handler(event):
    targets = []
    for descriptor in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            targets.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        except FileNotFoundError:
            pass
    return {"env": dict(os.environ), "import": environment, "fds": targets, "pid": os.getpid(), "ppid": os.getppid(),
            "cwd": os.getcwd(), "sid": os.getsid(0)}
"""


async def test_the_gateways_secrets_are_not_inherited(state, monkeypatch):
    for name in (
        "AWS_SECRET_ACCESS_KEY",
        "AWS_SESSION_TOKEN",
        "DATABASE_URL",
        "PILOTFLAME_TOKEN",
        "SOME_API_KEY",
    ):
        monkeypatch.setenv(name, "secret-of-the-gateway")
    async with gateway_here(state) as gateway:
        function = await gateway.deploy(LOOK, {"env.MODE": "test", "env.AWS_REGION": "here"})
        answer = await function.answer()
        for environment in (answer["env"], answer["import"]):
            assert "secret-of-the-gateway" not in environment.values()
            assert environment["MODE"] == "test"
            assert environment["AWS_REGION"] == "here"
            assert environment["PATH"] == os.environ["PATH"]
        for pid in (answer["pid"], answer["ppid"], psutil.Process(answer["ppid"]).ppid()):
            assert "secret-of-the-gateway" not in psutil.Process(pid).environ().values()


async def test_a_worker_inherits_no_descriptors(deploy):
    function = await deploy(LOOK, {"scale.max": 2})
    await function.client.post(f"/v2/{function.name}/warmup", params={"workers": "2"})
    await function.settled(ready=2)
    answer = await function.answer()
    kinds = [target.partition(":")[0] for target in answer["fds"]]
    files = [target for target in answer["fds"] if target.startswith("/") and not target.startswith("/proc/")]
    assert set(files) <= {"/dev/null"}
    assert kinds.count("socket") <= 3 + 2  # its link, its output twice, and the loop's own pair
    assert len(answer["fds"]) <= 16
    others = {str(link.readlink()) for link in Path(f"/proc/{answer['ppid']}/fd").iterdir()}
    shared = {target for target in others & set(answer["fds"]) if target.startswith("socket")}
    assert shared == set()


async def test_functions_of_one_environment_share_a_base(gateway, deploy):
    parents = []
    for _ in range(2):
        answer = await (await deploy(LOOK)).answer()
        parents.append(psutil.Process(answer["ppid"]).ppid())
        assert answer["sid"] == answer["pid"]
        assert Path(answer["cwd"]).parent.name == str(answer["pid"])
    assert len(set(parents)) == 1
    assert psutil.Process(parents[0]).ppid() == os.getpid()
    assert psutil.Process(parents[0]).num_threads() == 1


async def test_processes_name_themselves(deploy):
    function = await deploy(LOOK)
    answer = await function.answer()
    revision = (await function.status())["revision"]
    for pid, role in ((answer["pid"], "worker"), (answer["ppid"], "zygote")):
        assert psutil.Process(pid).cmdline()[0].startswith(f"pilotflame: {role} {function.name} {revision}")


async def test_of_several_kill_deadlines_the_earliest_counts():
    """A deadline of zero must count, too, although uvloop makes no timer for it."""
    killed = asyncio.Event()

    class Victim(Child):
        def send_signal(self, number: int) -> None:
            if number == signal.SIGKILL:
                killed.set()

    victim = Victim(None, 1, "victim")  # type: ignore[arg-type]
    victim.kill_after(60.0)
    victim.kill_after(0.0)
    victim.kill_after(60.0)
    async with asyncio.timeout(5):
        await killed.wait()


async def test_a_deadline_to_end_does_not_save_a_stuck_process() -> None:
    killed = asyncio.Event()

    class Victim(Child):
        def send_signal(self, number: int) -> None:
            if number == signal.SIGKILL:
                killed.set()

    victim = Victim(None, 1, "victim")  # type: ignore[arg-type]
    victim.kill_stuck("it does not answer")
    victim.kill_after(0.2)
    async with asyncio.timeout(5):
        await killed.wait()


async def test_the_cause_names_the_kernel_if_memory_ran_out():
    class Victim(Child):
        def send_signal(self, number: int) -> None: ...

    victim = Victim(None, 1, "victim")  # type: ignore[arg-type]
    victim.report_exit(-9, out_of_memory=True)
    cause = await victim.cause()
    assert cause == ("signal 9 (SIGKILL), sent by the kernel because memory ran out", True)
    # A count of the whole machine may have grown because of another process, so the cause is not certain.
    other = Victim(None, 1, "other")  # type: ignore[arg-type]
    other.report_exit(-9, out_of_memory=True, certain=False)
    cause = await other.cause()
    assert cause == ("signal 9 (SIGKILL), sent by the kernel perhaps because memory ran out", False)
