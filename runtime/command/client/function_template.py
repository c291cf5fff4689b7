"""Copies a template into a new function's folder."""

from __future__ import annotations

import ast
import shlex
import shutil
from pathlib import Path

from ....errors import CodeError, SettingsError
from ...ground.settings.function_settings import SETTINGS_FILE, check_name, name_problem, slug

TEMPLATES = Path(__file__).resolve().parents[3] / "templates"
README_FILE = "README.md"
# This file tells coding assistants how to work on a function. All templates have the same file.
AGENTS_FILE = "AGENTS.md"
_NOT_COPIED = shutil.ignore_patterns("__pycache__", "*.pyc")


def templates() -> dict[str, str]:
    """Return the templates' names, each with the first line of the docstring of its handler or app."""
    files = sorted([*TEMPLATES.glob("*/handler.py"), *TEMPLATES.glob("*/app.py")])
    texts = {file.parent.name: ast.get_docstring(ast.parse(file.read_bytes())) or "" for file in files}
    return {name: text.partition("\n")[0] for name, text in texts.items()}


def copy_template(template: str, folder: Path) -> str:
    """Copy a template to a folder that is empty or does not exist, and return the function's name.

    Raise CodeError if there is no such template, or if the folder has files or cannot be written.
    """
    if template not in (found := templates()):
        raise CodeError(f"There is no template {template!r}.", remedy=f"Choose one of: {', '.join(found)}.")
    name = _name_of(folder)
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            remedy = "Go on with what is there, or choose another name; nothing was changed."
            raise CodeError(f"{folder} already exists and is not empty.", remedy=remedy)
        shutil.copytree(TEMPLATES / template, folder, ignore=_NOT_COPIED, dirs_exist_ok=True)
        _rename(folder, template, name)
        guide = (TEMPLATES / AGENTS_FILE).read_text(encoding="utf-8")
        (folder / AGENTS_FILE).write_text(guide.replace("{name}", name), encoding="utf-8")
    except OSError as error:
        failed = f"{folder} cannot be made: {error.strerror or error}."
        raise CodeError(failed, remedy="Choose another place.") from None
    return name


def lacks_weights(folder: Path) -> bool:
    """Return True if the settings in a template's folder leave the weights to the user."""
    return "\n# snapshot = " in (folder / SETTINGS_FILE).read_text(encoding="utf-8")


def _name_of(folder: Path) -> str:
    """Return the function's name for a folder. Raise SettingsError if the name of a new folder is not valid.

    For an existing folder, return the most similar valid name, because the user has not chosen the folder's name for
    this function.
    """
    last = folder.resolve().name
    name = slug(last)
    if folder.exists() or name == last or name_problem(name) is not None:
        return check_name(name)
    better = folder.with_name(name)
    raise SettingsError(
        f"{last!r} cannot be a function's name: allowed are a-z, 0-9 and -.",
        remedy=f"Take {name!r}: pilotflame init {shlex.quote(str(better))}",
    )


def _rename(folder: Path, template: str, name: str) -> None:
    """Replace the template's name by `name` in the settings, and in the commands of the README."""
    names = {
        SETTINGS_FILE: ['name = "{}"'],
        README_FILE: [
            "pilotflame invoke {} ",
            "pilotflame logs {} ",
            "/invoke/{}\n",
            "/asgi/{}/",
            "//{}.localhost",
            '"model": "{}"',
        ],
    }
    for file, places in names.items():
        text = (folder / file).read_text(encoding="utf-8")
        for place in places:
            text = text.replace(place.format(template), place.format(name))
        (folder / file).write_text(text, encoding="utf-8")
