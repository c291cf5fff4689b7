"""The Containerfile as text: the order of its layers, and that no setting can add an instruction or a shell command."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.plugins.images.recipe import CUDA_BASE, DEFAULT_BASE, Recipe
from pydantic import ValidationError

WHEEL = "pilotflame-0.1.0-py3-none-any.whl"
# Characters that could end a line, a word or a quotation, or begin an instruction, a variable or a command.
_HOSTILE = st.text(alphabet="abz09 .-+:=/@\n\r\\\"'`$(){}#&;|<>\x00\u2028\x85é", max_size=30)

# Begin some values with a letter, because most accepted values do.
HOSTILE = _HOSTILE | _HOSTILE.map("a".__add__)


def instructions(recipe: Recipe) -> list[str]:
    """The instructions of the Containerfile, each as one line."""
    joined = recipe.containerfile().replace("\\\n", " ")
    return [line for line in joined.split("\n") if line and not line.startswith("#")]


def recipe(**fields: Any) -> Recipe:
    return Recipe(**{"function": "hello", "uv_version": "1.2.3", "wheel": WHEEL} | fields)


def test_the_layers_go_from_the_most_lasting_to_the_handler() -> None:
    full = recipe(packages=("ffmpeg",), requirements=True, weights=True)
    found = [line for line in instructions(full) if re.match("RUN|COPY|FROM", line)]
    wanted = (
        r"FROM \$\{UV_IMAGE\}", f"FROM {DEFAULT_BASE}$", "RUN apt-get .* ffmpeg ", "COPY requirements.txt",
        "RUN .* -r .*requirements.txt", f"COPY constraints.txt {WHEEL}", "RUN .* -c .*constraints.txt .*",
        "COPY --chmod=0755 weights /function", "COPY function /function",
    )  # fmt: skip
    assert len(found) == len(wanted)
    for pattern, line in zip(wanted, found, strict=True):
        assert re.match(pattern, line), line


def test_it_runs_alone_as_a_user_without_rights() -> None:
    lines = instructions(recipe())
    assert "USER 65532:65532" in lines
    assert 'CMD ["pilotflame", "serve", "/function", "--host", "0.0.0.0"]' in lines
    assert not any("apt-get" in line for line in lines)


def test_cuda_has_nvidias_base_with_python() -> None:
    found = instructions(recipe(base="cuda", packages=("ffmpeg",)))
    assert f"FROM {CUDA_BASE}" in found
    assert any(" python3 python-is-python3 ffmpeg " in line for line in found)


def test_hashes_and_extras_are_passed_on() -> None:
    text = recipe(requirements=True, hashes=True, extras=("s3",)).containerfile()
    assert "uv pip install --require-hashes -r" in text
    assert f"'pilotflame[s3] @ file:///opt/pilotflame/{WHEEL}'" in text


@example("a\nRUN x", "a\nRUN x", ["a\nRUN x"])
@example("a b", "a AS packages", ["a && b"])
@example("a$b", "${UV_IMAGE}", ["$(a)"])
@given(HOSTILE, HOSTILE, st.lists(HOSTILE, max_size=3))
def test_no_setting_can_add_an_instruction_or_a_command(name: str, base: str, packages: list[str]) -> None:
    settings = []
    # Try each setting alone, because almost no example has three values that are accepted.
    for fields in ({"name": name}, {"image": {"base": base}}, {"image": {"packages": packages}}):
        try:
            settings.append(FunctionSettings.model_validate({"name": "hello", **fields}))
        except ValidationError:
            continue
    plain = instructions(recipe(packages=("ffmpeg",)))
    for found in settings:
        wanted = found.image.packages or ("ffmpeg",)
        lines = instructions(recipe(function=found.name, base=found.image.base, packages=wanted))
        assert [line.split()[0] for line in lines] == [line.split()[0] for line in plain]
        # No value adds a word to its line, or a variable.
        others = [line for line in lines if "apt-get" not in line]
        assert [len(line.split()) for line in others] == [
            len(line.split()) for line in plain if "apt-get" not in line
        ]
        assert "".join(lines).count("$") == "".join(plain).count("$")
        apt = next(line for line in lines if "apt-get" in line).split("--no-install-recommends")[1]
        assert shlex.split(apt.partition(" && ")[0]) == list(dict.fromkeys(wanted))


@pytest.mark.parametrize(
    "package", ["ffmpeg", "libgl1=1.6.0-1", "g++", "libc6:arm64", "python3.11=3.11.2-6+deb12u2"]
)
def test_packages_may_have_versions(package: str) -> None:
    assert FunctionSettings.model_validate(
        {"name": "a", "image": {"packages": [package]}}
    ).image.packages == (package,)


@pytest.mark.parametrize("package", ["", "-y", "a b", "a\nRUN x", "a;b", "$(x)", "../x.deb", "a&&b"])
def test_other_packages_are_refused_by_name(package: str) -> None:
    with pytest.raises(ValidationError, match=r"image\.packages"):
        FunctionSettings.model_validate({"name": "a", "image": {"packages": [package]}})
