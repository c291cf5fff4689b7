"""A double of vLLM 0.32.0:
the public classes that pilotflame uses, with the same names and parameters, and a model that writes its prompt again.
`tests/handlers/vllm_engine/signatures.json` has the signatures of the real ones.
"""

from .engine.arg_utils import AsyncEngineArgs
from .sampling_params import SamplingParams

__all__ = ["AsyncEngineArgs", "SamplingParams"]
