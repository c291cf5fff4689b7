"""Wheels with one module, for indexes in a folder."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

INSTALLERS_OWN = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")


def write_wheel(folder: Path, name: str, version: str, code: str, needs: Sequence[str] = ()) -> Path:
    """Write the wheel of a module `name`, with its `main` as a command. `needs` are its requirements."""
    info = f"{name}-{version}.dist-info"
    required = "".join(f"Requires-Dist: {need}\n" for need in needs)
    files = {
        f"{name}.py": code,
        f"{info}/METADATA": f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n"
        f"License-Expression: MIT\n{required}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name}={name}:main\n",
    }
    rows = [f"{path},sha256={_digest(text)},{len(text)}" for path, text in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""])
    wheel = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as packed:
        for path, text in files.items():
            packed.writestr(path, text)
    return wheel


def write_installed_wheel(folder: Path, name: str, scripts: Mapping[str, str]) -> None:
    """Write the wheel of an installed package. `scripts` are programs that it puts beside Python, by name."""
    found = metadata.distribution(name)
    stem = f"{found.metadata['Name'].replace('-', '_')}-{found.version}"
    info = next(file.parts[0] for file in found.files or () if file.name == "METADATA")
    # The last tag is for the newest Python.
    *_, tag = [line for line in (found.read_text("WHEEL") or "").splitlines() if line.startswith("Tag: ")]
    files = {
        file.as_posix(): Path(str(found.locate_file(file))).read_bytes()
        for file in found.files or ()
        if ".." not in file.parts and file.suffix != ".pyc" and file.name not in INSTALLERS_OWN
    }
    files |= {
        f"{info.removesuffix('.dist-info')}.data/scripts/{name}": text.encode()
        for name, text in scripts.items()
    }
    rows = [f"{_field(path)},sha256={_digest(data)},{len(data)}" for path, data in files.items()]
    files[f"{info}/RECORD"] = "\n".join([*rows, f"{info}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(folder / f"{stem}-{tag.removeprefix('Tag: ')}.whl", "w") as packed:
        for path, data in files.items():
            packed.writestr(path, data)


def _field(path: str) -> str:
    return f'"{path}"' if "," in path else path


def _digest(content: str | bytes) -> str:
    data = content.encode() if isinstance(content, str) else content
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
