from dataclasses import dataclass
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
