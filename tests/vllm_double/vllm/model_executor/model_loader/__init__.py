from abc import ABC, abstractmethod

_LOADERS = {}


class BaseModelLoader(ABC):
    def __init__(self, load_config):
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config): ...

    @abstractmethod
    def load_weights(self, model, model_config): ...


def register_model_loader(load_format: str):
    def wrapper(model_loader_cls):
        assert issubclass(model_loader_cls, BaseModelLoader)
        _LOADERS[load_format] = model_loader_cls
        return model_loader_cls

    return wrapper


def get_model_loader(load_config):
    return _LOADERS[load_config.load_format](load_config)
