"""Draws mutants of a module with cosmic-ray: small changes of its source, at different places.

The draw depends on the text of a place, not on its line. So a change elsewhere in the module keeps the sample.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

# Operators that need arguments.
LEFT_OUT = {"core/VariableInserter", "core/VariableReplacer"}
Position: TypeAlias = tuple[tuple[int, int], tuple[int, int]]


class Choice(NamedTuple):
    """A change at a place. `number` is its index among the operator's changes there, `occurrence` its index in the whole module."""

    operator: str
    number: int
    occurrence: int
    line: int


@dataclass
class Mutant:
    id: str
    module: str
    line: int
    operator: str
    diff: str
    code: str
    outcome: str = ""

    def __str__(self) -> str:
        return f"# {self.id} {self.module}.py:{self.line} {self.operator}\n{self.diff}"


def drawn(module: str, source: str, count: int) -> list[Mutant]:
    """Return the sample of a module: mutants at `count` places, in the order of their lines."""
    found: list[Mutant] = []
    for key, choices in sorted(_places(source).items(), key=lambda place: _hash(module, place[0])):
        ranked = sorted(choices, key=lambda choice: _hash(module, key, choice.operator, choice.number))
        made = (_mutant(module, source, key, choice) for choice in ranked)
        if len(found) < count and (first := next(filter(None, made), None)):
            found.append(first)
    return sorted(found, key=lambda mutant: mutant.line)


def _places(source: str) -> dict[str, list[Choice]]:
    """Return what can change at each place, by the place's text."""
    # Nothing evaluates most annotations. The type checker tests them.
    annotations = [
        ((found.lineno, found.col_offset), (found.end_lineno or 0, found.end_col_offset or 0))
        for node in ast.walk(ast.parse(source)) for name in ("annotation", "returns")
        if isinstance(found := getattr(node, name, None), ast.expr)
    ]  # fmt: skip
    places = defaultdict[Position, list[Choice]](list)
    nodes = list(ast_nodes(get_ast(source)))
    for name in sorted(set(operator_names()) - LEFT_OUT):
        operator, seen = get_operator(name)(), Counter[Position]()
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, position in enumerate(positions):
            if not any(start <= position[0] and position[1] <= end for start, end in annotations):
                places[position].append(Choice(name, seen[position], occurrence, position[0][0]))
                seen[position] += 1
    lines, texts, by_text = source.splitlines(), Counter[str](), dict[str, list[Choice]]()
    for position in sorted(places):
        (line, column), (end, _) = position
        text = "\n".join((*(each.strip() for each in lines[line - 1 : end]), str(column)))
        by_text[f"{text}\n{texts[text]}"] = places[position]
        texts[text] += 1
    return by_text


def _mutant(module: str, source: str, key: str, choice: Choice) -> Mutant | None:
    """Return the mutant, or None if Python cannot compile it or reads the same program."""
    try:
        code = mutate_code(source, get_operator(choice.operator)(), choice.occurrence)
        compile(code, module, "exec")
    except (AttributeError, SyntaxError):
        # cosmic-ray cannot replace an exception with a dotted name.
        return None
    if ast.dump(ast.parse(code)) == ast.dump(ast.parse(source)):
        return None
    changed = difflib.unified_diff(source.splitlines(), code.splitlines(), n=0, lineterm="")
    diff = "\n".join(text for text in list(changed)[2:] if not text.startswith("@@"))
    identity = _hash(module, key, choice.operator, choice.number)[:10]
    return Mutant(identity, module, choice.line, choice.operator.removeprefix("core/"), diff, code)


def _hash(*parts: object) -> str:
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()
