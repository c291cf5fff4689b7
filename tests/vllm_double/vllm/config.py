from dataclasses import dataclass, field
from typing import Any


@dataclass
class StructuredOutputsConfig:
    backend: str = "auto"


@dataclass
class LoadConfig:
    load_format: str = "auto"
    model_loader_extra_config: Any = None


@dataclass
class ModelConfig:
    model: str
    max_model_len: int
    quantization: str | None = None
    multimodal_config: Any = None


@dataclass
class ParallelConfig:
    distributed_executor_backend: Any = None
    data_parallel_size: int = 1
    worker_cls: str = "vllm.v1.engine.core.Model"
    numa_bind: bool = False


@dataclass
class DeviceConfig:
    device: str = "cuda"

    @property
    def device_type(self) -> str:
        return self.device


@dataclass
class VllmConfig:
    model_config: ModelConfig
    load_config: LoadConfig
    parallel_config: ParallelConfig
    device_config: DeviceConfig = field(default_factory=DeviceConfig)
