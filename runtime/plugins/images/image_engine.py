"""Builds, reads and pushes images with the command line of docker, podman or buildah."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ....errors import BuildFailed
from ...node.packaging.streamed_command import CommandOutcome, run_streamed
from .recipe import CONTAINERFILE

ENGINES = ("docker", "podman", "buildah")
QUERY_TIMEOUT_S = 60.0
EPOCH_VARIABLE = "SOURCE_DATE_EPOCH"
Reason = Literal["base", "disk_full", "timeout", "push", "step"]

SHOWN_LINES = 3
_PUSHED = re.compile(r"\bdigest: (sha256:[0-9a-f]{64})\b")
_DISK_FULL = re.compile(r"no space left on device|disk quota exceeded", re.IGNORECASE)
# Messages about images that cannot be pulled: first those of podman and buildah, then those of docker.
_NOT_PULLED = re.compile(
    r"creating build container|initializing source|did not resolve to an alias|unable to copy from source"
    r"|failed to resolve source metadata|pull access denied|failed to resolve reference"
)


@dataclass(frozen=True, slots=True)
class BuiltImage:
    """An image in the engine's storage. `digest` is None if the image gets a digest only when it is pushed.

    `size` is in bytes.
    """

    id: str
    digest: str | None
    size: int | None


@dataclass(frozen=True, slots=True)
class ImageEngine:
    """Runs commands of docker, podman or buildah. Each build and each push must end within `deadline_s`."""

    name: str
    progress: Callable[[str], None]
    """Called with each line that a build or a push writes."""
    deadline_s: float

    @staticmethod
    def find(name: str | None = None) -> str:
        """Return `name` if that engine works, or without `name` the first engine that works. Else raise BuildFailed."""
        problems: list[str] = []
        for candidate in (name,) if name is not None else ENGINES:
            if (problem := _problem(candidate)) is None:
                return candidate
            problems.append(f"{candidate} {problem}")
        message = "; ".join(problems)
        remedy = "Install docker, podman or buildah, and start docker's service if you use docker."
        raise BuildFailed(
            f"No engine can build images: {message}.", remedy=remedy, details={"reason": "no_engine"}
        )

    def build(
        self, context: Path, tag: str, labels: Mapping[str, str], *, platform: str | None = None,
        options: Sequence[str] = (),
    ) -> str:  # fmt: skip
        """Build the image of a context and give it the name `tag`. Return its id. Raise BuildFailed if the build fails."""
        with tempfile.TemporaryDirectory(prefix="pilotflame-build-") as folder:
            id_file = Path(folder, "id")
            named = [f"--label={key}={value}" for key, value in labels.items()]
            self._run(
                "build", "--tag", tag, "--iidfile", str(id_file), *named,
                *self._build_options(context, platform, options),
            )  # fmt: skip
            return id_file.read_text(encoding="ascii").strip()

    def inspect(self, image: str) -> BuiltImage:
        """Return the engine's facts about an image. Raise BuildFailed if the engine does not have the image."""
        if self.name == "buildah":
            found = json.loads(self._query("inspect", "--type", "image", image))
            size = sum(layer["size"] for layer in json.loads(found["Manifest"])["layers"])
            return BuiltImage(_prefixed(found["FromImageID"]), found["FromImageDigest"], size)
        facts = json.loads(self._query("image", "inspect", image))[0]
        return BuiltImage(_prefixed(facts["Id"]), _digest(facts), facts.get("Size"))

    def pinned(self, image: str) -> str | None:
        """Return the image's name with its digest, or None if the engine's storage does not have the image.

        For example, docker's builder does not put base images into the storage.
        """
        try:
            digest = self.inspect(image).digest
        except BuildFailed:
            return None
        return f"{repository_of(image)}@{digest}" if digest else None

    def push(self, tag: str) -> str:
        """Push an image to its registry. Return the image's digest in the registry. Raise BuildFailed if the push fails."""
        if self.name == "docker":
            # The last line of the output is like `1.0: digest: sha256:... size: 1234`.
            outcome = self._run("push", tag)
            if found := _PUSHED.search("\n".join(outcome.lines)):
                return found[1]
            message, remedy = f"docker push {tag} tells no digest.", "Look it up in the registry."
            raise BuildFailed(message, remedy=remedy, details={"reason": "push"})
        with tempfile.TemporaryDirectory(prefix="pilotflame-push-") as folder:
            digest_file = Path(folder, "digest")
            self._run("push", "--digestfile", str(digest_file), tag)
            return digest_file.read_text(encoding="ascii").strip()

    def _build_options(self, context: Path, platform: str | None, options: Sequence[str]) -> list[str]:
        found = ["--file", str(context / CONTAINERFILE)]
        if self.name == "buildah":
            # docker and podman cache layers by default, buildah only with this option.
            found.append("--layers")
        if platform is not None:
            found += ["--platform", platform]
        if epoch := os.environ.get(EPOCH_VARIABLE):
            found += (
                ["--build-arg", f"{EPOCH_VARIABLE}={epoch}"]
                if self.name == "docker"
                else ["--timestamp", epoch]
            )
        return [*found, *options, str(context)]

    def _run(self, command: Literal["build", "push"], *arguments: str) -> CommandOutcome:
        outcome = run_streamed(
            [self.name, command, *arguments], self.progress, deadline_s=self.deadline_s,
            environ={"DOCKER_BUILDKIT": "1", **os.environ},
        )  # fmt: skip
        if outcome.failed:
            raise self._failure(command, outcome)
        return outcome

    def _failure(self, command: Literal["build", "push"], outcome: CommandOutcome) -> BuildFailed:
        """Return the error. The user has already seen all lines of output, so the message has only the last lines."""
        reason, remedy = self._cause(command, outcome)
        how = f"did not end within {self.deadline_s:g} s" if outcome.late else f"failed ({outcome.status})"
        last = "\n".join(outcome.lines[-SHOWN_LINES:])
        details = {"reason": reason, "output": "\n".join(outcome.lines)}
        return BuildFailed(f"{self.name} {command} {how}: \n{last}\n", remedy=remedy, details=details)

    def _cause(self, command: Literal["build", "push"], outcome: CommandOutcome) -> tuple[Reason, str]:
        """Return why a build or push failed, and what the user can do."""
        output = "\n".join(outcome.lines)
        if outcome.late:
            return "timeout", "Pass a longer --timeout."
        if _DISK_FULL.search(output):
            return "disk_full", "Free space, for example that of unused images."
        login = f"the network, and `{self.name} login`"
        if command == "push":
            return "push", f"Check the registry in --tag, {login}."
        if _NOT_PULLED.search(output):
            return "base", f"Check the names of image.base and of uv's image, {login}."
        return "step", "Correct requirements.txt or [image] as its output says."

    def _query(self, *arguments: str) -> str:
        try:
            done = subprocess.run(
                [self.name, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
                timeout=QUERY_TIMEOUT_S,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            message = f"{self.name} {arguments[0]} did not answer within {QUERY_TIMEOUT_S:.0f} s."
            raise BuildFailed(
                message, remedy="Try again, or restart its service.", details={"reason": "timeout"}
            ) from None
        if done.returncode != 0:
            message = f"{self.name} {' '.join(arguments)} failed: {done.stderr.strip()[-500:]}."
            raise BuildFailed(message, remedy=f"Check that {self.name} works.", details={"reason": "step"})
        return done.stdout


def repository_of(tag: str) -> str:
    """Return the name of an image without its tag and digest. A colon before a slash belongs to a port."""
    return re.sub(r":[^:/]*$", "", tag.partition("@")[0])


def _problem(engine: str) -> str | None:
    """Return the reason that an engine cannot be used, or None. docker is only a client, so its service must answer."""
    if shutil.which(engine) is None:
        return "is not installed"
    try:
        done = subprocess.run(
            [engine, "version"], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
            timeout=QUERY_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not answer within {QUERY_TIMEOUT_S:.0f} s"
    last = (done.stderr.strip().splitlines() or ["it gives no reason"])[-1]
    return None if done.returncode == 0 else f"does not work: {last.rstrip('.')}"


def _digest(facts: Mapping[str, Any]) -> str | None:
    """Return the digest of the image's manifest. With docker, an image may get a digest only when it is pushed."""
    if digest := facts.get("Digest"):
        return str(digest)
    names = facts.get("RepoDigests") or [""]
    return names[0].partition("@")[2] or None


def _prefixed(image_id: str) -> str:
    return image_id if ":" in image_id else f"sha256:{image_id}"
