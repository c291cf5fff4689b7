"""The stand-in for `runpod` behaves like the real package."""

from __future__ import annotations

import ast
import importlib.util
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pilotflame.handlers.stand_in import CHILDREN
from pilotflame.runtime.plugins import runpod as runpod_plugin
from pilotflame.runtime.plugins.runpod import sdk
from pilotflame.runtime.plugins.runpod.sdk import stand_in, validate

SCHEMA = {
    "n": {"type": int, "required": True, "constraints": lambda n: n < 10},
    "x": {"type": float, "required": False, "default": 0.5},
    "note": {"type": str, "required": False, "default": None},
}


def test_validate_fills_in_and_complains_as_runpods_does() -> None:
    given = {"n": 1, "x": 2}
    assert validate(given, SCHEMA) == {"validated_input": {"n": 1, "x": 2.0, "note": None}}
    assert given == {"n": 1, "x": 2}
    assert validate({"n": 11}, SCHEMA) == {"errors": ["n does not meet the constraints."]}
    assert validate({"m": 1}, SCHEMA)["errors"] == [
        "Unexpected input. m is not a valid input option.",
        "n is a required input.",
    ]
    assert validate({"n": "1"}, {"n": {"type": int, "required": True}})["errors"] == [
        "n should be <class 'int'> type, not <class 'str'>."
    ]
    assert validate({}, {"a": {}, "b": {"type": int, "required": False}})["errors"] == [
        "Schema error, missing type for a.",
        "Schema error, missing default value for b.",
    ]


def test_the_modules_are_found_by_every_spelling() -> None:
    modules = stand_in(print, print)
    runpod = modules["runpod"]
    assert runpod.serverless.start is print
    assert runpod.serverless.modules.rp_progress.progress_update is print
    assert runpod.serverless.utils.rp_validator is modules["runpod.serverless.utils.rp_validator"]
    assert runpod.serverless.register_fitness_check(len) is len
    with pytest.raises(AttributeError, match=r"stand-in for runpod\.serverless has no 'nothing'"):
        _ = runpod.serverless.nothing


