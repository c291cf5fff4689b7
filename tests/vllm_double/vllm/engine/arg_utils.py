from dataclasses import dataclass, field

from ..config import LoadConfig, ModelConfig, ParallelConfig, StructuredOutputsConfig, VllmConfig
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
    distributed_executor_backend: object = None
    data_parallel_size: int = 1

    def __post_init__(self) -> None:
        load_general_plugins()

    def create_engine_config(self, usage_context=None) -> VllmConfig:
        made = VllmConfig(
            ModelConfig(self.model, self.max_model_len),
            LoadConfig(self.load_format, self.model_loader_extra_config),
            ParallelConfig(self.distributed_executor_backend, self.data_parallel_size),
        )
        # For tests.
        made.engine_args = self
        return made
