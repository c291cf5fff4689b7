"""The process of the engine, which loads the weights by the registered loader."""

import multiprocessing
import os

from ...config import LoadConfig, ModelConfig
from ...model_executor.model_loader import get_model_loader
from ...plugins import load_general_plugins

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

    def __init__(self, load_config: LoadConfig, model_config: ModelConfig) -> None:
        self.loaded, self.alive = load(load_config, model_config), True

    def close(self, timeout: float | None = None) -> None:
        self.alive = False


class CoreProcess:
    """Loads the weights in a process of its own, as vLLM does."""

    def __init__(self, load_config: LoadConfig, model_config: ModelConfig) -> None:
        context = multiprocessing.get_context(os.environ["VLLM_WORKER_MULTIPROC_METHOD"])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, load_config, model_config), daemon=True)
        self.process.start()
        theirs.close()
        if not self._pipe.poll(READY_S):
            raise RuntimeError("Engine core initialization failed.")
        told, self.loaded = self._pipe.recv()
        if told != "loaded":
            raise RuntimeError(f"Engine core initialization failed: {self.loaded}")

    @property
    def alive(self) -> bool:
        return self.process.is_alive()

    def close(self, timeout: float | None = None) -> None:
        self._pipe.close()
        self.process.join(timeout)


def _run(pipe, load_config: LoadConfig, model_config: ModelConfig) -> None:
    try:
        loaded = load(load_config, model_config)
    except Exception as error:
        pipe.send(("failed", repr(error)))
        raise
    pipe.send(("loaded", loaded))
    try:
        # The engine lives as long as the other end, if the kernel does not end it before.
        pipe.recv()
    except EOFError:
        os._exit(0)
