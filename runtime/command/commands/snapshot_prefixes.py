"""The command that computes beginnings of prompts before calls need them: `pilotflame snapshot prefixes`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from pydantic import ValidationError

from ....errors import BadInput
from ....handlers.language_model.declared_prefixes import BEGINNINGS
from ....snapshot.extras import needs
from ....snapshot.format.create import create
from ....snapshot.format.manifest import MANIFEST_NAME, Manifest
from ....snapshot.handle import Snapshot
from ..client import display, options

if TYPE_CHECKING:
    from ....handlers.language_model.model import LanguageModel

EXAMPLE = '{"support": {"messages": [{"role": "system", "content": "You answer questions about ..."}]}}'


@click.command()
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("file", metavar="PREFIXES.json", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--output",
    "-o",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="The folder to write.",
)
@options.as_json
def prefixes(model: Path, file: Path, output: Path, as_json: bool) -> None:
    """Compute beginnings that many prompts of MODEL share, and write them to a snapshot.

    A beginning is for example a system prompt with tools. MODEL is the folder of a language model. PREFIXES.json has the messages and
    tools of each beginning, by its name. Name the output in
    [snapshots] of pilotflame.toml, beside the model, and give it to language_model(..., prefixes=...). Make it again
    when the model, its tokenizer or the version of transformers changes.

    Example: pilotflame snapshot prefixes weights/ prefixes.json --output prefixes/
    """
    given = _read(file)
    started_s = time.monotonic()
    with display.spinner("loading the model"):
        made = _open(model)
    with display.spinner("reading the prefixes"):
        tokens = made.prefixes.write(given, output)
    manifest = create(output)
    manifest.write(output / MANIFEST_NAME)
    listed = ", ".join(f"{name} ({count} tokens)" for name, count in tokens.items())
    facts = {
        "tokens": tokens,
        "bytes": manifest.total_bytes,
        "digest": manifest.digest,
        "seconds": time.monotonic() - started_s,
    }
    display.print_result(
        facts, f"wrote {output}: {listed}, {display.size(manifest.total_bytes)}", as_json=as_json
    )


def _read(file: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the beginnings of prompts in a file. Raise BadInput, which names the wrong field, if the file is not valid."""
    try:
        found = BEGINNINGS.validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise BadInput(f"{file}: {place}: {first['msg']}.", remedy=f"Write for example {EXAMPLE}") from None
    if not found:
        raise BadInput(f"{file} has no beginnings.", remedy=f"Write for example {EXAMPLE}")
    return {name: one.model_dump(exclude_none=True) for name, one in found.items()}


def _open(folder: Path) -> LanguageModel:
    """Return the model of a folder, with its weights."""
    with needs("pilotflame snapshot prefixes", "transformers"):
        from ....handlers.language_model.model import LanguageModel  # noqa: PLC0415

    file = folder / MANIFEST_NAME
    manifest = Manifest.read(file) if file.is_file() else create(folder)
    snapshot = Snapshot(folder, manifest)
    model = LanguageModel(snapshot, rows=1, window=1 << 20)
    snapshot.open()
    snapshot.wait()
    return model
