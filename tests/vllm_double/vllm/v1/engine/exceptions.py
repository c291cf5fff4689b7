from ...exceptions import VLLMServerError


class EngineGenerateError(VLLMServerError): ...


class EngineDeadError(VLLMServerError):
    def __init__(self, *args, suppress_context: bool = False, **kwargs):
        super().__init__("EngineCore encountered an issue.", *args, **kwargs)
