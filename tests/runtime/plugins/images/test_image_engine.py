"""`pilotflame build` with real podman: the image, its layers, a gateway that runs it, a push, and what fails."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
from containers import PODMAN, image_changes, podman, require_podman, running_engine
from live import gateway_here, short_folder, until
from pilotflame.errors import BuildFailed
from pilotflame.runtime.cli import main
from pilotflame.runtime.plugins.images.image_engine import ImageEngine

pytestmark = pytest.mark.timeout(300)

HANDLER = """
import os, tinything
def handler(event):
    return {"version": tinything.VERSION, "echo": event, "user": os.getuid()}
"""


LIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", "--network", "host")


# Prints the content of the program that the package uv installs, whether pilotflame runs, and which files of uv the build has left.
LOOK = """
import json, os, pathlib, subprocess
done = subprocess.run(["pilotflame", "--version"], capture_output=True)
left = [str(path) for folder in ("/run", "/var/cache/uv") if os.path.isdir(folder)
        for path in pathlib.Path(folder).rglob("*uv*")]
print(json.dumps([pathlib.Path("/usr/local/bin/uv").read_text(), done.returncode == 0, left]))
"""


class Done(NamedTuple):
    code: int
    out: str
    errors: str


class Builder:
    """Builds the function in `folder` from a base image without a network."""

    def __init__(self, folder: Path, base: str, uv_image: str) -> None:
        self.folder, self._base = folder, base
        self.tag = f"localhost/pilotflame-test-built/{folder.parent.name.lower()}:1.0"
        (folder.parent / "uv.toml").write_text('no-index = true\nfind-links = ["/wheels"]\n')
        secret = f"id=uv,src={folder.parent / 'uv.toml'}"
        self.options = ("--build-arg", f"UV_IMAGE={uv_image}", "--secret", secret)

    def run(self, *options: object, base: str = "") -> Done:
        words = [
            "build",
            self.folder,
            "--engine=podman",
            "--set",
            f"image.base={base or self._base}",
            *options,
        ]
        out, errors = io.StringIO(), io.StringIO()
        with image_changes(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
            code = main([*map(str, words), "--tag", self.tag, "--", *self.options])
        return Done(code, out.getvalue(), errors.getvalue())

    def built(self, *options: object) -> dict[str, Any]:
        done = self.run("--json", *options)
        assert done.code == 0, done.errors
        return dict(json.loads(done.out))

    def failure(self, *options: object, base: str = "") -> dict[str, Any]:
        done = self.run("--json", *options, base=base)
        assert done.code == 1, done.errors
        return dict(json.loads(done.errors.splitlines()[-1])["error"])


@pytest.fixture(scope="module")
def builder(base: str, uv_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    folder = tmp_path_factory.mktemp("build") / "hello"
    folder.mkdir()
    (folder / "handler.py").write_text(HANDLER)
    (folder / "requirements.txt").write_text("tinything==1.0\n")
    found = Builder(folder, base, uv_image)
    yield found
    podman("rmi", "--force", "--ignore", found.tag)


@pytest.fixture(scope="module")
def built(builder: Builder) -> dict[str, Any]:
    """Return what `pilotflame build --json` prints about an image that it has built."""
    return builder.built()


def trust(registry: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let podman use a registry without TLS."""
    conf = folder / "registries.conf"
    conf.write_text(f'[[registry]]\nlocation = "{registry.address}"\ninsecure = true\n')
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", str(conf))


def inspected(image: str) -> dict[str, Any]:
    return dict(json.loads(podman("image", "inspect", image))[0])


def test_the_base_is_named_by_its_digest(base: str, built: dict[str, Any]) -> None:
    assert built["base"] == f"{base.rpartition(':')[0]}@{inspected(base)['Digest']}"
    assert ImageEngine("podman", print, 60).pinned("localhost/no-such-image:1") is None


async def test_a_gateway_runs_the_image_that_was_built(builder: Builder, built: dict[str, Any]) -> None:
    assert built["image"] == f"{builder.tag.removesuffix(':1.0')}@{built['digest']}"
    with short_folder() as folder, running_engine(folder) as engine:
        async with gateway_here(folder / "state", engine=engine.url) as gateway:
            function = await gateway.deploy(HANDLER, {"image.name": built["image"]})
            answer = await function.answer({"n": 1})
            assert (answer["version"], answer["echo"]) == ("1.0", {"n": 1})


