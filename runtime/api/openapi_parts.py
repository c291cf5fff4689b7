"""Parts that every description of routes is made of, as OpenAPI spells them."""

from __future__ import annotations

from typing import Any


def json_answer(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """An answer (or a body) of JSON."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def errors(schema: dict[str, Any], *codes: int) -> dict[str, Any]:
    """Typed errors, by status; `schema` is that of one."""
    return {str(code): json_answer("A typed error.", schema) for code in codes}


def query(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    """A parameter behind the question mark."""
    return {"name": name, "in": "query", "schema": schema, "description": description}
