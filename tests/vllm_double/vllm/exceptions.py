from http import HTTPStatus


class VLLMError(Exception): ...


class VLLMClientError(VLLMError): ...


class VLLMServerError(VLLMError): ...


class VLLMValidationError(VLLMClientError):
    def __init__(self, message, *, parameter=None, value=None):
        super().__init__(message)
        self.parameter, self.value = parameter, value


class GracefulHTTPError(VLLMError):
    def __init__(self, message: str, http_status: HTTPStatus):
        super().__init__(message)
        self.message, self.http_status = message, http_status


class QueueOverflowError(GracefulHTTPError):
    def __init__(self):
        super().__init__("The engine is currently busy.", HTTPStatus.SERVICE_UNAVAILABLE)
