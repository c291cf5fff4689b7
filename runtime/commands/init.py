"""The command that copies a template into a new function's folder: `pilotflame init`."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import NamedTuple

import click

from ...errors import CodeError
from ..settings.function_settings import SETTINGS_FILE, check_name, slug
from . import display, options

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
README_FILE = "README.md"
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc")


class Template(NamedTuple):
    """A folder to start from, with one sentence about it."""

    name: str
    summary: str
    folder: Path


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option("--template", "-t", default="hello", help="The template to copy.")
@click.option("--list", "listing", is_flag=True, help="List the templates and exit.")
@options.as_json
def init(*, folder: Path | None, template: str, listing: bool, as_json: bool) -> None:
    """Make a new function's folder from a template.

    The last part of FOLDER becomes the function's name. Without FOLDER it is the template's name.

    \b
    Example:
      pilotflame init my-embeddings --template text-embedding
    """
    if listing:
        found = [{"name": known.name, "summary": known.summary} for known in templates()]
        rows = [tuple(known.values()) for known in found]
        return display.print_list(
            {"templates": found}, ("template", "what it is"), rows, empty="no templates", as_json=as_json
        )
    target = folder or Path(template)
    name = copy_template(template, target)
    facts = {"name": name, "template": template, "folder": str(target.resolve())}
    text = f"made {target} from {template}: read {target / README_FILE}, then: pilotflame test {target}"
    return display.print_result(facts, text, as_json=as_json)


def templates() -> list[Template]:
    """Return all templates by name."""
    return [
        Template(path.parent.name, _summary(path), path.parent)
        for path in sorted(TEMPLATES.glob("*/handler.py"))
    ]


def copy_template(template: str, folder: Path) -> str:
    """Copy a template to a folder that is empty or does not exist. Return the function's name."""
    found = {known.name: known for known in templates()}
    if template not in found:
        raise CodeError(f"There is no template {template!r}.", remedy=f"Choose one of: {', '.join(found)}.")
    name = check_name(slug(folder.resolve().name))
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CodeError(
                f"{folder} already exists and is not empty.",
                remedy="Choose another name; nothing was changed.",
            )
        shutil.copytree(found[template].folder, folder, ignore=_NOT_COPIED, dirs_exist_ok=True)
        _rename(folder, template, name)
    except OSError as error:
        raise CodeError(
            f"{folder} cannot be made: {error.strerror or error}.", remedy="Choose another place."
        ) from None
    return name


def _rename(folder: Path, template: str, name: str) -> None:
    """Replace the template's name by the function's in the settings and in the README's commands."""
    for file, places in (
        (SETTINGS_FILE, ('name = "{}"',)),
        (README_FILE, ("pilotflame invoke {} ", "/invoke/{}\n")),
    ):
        text = (folder / file).read_text(encoding="utf-8")
        for place in places:
            text = text.replace(place.format(template), place.format(name))
        (folder / file).write_text(text, encoding="utf-8")


def _summary(handler: Path) -> str:
    """Return the first line of a handler's docstring."""
    text = ast.get_docstring(ast.parse(handler.read_bytes())) or ""
    return text.partition("\n")[0]
