from dataclasses import dataclass, field

from ..config import StructuredOutputsConfig
from ..plugins import load_general_plugins


@dataclass(kw_only=True)
class AsyncEngineArgs:
    model: str
    load_format: str = "auto"
    max_model_len: int = 512
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    model_loader_extra_config: dict = field(default_factory=dict)
    structured_outputs_config: StructuredOutputsConfig = field(default_factory=StructuredOutputsConfig)
    disable_log_stats: bool = False
    scheduling_policy: str = "fcfs"
    enable_sleep_mode: bool = False
    enable_prefix_caching: bool | None = None

    def __post_init__(self) -> None:
        load_general_plugins()
