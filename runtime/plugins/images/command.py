"""The command that makes a container image of a function: `pilotflame build`."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import click

from ....errors import SettingsError
from ...command.client import display, options
from ...command.client.options import FunctionSource
from .image_engine import ENGINES, EPOCH_VARIABLE, ImageEngine, repository_of
from .recipe import CONTAINERFILE

if TYPE_CHECKING:
    from .build_context import BuildContext

GIT_TIMEOUT_S = 10.0
TIMEOUT_S = 3600.0
_TAG = re.compile(r"[a-z0-9][A-Za-z0-9._:/-]{0,511}")


@click.command()
@options.function_source
@click.argument("engine_options", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--tag", "-t", metavar="IMAGE", help="Name of the image.  [default: localhost/pilotflame/NAME:CODE]"
)
@click.option("--push", is_flag=True, help="Push it to the registry in --tag.")
@click.option("--engine", type=click.Choice(ENGINES), help="By default the first that works.")
@click.option("--platform", metavar="OS/ARCH", help="Build for another platform, as linux/arm64.")
@click.option("--with-weights", is_flag=True, help="Put the weights of `snapshot` into the image.")
@click.option("--print", "print_only", is_flag=True, help="Print the Containerfile, and build nothing.")
@click.option(
    "--context",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the Containerfile and its files into DIR, and build nothing.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=1),
    default=TIMEOUT_S,
    metavar="SECONDS",
    help="How long the build may take.",
)
@options.as_json
def build(
    *, source: FunctionSource, print_only: bool, context: Path | None, as_json: bool, **how: Any
) -> None:
    """Build a container image with FOLDER's function, its requirements and pilotflame.

    \b
    The image starts from image.base, gets the Debian packages in image.packages, and runs as a user without
    rights. It serves the function alone, or under a gateway with image.name. Words after FOLDER and -- go to the engine's
    build command, as `--no-cache` or `--secret id=uv,src=uv.toml`.

    \b
    Examples:
      pilotflame build hello
      pilotflame build hello --tag registry.example/hello:1.0 --push
      pilotflame build hello --context hello-image
      pilotflame build hello -- --no-cache
    """
    if not as_json:
        display.warn(options.withheld(source.folder))
    with _written(source, context, with_weights=how.pop("with_weights")) as written:
        if print_only:
            return display.echo((written.folder / CONTAINERFILE).read_text(encoding="utf-8"), nl=False)
        if not as_json:
            display.warn(written.notices)
        if context is not None:
            command = f"podman build --tag {written.recipe.function} {context}"
            text = (
                f"{context} is written; build it: {command}, or docker build --file {context}/Containerfile …"
            )
            return display.print_result({"context": str(context)}, text, as_json=as_json)
        return _build(source.folder, written, as_json=as_json, **how)


@contextmanager
def _written(source: FunctionSource, folder: Path | None, *, with_weights: bool) -> Iterator[BuildContext]:
    """Write the build context into `folder`, or into a temporary folder if `folder` is None."""
    # Imported here, as in other commands, so that --help is fast.
    from .build_context import write_context  # noqa: PLC0415

    with tempfile.TemporaryDirectory(prefix="pilotflame-build-") as temporary:
        target = folder or Path(temporary, "context")
        overrides = source.overrides()
        yield write_context(source.folder, target, overrides=overrides, with_weights=with_weights)


def _build(
    folder: Path, context: BuildContext, *, tag: str | None, push: bool, engine: str | None, platform: str | None,
    timeout_s: float, engine_options: tuple[str, ...], as_json: bool,
) -> None:  # fmt: skip
    if push and tag is None:
        raise click.UsageError("--push needs --tag, which names the registry.")
    tag = _checked(tag or f"localhost/pilotflame/{context.recipe.function}:{context.code_digest[:12]}")
    started_s = time.monotonic()
    runner = ImageEngine(ImageEngine.find(engine), display.say, timeout_s)
    where: dict[str, Any] = {"platform": platform, "options": engine_options}
    built = runner.inspect(runner.build(context.folder, tag, _labels(folder, tag), **where))
    digest = runner.push(tag) if push else built.digest
    name = f"{repository_of(tag)}@{digest}" if digest else built.id
    facts = {
        "image": name, "id": built.id, "digest": digest, "tag": tag, "size_bytes": built.size, "pushed": push,
        "engine": runner.name, "base": runner.pinned(context.recipe.base_image),
        "seconds": round(time.monotonic() - started_s, 1), "notices": context.notices,
    }  # fmt: skip
    display.print_result(facts, f"{_told(facts)}\n{deploy_hint(folder, name)}", as_json=as_json)


def _told(facts: dict[str, Any]) -> str:
    size = f", {display.size(facts['size_bytes'])}" if facts["size_bytes"] else ""
    base = f"\nits base image is {facts['base']}" if facts["base"] else ""
    return f"{facts['tag']} is {'pushed' if facts['pushed'] else 'built'} in {facts['seconds']} s{size}{base}"


def deploy_hint(folder: Path, image: str) -> str:
    """Return the lines that say how a gateway runs the function in `folder` in its image."""
    command = f"pilotflame deploy {shlex.quote(str(folder))} --set image.name={image}"
    return f'run it under a gateway: {command}\nor in pilotflame.toml:\n[image]\nname = "{image}"'


def _checked(tag: str) -> str:
    if not _TAG.fullmatch(tag):
        raise click.BadParameter(
            f"{tag!r} is not a name such as registry.example/hello:1.0.", param_hint="'--tag'"
        )
    return tag


def _labels(folder: Path, tag: str) -> dict[str, str]:
    """Return the labels whose values differ between builds: time, version, and the folder's commit and origin."""
    version = tag.removeprefix(repository_of(tag)).lstrip(":") or "latest"
    found = {"created": _created(), "version": version}
    if revision := _git(folder, "rev-parse", "HEAD"):
        changed = "-dirty" if _git(folder, "status", "--porcelain", "--", ".") else ""
        found["revision"] = revision + changed
    if origin := _git(folder, "config", "--get", "remote.origin.url"):
        found["source"] = _without_credentials(origin)
    return {f"org.opencontainers.image.{key}": value for key, value in found.items()}


def _created() -> str:
    epoch = os.environ.get(EPOCH_VARIABLE) or str(int(time.time()))
    try:
        return datetime.fromtimestamp(int(epoch), UTC).isoformat().replace("+00:00", "Z")
    except (ValueError, OverflowError):
        message = f"{EPOCH_VARIABLE} is {epoch!r}, which is no Unix time."
        raise SettingsError(message, remedy="Set it to a number of seconds.") from None


def _without_credentials(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])) if parts.scheme else url


def _git(folder: Path, *arguments: str) -> str:
    """Return the output of a git command in the folder, or "" if git is missing or the command fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            check=False, timeout=GIT_TIMEOUT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
