"""The process of the engine, which loads the weights by the registered loader."""

import os
import tempfile
import uuid
from multiprocessing import connection

from ...config import LoadConfig, ModelConfig
from ...model_executor.model_loader import get_model_loader
from ...plugins import load_general_plugins
from ..executor import Executor
from . import utils

READY_S = 60.0


class Model:
    """A model that keeps what it loads."""

    def __init__(self):
        self.loaded = []

    def load_weights(self, weights):
        for name, tensor in weights:
            self.loaded.append((name, str(tensor.dtype), tuple(tensor.shape), float(tensor.double().sum())))
        return {name for name, *_ in self.loaded}

    def named_parameters(self):
        return [(name, None) for name, *_ in self.loaded]

    def named_modules(self):
        return []


def load(load_config: LoadConfig, model_config: ModelConfig) -> list:
    load_general_plugins()
    model = Model()
    get_model_loader(load_config).load_weights(model, model_config)
    return model.loaded


class CoreHere:
    """Loads the weights in this process, which is faster."""

    def __init__(self, vllm_config) -> None:
        self.loaded, self.alive = load(vllm_config.load_config, vllm_config.model_config), True

    def close(self, timeout: float | None = None) -> None:
        self.alive = False


class CoreProcess:
    """Loads the weights in a process of its own, as vLLM does."""

    def __init__(self, vllm_config) -> None:
        address = f"{os.environ.get('VLLM_RPC_BASE_PATH', tempfile.gettempdir())}/{uuid.uuid4()}"
        given = {
            "vllm_config": vllm_config,
            "local_client": True,
            "handshake_address": address,
            "log_stats": False,
            "executor_class": Executor.get_class(vllm_config),
            "tensor_queue": None,
            "dp_rank": 0,
            "local_dp_rank": 0,
        }
        with connection.Listener(address) as listener:
            self.process = utils.get_mp_context().Process(
                target=EngineCoreProc.run_engine_core, name="EngineCore", kwargs=given
            )
            self.process.start()
            self._pipe = listener.accept()
        if not self._pipe.poll(READY_S):
            raise RuntimeError("Engine core initialization failed.")
        # The environment is for tests.
        told, self.loaded, self.environ = self._pipe.recv()
        if told != "loaded":
            raise RuntimeError(f"Engine core initialization failed: {self.loaded}")

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def close(self, timeout: float | None = None) -> None:
        self._pipe.close()
        self.process.join(timeout)


class EngineCoreProc:
    def __init__(
        self,
        vllm_config,
        local_client,
        handshake_address,
        executor_class,
        log_stats,
        client_handshake_address=None,
        tensor_queue=None,
        *,
        engine_index=0,
    ) -> None:
        self._pipe = connection.Client(handshake_address)
        try:
            loaded = load(vllm_config.load_config, vllm_config.model_config)
        except Exception as error:
            self._pipe.send(("failed", repr(error), {}))
            raise
        self._pipe.send(("loaded", loaded, dict(os.environ)))

    @staticmethod
    def run_engine_core(*args, dp_rank=0, local_dp_rank=0, **kwargs):
        core = EngineCoreProc(*args, engine_index=dp_rank, **kwargs)
        try:
            # The engine lives as long as the other end, if the kernel does not end it before.
            core._pipe.recv()
        except EOFError:
            os._exit(0)
