"""Runs vLLM's engine core in a fork that a worker makes at its start, and that waits until the worker needs the engine.

vLLM itself makes this process with `multiprocessing` when the engine starts. A worker has threads by then, so vLLM would have to
start an interpreter, which imports vLLM again. `WaitingEngine` is forked before the worker starts a thread. It inherits vLLM's
imports and the configuration, and receives from the worker what is known later: vLLM's arguments, the environment, the number of
threads.

`NAMES` has the private names of vLLM that this module needs. If this vLLM lacks one of them, vLLM starts its processes itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import inspect
import json
import multiprocessing
import os
import select
import signal
import socket
import stat
import sys
import threading
import traceback
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

NAMES = {
    # vLLM's source of processes for its engine core.
    "vllm.v1.engine.utils:get_mp_context": (),
    "vllm.v1.engine.core:EngineCoreProc.run_engine_core": ("dp_rank", "local_dp_rank"),
    "vllm.v1.engine.core:EngineCoreProc.__init__": (
        "vllm_config", "local_client", "handshake_address", "executor_class", "log_stats", "tensor_queue",
    ),
    "vllm.v1.executor:Executor.get_class": ("vllm_config",),
    "vllm.model_executor.model_loader.utils:get_model_architecture": ("model_config",),
    "vllm.v1.executor.uniproc_executor:UniProcExecutor": (),
}  # fmt: skip
"""The private names of vLLM, as MODULE:NAME, and parameters that they must have."""
# Modules to import before the fork. Otherwise the engine's process would import them at its start.
_AHEAD = (
    "vllm.v1.core.sched.scheduler", "vllm.model_executor.layers.quantization.online.base",
    "vllm.distributed.elastic_ep.elastic_execute", "vllm.v1.pool.flash_maxsim",
)  # fmt: skip
_AHEAD_ON_CPU = (
    "vllm.v1.attention.backends.cpu_attn", "vllm.triton_utils.dispatcher", "vllm.utils.cpu_triton_utils",
)  # fmt: skip
# The method of a platform that replaces kernels of Triton.
_OVERRIDES = "register_triton_kernel_overrides"
_SENT = ("local_client", "handshake_address", "log_stats", "dp_rank", "local_dp_rank")
_KNOWN = {*_SENT, "vllm_config", "executor_class", "tensor_queue"}
_PR_SET_PDEATHSIG = 1


def missing_name() -> str | None:
    """Return the first name of NAMES that this vLLM lacks, or whose parameters differ; None if there is no such name."""
    for name, parameters in NAMES.items():
        module, _, inner = name.partition(":")
        try:
            found: Any = reduce(getattr, inner.split("."), importlib.import_module(module))
        except (ImportError, AttributeError):
            return name
        if parameters and not {*parameters} <= inspect.signature(found).parameters.keys():
            return name
    return None


def import_ahead(config: Any) -> None:
    """Import what the engine's process needs beside vLLM itself, such as the classes of its worker and of the model.

    An import after the fork would take time at each start, and memory in each worker.
    """
    from vllm.model_executor.model_loader.utils import get_model_architecture  # noqa: PLC0415

    importlib.import_module(str(config.parallel_config.worker_cls).rpartition(".")[0])
    get_model_architecture(config.model_config)
    from vllm.platforms import current_platform  # noqa: PLC0415

    for module in (*_AHEAD, *(_AHEAD_ON_CPU if config.device_config.device_type == "cpu" else ())):
        # Ignore a failed import: the engine's process imports the module again, and reports the error if it needs the module.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    # The method reads the names of all modules, which would copy the pages of their memory in each fork. So call it
    # here, and let later calls do nothing.
    if (register := getattr(current_platform, _OVERRIDES, None)) is not None:
        register()
        setattr(current_platform, _OVERRIDES, lambda: None)


def has_descriptors_of_processes() -> bool:
    """Return True if the kernel has descriptors of processes. Linux has them since 5.3."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


def thread_count() -> int:
    """Return the number of this process's threads, native ones included."""
    return len(os.listdir("/proc/self/task"))  # noqa: PTH208  names