async def test_it_serves_alone_read_only_and_without_rights(built: dict[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = int(sock.getsockname()[1])
    process = await asyncio.create_subprocess_exec(
        *PODMAN, "run", "--rm", "--read-only", "--cap-drop", "all", *LIMITS, f"--env=PORT={port}",
        "--env=PILOTFLAME_LAME_DUCK_S=0", built["id"], stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

            async def ready() -> bool:
                with contextlib.suppress(httpx.TransportError):
                    return (await client.get("/readyz")).status_code == 200
                return False

            await until(ready, "200 of /readyz")
            assert (await client.post("/", json=1)).json() == {"version": "1.0", "echo": 1, "user": 65532}
        process.terminate()
        assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()


def test_a_change_of_the_handler_rebuilds_the_last_layer_only(
    builder: Builder, built: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (builder.folder / "handler.py").write_text(HANDLER + "\n# changed\n")
    git = ["git", "-C", builder.folder, "-c", "user.name=a", "-c", "user.email=a@b"]
    url = "https://user:password@git.example/hello"
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "1"], ["remote", "add", "origin", url]):
        subprocess.run([*git, *words], check=True)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    done = builder.run()
    shutil.rmtree(builder.folder / ".git")
    assert done.code == 0, done.errors
    assert "[image]\nname = " in done.out
    first, second = inspected(built["id"]), inspected(builder.tag)
    layers, changed = first["RootFS"]["Layers"], second["RootFS"]["Layers"]
    assert layers[:-1] == changed[:-1]
    assert layers[-1] != changed[-1]
    # Check the image's labels and configuration.
    labels = {key.rpartition(".")[2]: value for key, value in second["Labels"].items()}
    assert labels["created"] == "2023-11-14T22:13:20Z"
    assert second["Created"].startswith("2023-11-14T22:13:20")
    assert labels["source"] == "https://git.example/hello"
    assert len(labels["revision"]) == 40
    assert (labels["title"], labels["function"]) == ("hello", "hello")
    assert second["Labels"]["org.opencontainers.image.version"] == "1.0"
    assert second["Config"]["User"] == "65532:65532"
    assert second["Config"]["Cmd"] == ["pilotflame", "serve", "/function", "--host", "0.0.0.0"]


@pytest.mark.usefixtures("built")
def test_the_printed_context_builds_without_us_also_with_weights(builder: Builder, tmp_path: Path) -> None:
    weights = builder.folder / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(b"w")
    (weights / "model.safetensors").chmod(0o600)
    having = ("--snapshot", weights, "--with-weights")
    printed = builder.run("--print", *having)
    done = builder.run("--context", tmp_path / "context", *having)
    shutil.rmtree(weights)
    assert done.code == 0, done.errors
    assert (tmp_path / "context" / "Containerfile").read_text() == printed.out
    tag = f"{builder.tag}-printed"
    try:
        podman("build", "-q", "-t", tag, *builder.options, str(tmp_path / "context"))
        assert inspected(tag)["Labels"]["pilotflame.function"] == "hello"
        # The image's user can read files that only the user who built the image could read.
        script = "print(open('/function/weights/model.safetensors').read(), open('/function/pilotflame.toml').read())"
        found = podman("run", "--rm", *LIMITS, tag, "python", "-c", script)
        assert found.startswith("w ")
        assert 'snapshot = "weights"' in found
    finally:
        podman("rmi", "--force", "--ignore", tag)


def test_all_packages_are_installed_and_nothing_of_the_build_is_left(built: dict[str, Any]) -> None:
    """pilotflame requires the package uv, whose program in /usr/local/bin must stay. The build itself uses uv of another image."""
    found = podman("run", "--rm", *LIMITS, "--entrypoint", "python", built["id"], "-c", LOOK)
    assert json.loads(found) == ["#!/bin/sh\n", True, []]


def test_failures_say_what_to_do(
    builder: Builder, registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust(registry, tmp_path, monkeypatch)
    error = builder.failure(base=f"{registry.address}/none:1.0")
    assert (error["type"], error["details"]["reason"]) == ("build_failed", "base")
    assert f"{registry.address}/none:1.0" in error["message"]
    requirements = builder.folder / "requirements.txt"
    requirements.write_text("tinything==9.9\n")
    try:
        error = builder.failure()
        assert error["details"]["reason"] == "step"
        assert "tinything==9.9" in error["details"]["output"]
        assert "exit status" in error["message"]
    finally:
        requirements.write_text("tinything==1.0\n")


def test_a_push_gives_the_digest_in_the_registry(
    registry: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_podman()
    (tmp_path / "Containerfile").write_text("FROM scratch\nCOPY Containerfile /\n")
    trust(registry, tmp_path, monkeypatch)
    tag, refused = (f"{registry.address}/{team}/hello:2.0" for team in ("team", "refused"))
    lines: list[str] = []
    engine = ImageEngine("podman", lines.append, 60)
    podman("build", "-q", "-t", tag, "-t", refused, str(tmp_path))
    try:
        digest = engine.push(tag)
        assert registry.manifests.keys() == {"/v2/team/hello/manifests/2.0"}
        assert len(digest) == len("sha256:") + 64
        assert any("Copying blob" in line for line in lines)
        with pytest.raises(BuildFailed, match="podman login") as caught:
            engine.push(refused)
        assert caught.value.details["reason"] == "push"
    finally:
        podman("rmi", "--force", tag, refused)


def test_docker_tells_the_digest_in_its_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = f"sha256:{'0a' * 32}"
    (tmp_path / "docker").write_text(
        f"#!/bin/sh\necho 'a1b2: Pushed'\necho '1.0: digest: {digest} size: 1234'\n"
    )
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert ImageEngine("docker", lambda _line: None, 30).push("docker.io/team/hello:1.0") == digest


def test_without_an_engine_each_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    missing = "docker is not installed; podman is not installed; buildah is not installed"
    with pytest.raises(BuildFailed, match=missing) as caught:
        ImageEngine.find()
    assert caught.value.details == {"reason": "no_engine"}
    docker = tmp_path / "docker"
    docker.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon.' >&2\nexit 1\n")
    docker.chmod(0o755)
    with pytest.raises(BuildFailed, match="docker does not work: Cannot connect to the Docker daemon;"):
        ImageEngine.find()
    shutil.copy(shutil.which("true", path="/bin:/usr/bin") or "", tmp_path / "podman")
    # `find` skips docker, because its service does not answer.
    assert ImageEngine.find() == "podman"


def test_a_build_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # When this engine is terminated, it exits with status 0, as podman does. So the status does not show that the build failed.
    (tmp_path / "docker").write_text("#!/bin/sh\ntrap 'exit 0' TERM\necho begun\nsleep 60 & wait\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(BuildFailed, match=r"(?s)did not end within 0\.5 s.*begun") as caught:
        ImageEngine("docker", print, 0.5).build(tmp_path, "hello", {})
    assert caught.value.details == {"reason": "timeout", "output": "begun"}


@pytest.mark.parametrize(
    ("command", "output", "reason"),
    [
        ("build", "ERROR: failed to solve: nope:1: failed to resolve source metadata for docker.io/library/nope:1: not found", "base"),
        ("build", "Error response from daemon: pull access denied for nope, repository does not exist", "base"),
        ("build", "Error: creating build container: short-name \"nope\" did not resolve to an alias", "base"),
        ("build", "E: Unable to locate package nope", "step"),
        ("build", "write /x: no space left on device", "disk_full"),
        ("push", "denied: requested access to the resource is denied", "push"),
        ("push", "Error: writing blob: No space left on device", "disk_full"),
    ],
)  # fmt: skip
def test_what_engines_say_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, output: str, reason: str
) -> None:
    (tmp_path / "docker").write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\nexit 125\n")
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    engine = ImageEngine("docker", lambda _line: None, 30)
    with pytest.raises(BuildFailed, match=f"docker {command} failed \\(125\\)") as caught:
        engine.push("hello") if command == "push" else engine.build(tmp_path, "hello", {})
    assert caught.value.details == {"reason": reason, "output": output}
    assert caught.value.remedy


def test_a_push_needs_a_name_with_a_registry(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "handler.py").write_text("def handler(event):\n    return event\n")
    assert main(["build", str(tmp_path), "--name", "a", "--push"]) == 2
    assert "--push needs --tag" in capfd.readouterr().err
    assert main(["build", str(tmp_path), "--name", "a", "--tag", "--help"]) == 2
    assert "is not a name such as" in capfd.readouterr().err
