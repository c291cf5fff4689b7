"""The command that copies a template into a new function's folder: `pilotflame init`."""

from __future__ import annotations

from pathlib import Path

import click

from ..client import display, options
from ..client.function_template import README_FILE, copy_template, lacks_weights, templates


@click.command()
@click.argument("folder", required=False, type=click.Path(path_type=Path))
@click.option(
    "--template",
    "-t",
    default="hello",
    help="The template to copy.",
    shell_complete=lambda _context, _option, text: [name for name in templates() if name.startswith(text)],
)
@click.option("--list", "listing", is_flag=True, help="List the templates and exit.")
@options.as_json
def init(*, folder: Path | None, template: str, listing: bool, as_json: bool) -> None:
    """Make a new function's folder from a template.

    The last part of FOLDER becomes the function's name, so it may have only a-z, 0-9 and -. Without FOLDER, the folder
    is named like the template. AGENTS.md in the folder tells coding assistants how to test and deploy the function.

    Example: pilotflame init my-embeddings --template text-embedding
    """
    if listing:
        found = templates()
        if as_json:
            listed = [{"name": name, "summary": summary} for name, summary in found.items()]
            return display.print_json({"templates": listed})
        return display.print_table(("template", "what it is"), list(found.items()))
    target = folder or Path(template)
    name = copy_template(template, target)
    facts = {"name": name, "template": template, "folder": str(target.resolve())}
    weights = " --snapshot WEIGHTS" if lacks_weights(target) else ""
    text = (
        f"made {target} from {template}: read {target / README_FILE}, then: pilotflame test {target}{weights}"
    )
    return display.print_result(facts, text, as_json=as_json)