class WaitingEngine:
    """A process that will run vLLM's engine core. It has the methods of `multiprocessing.Process` that vLLM uses."""

    name = "EngineCore"

    def __init__(self, config: Any) -> None:
        """Fork the process. `config` is the VllmConfig. The caller must have one thread. Raise OSError if the system refuses."""
        parent = os.getpid()
        self._ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            self._ours.close()
            _run(theirs, config, parent)
        theirs.close()
        self.sentinel = os.pidfd_open(self.pid)
        self.threads = 1
        """The number of torch's threads in the engine's process."""
        self._config = config
        self._exitcode: int | None = None
        self._asking = threading.Lock()
        self._asked: dict[str, Any] = {}

    def takes(self, name: str, kwargs: dict[str, Any]) -> bool:
        """Note the arguments of the engine core. Return False if the forked process cannot use them: it has got arguments before,
        it was forked with another configuration, or it does not know one of them.
        """
        other = kwargs.get("vllm_config") is not self._config or kwargs.get("tensor_queue") is not None
        if self._asked or other or kwargs.keys() - _KNOWN:
            return False
        self.name = name
        self._asked = {key: kwargs[key] for key in _SENT if key in kwargs}
        return True

    def start(self) -> None:
        """Let the process run the engine core, with this process's environment and folder."""
        asked = {
            **self._asked, "environ": dict(os.environ), "threads": self.threads,
            # The paths of vLLM's sockets are relative to this folder.
            "folder": str(Path.cwd()),
            # `setup` has set it after the fork.
            "weights": self._config.load_config.model_loader_extra_config,
        }  # fmt: skip
        with self._ours as ours:
            ours.sendall(json.dumps(asked).encode())

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process runs. After a kill, it is the negative number of the signal."""
        # A thread of vLLM reads the exit code at the same time.
        with self._asking:
            if self._exitcode is None:
                try:
                    pid, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:
                    self._exitcode = 1
                else:
                    self._exitcode = os.waitstatus_to_exitcode(status) if pid else None
            return self._exitcode

    def is_alive(self) -> bool:
        return self.exitcode is None

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the process, for at most `timeout` seconds."""
        select.select([self.sentinel], [], [], timeout)

    def terminate(self) -> None:
        """Ask the engine core to end. A process that waits ends at once."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)


@contextlib.contextmanager
def engine_core_in(waiting: WaitingEngine | None) -> Iterator[None]:
    """In the block, let vLLM run its engine core in `waiting`. If `waiting` is None, vLLM starts a process itself."""
    from vllm.v1.engine import utils  # noqa: PLC0415

    if waiting is None:
        yield
        return
    made = utils.get_mp_context

    def process(*, target: Any, name: str, kwargs: dict[str, Any]) -> Any:
        if waiting.takes(name, kwargs):
            return waiting
        # Spawn, because a fork of this process, which has threads, could hang.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
        return made().Process(target=target, name=name, kwargs=kwargs)

    utils.get_mp_context = lambda: SimpleNamespace(Process=process, Queue=lambda: made().Queue())
    try:
        yield
    finally:
        utils.get_mp_context = made


def _run(ours: socket.socket, config: Any, parent: int) -> None:
    """Wait for the worker's message, run the engine core, and end this process. The kernel also ends this process when the worker ends."""
    code = 1
    try:
        end_with(parent)
        # vLLM writes this name before each line of its log.
        multiprocessing.current_process().name = WaitingEngine.name
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _close_sockets(but=ours.fileno())
        with ours, ours.makefile("rb") as received:
            asked = received.read()
        # Without a message, the worker has ended before it needed the engine.
        if asked:
            _run_engine_core(json.loads(asked), config)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:  # noqa: BLE001  this process ends
        traceback.print_exc()
    finally:
        # If the start has failed, nothing else ends the engine's own workers.
        for child in multiprocessing.active_children():
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _run_engine_core(asked: dict[str, Any], config: Any) -> None:
    import torch  # noqa: PLC0415  vLLM has imported it
    from vllm.v1.engine.core import EngineCoreProc  # noqa: PLC0415
    from vllm.v1.executor import Executor  # noqa: PLC0415

    os.environ.clear()
    os.environ.update(asked.pop("environ"))
    os.chdir(asked.pop("folder"))
    forget_devices()
    # Set the number here, because a fork does not read the variables of OpenMP.
    torch.set_num_threads(asked.pop("threads"))
    config.load_config.model_loader_extra_config = asked.pop("weights")
    executor = Executor.get_class(config)
    EngineCoreProc.run_engine_core(vllm_config=config, executor_class=executor, tensor_queue=None, **asked)


def forget_devices() -> None:
    """Forget the facts about the node's first GPU that vLLM has stored in the zygote. This process may use a GPU of another model."""
    from vllm.platforms import current_platform  # noqa: PLC0415

    if (forget := getattr(current_platform.get_device_capability, "cache_clear", None)) is not None:
        forget()


def _close_sockets(but: int) -> None:
    """Close all sockets but one. A spawned worker has opened sockets before the fork. If this process kept them, the gateway
    would not see the worker's end at once.
    """
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  names
        # OSError: the descriptor of the listing itself.
        with contextlib.suppress(OSError):
            if number > 2 and number != but and stat.S_ISSOCK(os.fstat(number).st_mode):
                os.close(number)


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # The parent has ended before the call, so the kernel would not kill this process.
        os._exit(1)
