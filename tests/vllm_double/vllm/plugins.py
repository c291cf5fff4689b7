from importlib.metadata import entry_points


def load_general_plugins() -> None:
    for plugin in entry_points(group="vllm.general_plugins"):
        plugin.load()()
