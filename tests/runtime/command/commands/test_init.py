"""`pilotflame init`: what a template becomes, and errors."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from pilotflame.errors import CodeError, SettingsError
from pilotflame.runtime.cli import cli
from pilotflame.runtime.command.client.function_template import copy_template, templates
from pilotflame.runtime.ground.settings.function_settings import read_settings
from pilotflame.runtime.node.packaging.requirements import check_requirements

FILES = {"pilotflame.toml", "requirements.txt", "test_input.json", "README.md"}
NAMES = list(templates())


def test_the_templates():
    assert NAMES == [
        "fastapi", "hello", "image-classification", "onnx", "openvino", "reranking", "speech-recognition", "stream", "text-classification",
        "text-embedding", "text-generation", "torch-module", "vllm",
    ]  # fmt: skip
    assert all(templates().values())


def without_vllm(requirements: str) -> str:
    """Return the requirements that the tests' environment must meet. vLLM needs a GPU."""
    return "".join(line for line in requirements.splitlines(True) if not line.startswith("vllm"))


@pytest.mark.parametrize("template", NAMES)
def test_a_template_becomes_a_function_of_the_folders_name(template: str, tmp_path: Path):
    assert copy_template(template, tmp_path / "my-function") == "my-function"
    folder = tmp_path / "my-function"
    names = {path.name for path in folder.rglob("*")}
    assert names >= FILES
    assert not any("pycache" in name for name in names)
    assert read_settings(folder).name == "my-function"
    check_requirements(without_vllm((folder / "requirements.txt").read_text()))
    json.loads((folder / "test_input.json").read_text())
    ast.parse((folder / ("app.py" if template == "fastapi" else "handler.py")).read_text())
    readme = (folder / "README.md").read_text()
    assert "pilotflame invoke my-function " in readme
    assert f"invoke {template} " not in readme
    assert f"//{template}." not in readme
    assert f'"model": "{template}"' not in readme
    assert 15 <= readme.count("\n") <= 40


def test_agents_md_names_the_function_and_commands_that_exist(tmp_path: Path):
    copy_template("stream", tmp_path / "mine")
    guide = (tmp_path / "mine" / "AGENTS.md").read_text()
    assert "pilotflame invoke mine @test_input.json" in guide
    named = re.findall(r"`pilotflame (\w+)", guide)
    assert len(named) > 6
    assert set(named) <= set(cli.list_commands(click.Context(cli)))
    assert "{name}" not in guide


@pytest.mark.parametrize(
    ("template", "weights"), [("hello", ""), ("onnx", ""), ("reranking", " --snapshot WEIGHTS")]
)
def test_the_next_step_names_the_weights_that_are_missing(
    template: str, weights: str, run_here: Any, tmp_path: Path
):
    folder = tmp_path / "mine"
    told = run_here("init", folder, "--template", template).stdout
    assert told.strip().endswith(f"pilotflame test {folder}{weights}")


def test_an_empty_folder_is_taken_and_a_full_one_is_not(tmp_path: Path):
    copy_template("hello", tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(CodeError, match="not empty"):
        copy_template("stream", tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    with pytest.raises(CodeError, match="not empty"):
        copy_template("stream", tmp_path / "handler.py")


def test_an_unknown_template_is_named_with_those_there_are(tmp_path: Path):
    with pytest.raises(CodeError, match=r"'nothing'.*fastapi, hello, image-classification"):
        copy_template("nothing", tmp_path / "f")
    assert not (tmp_path / "f").exists()


@pytest.mark.parametrize(("name", "better"), [("Bad Name", "bad-name"), ("Köln_1", "koln-1"), ("-x-", "x")])
def test_a_name_that_no_function_may_have_is_refused_with_a_better_one(
    tmp_path: Path, name: str, better: str
):
    with pytest.raises(SettingsError) as caught:
        copy_template("hello", tmp_path / name)
    assert f"pilotflame init {tmp_path}/{better}" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_an_existing_folder_keeps_its_name_and_gives_a_similar_one(tmp_path: Path):
    (tmp_path / "My Folder").mkdir()
    assert copy_template("hello", tmp_path / "My Folder") == "my-folder"


def test_a_folder_that_gives_no_name_is_refused(tmp_path: Path):
    for name in ("___", "models"):
        with pytest.raises(SettingsError):
            copy_template("hello", tmp_path / name)
        assert not (tmp_path / name).exists()


def test_a_place_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CodeError, match="cannot be made"):
        copy_template("hello", tmp_path / "file" / "below")
