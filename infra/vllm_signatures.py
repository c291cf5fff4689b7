"""Writes the signatures of the classes of vLLM that pilotflame uses, from vLLM's sources: python infra/vllm_signatures.py FOLDER

FOLDER has the package: an unpacked source distribution, or site-packages. Nothing of it is imported. The tests compare their double of vLLM with the file.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

OUTPUT = Path(__file__).parents[1] / "tests" / "handlers" / "vllm_engine" / "signatures.json"
# The modules, and the names in them: functions, and classes with their fields or with these methods.
USED: dict[str, dict[str, tuple[str, ...]]] = {
    "vllm.engine.arg_utils": {"EngineArgs": (), "AsyncEngineArgs": ()},
    "vllm.config.device": {"DeviceConfig": ()},
    "vllm.config.parallel": {"ParallelConfig": ()},
    "vllm.config.vllm": {"VllmConfig": ()},
    "vllm.platforms.interface": {"Platform": ("get_device_capability", "is_cpu", "is_sleep_mode_available")},
    "vllm.v1.engine.core": {"EngineCoreProc": ("__init__", "run_engine_core")},
    "vllm.utils.system_utils": {"get_mp_context": ()},
    "vllm.v1.executor.abstract": {"Executor": ("get_class",)},
    "vllm.v1.executor.uniproc_executor": {"UniProcExecutor": ()},
    "vllm.exceptions": {"VLLMClientError": (), "GracefulHTTPError": ("__init__",), "VLLMValidationError": ("__init__",)},
    "vllm.logprobs": {"Logprob": ()},
    "vllm.lora.request": {"LoRARequest": ()},
    "vllm.model_executor.model_loader": {"register_model_loader": (), "get_model_loader": ()},
    "vllm.model_executor.model_loader.utils": {"get_model_architecture": ()},
    "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": ("__init__", "download_model", "load_weights")},
    "vllm.config.load": {"LoadConfig": ()},
    "vllm.config.structured_outputs": {"StructuredOutputsConfig": ()},
    "vllm.outputs": {"CompletionOutput": (), "RequestOutput": ("__init__",)},
    "vllm.plugins": {"load_general_plugins": ()},
    "vllm.sampling_params": {"SamplingParams": (), "StructuredOutputsParams": (), "RequestOutputKind": ()},
    "vllm.v1.engine.async_llm": {
        "AsyncLLM": ("from_vllm_config", "shutdown", "generate", "abort", "sleep", "wake_up")
    },
    "vllm.v1.engine.exceptions": {"EngineDeadError": ("__init__",), "EngineGenerateError": ()},
}  # fmt: skip
Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    folder = Path(sys.argv[1])
    versions = (folder / "vllm" / "_version.py").read_text()
    found = {
        "version": _value(versions, "__version__ = version"),
        "names": {
            name: given for module, names in USED.items() for name, given in _of(folder, module, names)
        },
    }
    OUTPUT.write_text(json.dumps(found, indent=1) + "\n")


def _value(text: str, name: str) -> str:
    found = re.search(rf"^{re.escape(name)} = '(.+)'$", text, re.MULTILINE)
    assert found is not None, name
    return found[1]


def _of(folder: Path, module: str, names: dict[str, tuple[str, ...]]) -> Iterator[tuple[str, list[str]]]:
    """Yield each name as MODULE:NAME, with its parameters, or with its fields in order."""
    path = folder.joinpath(*module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    defined = {
        node.name: node
        for node in ast.parse(file.read_text()).body
        if isinstance(node, Function | ast.ClassDef)
    }
    for name, methods in names.items():
        node = defined[name]
        if isinstance(node, Function):
            yield f"{module}:{name}", _parameters(node)
            continue
        yield f"{module}:{name}", _fields(node)
        for method in node.body:
            if isinstance(method, Function) and method.name in methods:
                yield f"{module}:{name}.{method.name}", _parameters(method)


def _parameters(node: Function) -> list[str]:
    given = node.args
    keywords = ["*"] if given.kwonlyargs else []
    return [one.arg for one in given.args] + keywords + [one.arg for one in given.kwonlyargs]


def _fields(node: ast.ClassDef) -> list[str]:
    """Return the annotated fields of a class, and the members of an Enum."""
    found = []
    for one in node.body:
        target = (
            one.target
            if isinstance(one, ast.AnnAssign)
            else one.targets[0]
            if isinstance(one, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and not target.id.startswith("_"):
            found.append(target.id)
    return found


if __name__ == "__main__":
    main()
