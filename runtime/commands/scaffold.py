"""The scaffold: a new function's folder, copied from a template."""

from __future__ import annotations

import ast
import shutil
from pathlib import Path
from typing import NamedTuple

from ...errors import CodeError
from ..settings.function_settings import SETTINGS_FILE, check_name, slug

TEMPLATES = Path(__file__).resolve().parents[2] / "templates"
README_FILE = "README.md"
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc")


class Template(NamedTuple):
    """A folder to start from, and what it is in a sentence."""

    name: str
    summary: str
    folder: Path


def templates() -> list[Template]:
    """All templates, by name."""
    return [
        Template(path.parent.name, _summary(path), path.parent)
        for path in sorted(TEMPLATES.glob("*/handler.py"))
    ]


def scaffold(template: str, folder: Path) -> str:
    """Copies `template` to `folder`, which must not exist or be empty; gives the function's name."""
    found = {known.name: known for known in templates()}
    if template not in found:
        raise CodeError(f"There is no template {template!r}.", remedy=f"Choose one of: {', '.join(found)}.")
    name = check_name(slug(folder.resolve().name))
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise CodeError(
                f"{folder} is already there and not empty.",
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
    """Puts the function's name where the template has its own: the settings, and the README's commands."""
    for file, places in (
        (SETTINGS_FILE, ('name = "{}"',)),
        (README_FILE, ("pilotflame invoke {} ", "/invoke/{}\n")),
    ):
        text = (folder / file).read_text(encoding="utf-8")
        for place in places:
            text = text.replace(place.format(template), place.format(name))
        (folder / file).write_text(text, encoding="utf-8")


def _summary(handler: Path) -> str:
    """The first sentence of the handler's docstring."""
    text = ast.get_docstring(ast.parse(handler.read_bytes())) or ""
    return text.partition("\n")[0]