def test_files_come_and_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BUCKET_ENDPOINT_URL", raising=False)
    url = "data:text/plain,hello"
    (found,) = sdk.download_files_from_urls("job", url)
    assert found is not None
    assert Path(found).read_text() == "hello"
    assert Path(found).is_relative_to(tmp_path / "jobs" / "job" / "downloaded_files")
    assert sdk.download_files_from_urls("job", ["file:///etc/passwd", ""]) == [None, None]
    with pytest.raises(ValueError, match="file:"):
        sdk.file("file:///etc/passwd")
    described = sdk.file(url)
    assert (described["type"], Path(described["file_path"]).read_text()) == ("txt", "hello")
    (tmp_path / "a.png").write_bytes(b"png")
    assert Path(sdk.upload_image("job", "a.png")).read_bytes() == b"png"
    assert sdk.upload_file_to_bucket("b.png", "a.png") == "simulated_uploaded/b.png"
    (tmp_path / "output.zip").touch()
    sdk.clean(["jobs"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "simulated_uploaded"]


def test_with_credentials_it_goes_to_the_bucket(
    monkeypatch: pytest.MonkeyPatch, s3_client: Callable[..., Any]
) -> None:
    creds = {"endpointUrl": "https://bucket", "accessId": "id", "accessSecret": "secret"}
    address = sdk.upload_in_memory_object("a.png", b"png", creds, "there", "job")
    assert address == "there/job/a.png"
    (put,) = s3_client("puts")
    assert (put["Bucket"], put["Key"], put["Body"], put["ContentType"]) == (
        "there",
        "job/a.png",
        b"png",
        "image/png",
    )


@pytest.fixture
def s3_client(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    boto3 = pytest.importorskip("boto3")
    puts: list[dict[str, Any]] = []

    class Client:
        def put_object(self, **how: Any) -> None:
            puts.append(how)

        def generate_presigned_url(self, _operation: str, *, Params: dict[str, str], ExpiresIn: int) -> str:  # noqa: N803
            return f"{Params['Bucket']}/{Params['Key']}"

    monkeypatch.setattr(boto3, "client", lambda *_, **__: Client())
    return lambda _: puts


def test_the_logger_writes_to_the_functions_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    log = sdk.RunPodLogger()
    log.set_level("DEBUG")
    for say in (log.debug, log.info, log.warn, log.error, log.trace):
        say("words", "job-1")
    log.tip("a tip")
    log.secret("token", "abcdef")
    assert [record.levelname for record in caplog.records[:4]] == ["DEBUG", "INFO", "WARNING", "ERROR"]
    assert caplog.records[0].invocation == "job-1"  # type: ignore[attr-defined]
    assert "abcdef" not in caplog.text


def test_the_debugger_measures_steps() -> None:
    runpod = stand_in(print, print)["runpod"]
    debugger = runpod.serverless.utils.rp_debugger
    assert int(runpod.__version__.split(".")[0]) >= 1

    @debugger.FunctionTimer
    def answer(number: int) -> int:
        return number + 1

    with debugger.LineTimer("block"):
        assert answer(41) == 42
    debugger.Checkpoints().add("never started")
    with pytest.raises(KeyError, match="was not started"):
        debugger.Checkpoints().stop("never started")
    with pytest.raises(KeyError, match="no checkpoint"):
        debugger.Checkpoints().start("unknown")
    with pytest.raises(KeyError, match="already"):
        debugger.LineTimer("block")
    found = debugger.get_debugger_output()
    assert [step["name"] for step in found] == ["block", "answer"]
    assert all(step["duration_ms"] == step["end"] - step["start"] >= 0 for step in found)
    assert debugger.get_debugger_output() == []


def test_child_processes_import_the_stand_in_and_start_takes_no_jobs() -> None:
    folder = Path(str(runpod_plugin.__path__[0])) / CHILDREN
    script = """
import runpod
from runpod.serverless.utils.rp_validator import validate
import runpod.serverless
runpod.serverless.start({"handler": print})
runpod.serverless.progress_update({"id": "1"}, 1)
print(runpod.__doc__)
"""
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(folder)!r})\n{script}"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert ended.stdout == "Pilotflame's stand-in.\n"
    assert "cannot report progress" in ended.stderr


# The machinery of RunPod's worker, and what handlers find elsewhere here: weights that the node keeps, downloads that it checks.
LEFT_OUT = {
    "runpod.serverless.modules": {
        "rp_fastapi", "rp_fitness", "rp_gpu_fitness", "rp_http", "rp_job", "rp_local", "rp_ping", "rp_scale", "rp_system_fitness",
        "rp_tips", "worker_state",
    },
    "runpod.serverless.utils": {"rp_model_cache", "rp_ssrf", "rp_volume_cache"},
}  # fmt: skip
HELPERS = {
    "calculate_chunk_size", "parse_content_length", "extract_disposition_params", "extract_region_from_url", "get_boto_client",
    "files", "bucket_upload",
}  # fmt: skip


@pytest.mark.parametrize("package", LEFT_OUT)
def test_the_stand_in_has_the_names_of_the_package(package: str) -> None:
    spec = importlib.util.find_spec("runpod")
    assert spec is not None
    assert spec.origin is not None
    folder, modules = Path(spec.origin).parent.joinpath(*package.split(".")[1:]), stand_in(print, print)
    left_out, lacking = set(LEFT_OUT[package]), []
    for path in folder.glob("*.py"):
        defined = [
            one for one in ast.parse(path.read_text()).body if isinstance(one, ast.FunctionDef | ast.ClassDef)
        ]
        names = {one.name for one in defined if one.name[0] != "_"} - HELPERS
        if path.stem in left_out:
            left_out.discard(path.stem)
            continue
        module = vars(modules.get(f"{package}.{path.stem}", ast))
        lacking += [f"{path.stem}.{name}" for name in names if name not in module]
    assert not lacking
    assert not left_out
