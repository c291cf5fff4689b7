"""The stand-in for `runpod` behaves like the real package."""

from __future__ import annotations

import ast
import importlib.util
import io
import logging
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pilotflame.addresses import INPUT_NETWORKS
from pilotflame.handlers.stand_in import CHILDREN
from pilotflame.runtime.plugins import runpod as runpod_plugin
from pilotflame.runtime.plugins.runpod import sdk
from pilotflame.runtime.plugins.runpod.sdk import stand_in, validate

KINDS = st.sampled_from((int, float, str, bool, list))
VALUES = (
    st.none() | st.booleans() | st.integers(-2, 20) | st.floats(0, 9) | st.text(max_size=2) | st.just([1])
)
RULES = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS, "required": st.booleans(), "default": VALUES,
        "constraints": st.sampled_from((bool, lambda value: value != 1, lambda value: value is None)),
    },
)  # fmt: skip
SCHEMAS = st.dictionaries(st.sampled_from("abc"), RULES | st.sampled_from(('{"required": false}', "no JSON")))


def package_file(name: str) -> Path:
    spec = importlib.util.find_spec("runpod")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / name


@pytest.fixture(scope="module")
def rp_validator() -> Any:
    """The module of the real package, without the rest of it, which takes seconds to import."""
    spec = importlib.util.spec_from_file_location(
        "rp_validator", package_file("serverless/utils/rp_validator.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def outcome(check: Callable[..., Any], given: dict[str, Any], schema: dict[str, Any]) -> Any:
    try:
        return repr(check(given, dict(schema)))
    except Exception as error:  # noqa: BLE001  whatever the package raises
        return type(error)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from("abcd"), VALUES), SCHEMAS)
def test_validate_answers_as_the_package(
    rp_validator: Any, raw_input: dict[str, Any], schema: dict[str, Any]
) -> None:
    assert outcome(validate, raw_input, schema) == outcome(rp_validator.validate, raw_input, schema)


def test_a_value_of_the_defaults_type_is_not_checked_further() -> None:
    schema = {"n": {"type": int, "required": False, "default": 1, "constraints": lambda n: n < 3}}
    assert validate({"n": 11}, schema) == {"validated_input": {"n": 11}}


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
    assert described["extracted_path"] is None
    assert (described["type"], Path(str(described["file_path"])).read_text()) == ("txt", "hello")
    (tmp_path / "a.png").write_bytes(b"png")
    images = [""]
    first = sdk.upload_image("job", "a.png", 0, images)
    assert images == [first]
    # Each image has a name of its own.
    assert first != sdk.upload_image("job", "a.png")
    assert (Path(first).read_bytes(), Path(first).parent) == (b"png", Path("simulated_uploaded"))
    assert sdk.upload_file_to_bucket("b.png", "a.png", prefix="job") == "local_upload/b.png"
    (tmp_path / "output.zip").touch()
    sdk.clean(["jobs"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "local_upload", "simulated_uploaded"]


def test_an_archive_is_unpacked_and_a_file_has_the_name_that_its_server_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, http_server: HttpServer
) -> None:
    monkeypatch.chdir(tmp_path)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as pack:
        pack.writestr("images/one.png", b"png")
    named = {"Content-Disposition": 'attachment; filename="my images.zip"'}
    monkeypatch.setenv(INPUT_NETWORKS, "127.0.0.0/8")
    found = sdk.file(http_server({"/download": (archive.getvalue(), named)}) + "/download?id=1")
    assert (found["type"], found["original_name"]) == ("zip", "my images.zip")
    assert (Path(str(found["extracted_path"])) / "images" / "one.png").read_bytes() == b"png"
    assert Path(str(found["extracted_path"])).parent == tmp_path / "job_files"
    (path,) = sdk.download_files_from_urls("job", http_server({"/download": (b"x", named)}) + "/download")
    assert str(path).endswith(".zip")
    url = http_server({"/bild%20a.png": (b"x", {})}) + "/bild%20a.png"
    assert (sdk.file(url)["original_name"], sdk.file(url)["extracted_path"]) == ("bild%20a.png", None)


HttpServer = Callable[[dict[str, tuple[bytes, dict[str, str]]]], str]


