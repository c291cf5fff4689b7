"""Write the pages that are made from other files.

    python infra/pages.py

docs/errors.md is made from errors.py, docs/rooms.md from the imports of the sources, docs/llms.txt from docs/index.md, and the table of
alerts in docs/operations.md from the conditions.
`tests/infra/test_pages.py` compares the pages with their sources.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import house
import pilotflame.errors
from pilotflame.errors import PilotflameError
from pilotflame.runtime.jobs.alerting.conditions import CONDITIONS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
INDEX = DOCS / "index.md"
# Statuses after which the same request may succeed later.
RETRIED = (429, 502, 503, 504)
_DRAWN = re.compile(r"^[\s│├└─]*(\w+) {2,}(\S.*)$", re.MULTILINE)
_MADE = re.compile(
    r"(<!-- made by infra/pages\.py from runtime/jobs/alerting/conditions\.py -->\n).*?(<!-- end -->\n)",
    re.DOTALL,
)
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)(.*)")

_ERRORS = """# Errors

This page is made from `errors.py` by `python infra/pages.py`.

Every error is JSON: `{"error": {"type", "message", "remedy", "details"}}`. `type` never changes and is for programs. `message` names
what failed, and `remedy`, if there is one, what to do. The commands print both, and with `--json` the same object. Jobs that fail carry it as their
`error`.

A response with 429 or 503 has `Retry-After`, the seconds after which the same request may succeed. 504 means that the time of the
caller or of the function ran out. All other requests fail again unless something changes.

A call that the gateway ended (`revision_replaced`, `shutting_down`) has status 503 and `Retry-After` if nothing of it was started, or
if the function is `idempotent`. Otherwise its status is 500, and `x-should-retry: false` keeps the clients of OpenAI and Anthropic from
repeating it.

| `type` | status | raised when | retry |
|---|---|---|---|
"""

_ROOMS = """# The imports between wings and between rooms

These pictures are drawn from the imports of the sources by `python infra/pages.py`. An arrow means: imports. An import that follows from
others is left out: `front` imports `ground`, too, since `jobs` does.
[Architecture](architecture.md) says what each wing holds.

{wings}"""


def errors_page() -> str:
    """Return the text of docs/errors.md."""
    texts = dict(_DRAWN.findall(pilotflame.errors.__doc__ or ""))
    rows = (
        f"| `{error.code}` | {error.status} | {texts[type(error).__name__]} | {'later' if error.status in RETRIED else 'no'} |\n"
        for error in (PilotflameError.from_wire({"type": kind.code}) for kind in _kinds(PilotflameError))
    )
    return _ERRORS + "".join(rows)


def rooms_page() -> str:
    """Return the text of docs/rooms.md: the wings, and the rooms of each wing."""
    found = house.House(ROOT)
    pictures = [_picture(found.imports_between(_drawn_box))]
    for wing in house.WINGS:
        imports = found.imports_between(functools.partial(house.room_of, wing=wing))
        pictures.append(f"## {wing}\n\n{_picture(imports)}")
    return _ROOMS.format(wings="\n".join(pictures))


def operations_page() -> str:
    """Return the text of docs/operations.md, in which the table of the conditions of alerts is made."""
    rows = "".join(f"| `{kind.name}` | {kind.begins} | {kind.ends} |\n" for kind in CONDITIONS)
    table = f"| condition | begins if | ends if |\n|---|---|---|\n{rows}"
    return _MADE.sub(lambda found: f"{found[1]}{table}{found[2]}", (DOCS / "operations.md").read_text())


def _drawn_box(module: str) -> str | None:
    return house.box_of(module) if "." in module else None


def _picture(imports: dict[str, set[str]]) -> str:
    """Draw the parts and their imports, without imports that follow from other imports."""
    parts = [
        f"    {part}" for part, others in sorted(imports.items()) if not others and _alone(part, imports)
    ]
    arrows = [
        f"    {part} --> {other}"
        for part, others in sorted(imports.items())
        for other in sorted(others)
        if not any(other in _reached(imports, third) for third in others - {other})
    ]
    return "```mermaid\nflowchart TD\n" + "\n".join(parts + arrows) + "\n```\n"


def _alone(part: str, imports: dict[str, set[str]]) -> bool:
    return not any(part in others for others in imports.values())


def _reached(imports: dict[str, set[str]], room: str) -> set[str]:
    """Return what a room imports, directly or through other rooms."""
    found, left = set[str](), [room]
    while left:
        new = imports.get(left.pop(), set()) - found
        found |= new
        left += new
    return found


def llms_text() -> str:
    """Return the text of docs/llms.txt: the links of docs/index.md, in the form of llmstxt.org."""
    title, summary, *sections = INDEX.read_text().split("\n\n")
    lines = [title.replace("The pages", "pilotflame"), f"> {summary.partition(' Pick ')[0]}"]
    for block in sections:
        if block.startswith("## "):
            lines.append(block)
        elif links := [_listed(match) for line in block.splitlines() if (match := _LINK.search(line))]:
            lines.append("\n".join(links))
    return "\n\n".join(lines) + "\n"


def _listed(link: re.Match[str]) -> str:
    name, target, rest = link.groups()
    return f"- [{name}]({target}): {rest.strip(' |:')}"


def _kinds(kind: type[PilotflameError]) -> Iterator[type[PilotflameError]]:
    """Yield the classes below `kind` of errors.py, each before its own children."""
    for child in kind.__subclasses__():
        if child.__module__ == pilotflame.errors.__name__:
            yield child
            yield from _kinds(child)


def main() -> None:
    (DOCS / "errors.md").write_text(errors_page())
    (DOCS / "rooms.md").write_text(rooms_page())
    (DOCS / "operations.md").write_text(operations_page())
    (DOCS / "llms.txt").write_text(llms_text())


if __name__ == "__main__":
    main()