@pytest.fixture
def http_server() -> Iterator[HttpServer]:
    """`http_server({path: (body, headers)})`: the address of a server that answers these paths."""
    with ExitStack() as servers:

        def serve(answers: dict[str, tuple[bytes, dict[str, str]]]) -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    body, headers = answers[self.path.partition("?")[0]]
                    self.send_response(200)
                    for name, text in {"Content-Length": str(len(body)), **headers}.items():
                        self.send_header(name, text)
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_: object) -> None: ...

            server = servers.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            threading.Thread(target=server.serve_forever, daemon=True).start()
            servers.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield serve


def test_with_credentials_it_goes_to_the_bucket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_client: list[dict[str, Any]]
) -> None:
    creds = {
        "endpointUrl": "https://s3.eu-central-1.amazonaws.com", "accessId": "id", "accessSecret": "secret",
    }  # fmt: skip
    assert sdk.upload_in_memory_object("a.png", b"png", creds, "there", "job") == "there/job/a.png"
    made, put = s3_client
    assert (made["region_name"], made["aws_access_key_id"]) == ("eu-central-1", "id")
    assert put == {"bucket": "there", "key": "job/a.png", "body": b"png", "extra": {}}
    monkeypatch.setenv("BUCKET_ENDPOINT_URL", "https://minio:9000")
    monkeypatch.setenv("BUCKET_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("BUCKET_SECRET_ACCESS_KEY", "secret")
    (tmp_path / "a.mp4").write_bytes(b"mp4")
    month = time.strftime("%m-%y")
    extra = {"ContentType": "video/mp4", "ACL": "public-read"}
    assert sdk.upload_file_to_bucket("b.mp4", f"{tmp_path}/a.mp4", extra_args=extra) == f"{month}/b.mp4"
    made, put = s3_client[-2:]
    assert (made["region_name"], put["extra"]) == (None, extra)
    (url,) = sdk.bucket_upload("job", [f"{tmp_path}/a.mp4"], {**creds, "bucketName": "own"})
    assert url == f"https://s3.eu-central-1.amazonaws.com/own/job/{tmp_path}/a.mp4"
    assert s3_client[-1]["bucket"] == "own"
    sdk.files("job", [f"{tmp_path}/a.mp4"])
    assert s3_client[-1]["key"].startswith("job/")
    assert (s3_client[-1]["bucket"], s3_client[-1]["extra"]) == (month, {"ContentType": "image/mp4"})


@pytest.fixture
def s3_client(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace boto3's clients. Return a list of the arguments with which they are made, and of their uploads."""
    boto3 = pytest.importorskip("boto3")
    seen: list[dict[str, Any]] = []

    class Client:
        def upload_fileobj(
            self,
            source: IO[bytes],
            bucket: str,
            key: str,
            *,
            ExtraArgs: dict[str, str] | None = None,  # noqa: N803
        ) -> None:
            seen.append({"bucket": bucket, "key": key, "body": source.read(), "extra": ExtraArgs})

        def generate_presigned_url(self, _operation: str, *, Params: dict[str, str], ExpiresIn: int) -> str:  # noqa: N803
            return f"{Params['Bucket']}/{Params['Key']}"

    def client(_service: str, **how: Any) -> Client:
        seen.append(how)
        return Client()

    monkeypatch.setattr(boto3, "client", client)
    return seen


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
    assert sorted(found["system_info"]) == ["os", "processor", "python_version", "runpod"]
    assert [step["name"] for step in found["timestamps"]] == ["block", "answer"]
    assert all(
        sorted(step) == ["duration_ms", "name", "start_utc", "stop_utc"] for step in found["timestamps"]
    )
    assert debugger.get_debugger_output()["timestamps"] == []


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


# Modules that the stand-in need not have. They run RunPod's worker, or do what pilotflame does itself: the node keeps weights and
# checks downloads.
LEFT_OUT = {
    "runpod.serverless.modules": {
        "rp_fastapi", "rp_fitness", "rp_gpu_fitness", "rp_http", "rp_job", "rp_local", "rp_ping", "rp_scale", "rp_system_fitness",
        "rp_tips", "worker_state",
    },
    "runpod.serverless.utils": {"rp_model_cache", "rp_ssrf", "rp_volume_cache"},
}  # fmt: skip
HELPERS = {
    "calculate_chunk_size", "parse_content_length", "extract_disposition_params", "extract_region_from_url", "get_boto_client",
}  # fmt: skip


@pytest.mark.parametrize("package", LEFT_OUT)
def test_the_stand_in_has_the_names_of_the_package(package: str) -> None:
    folder, modules = package_file("/".join(package.split(".")[1:])), stand_in(print, print)
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
