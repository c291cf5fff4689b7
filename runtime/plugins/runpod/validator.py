"""Checks a job's input against a schema, with the same results and in the same order as RunPod's package."""

from __future__ import annotations

import json
from typing import Any


def validate(raw_input: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """Return {"validated_input": …} with the input and the schema's defaults, or {"errors": […]} if it is wrong.

    As in RunPod's package, a value of the default's type is not checked further, also not by `constraints`.
    """
    errors = [
        f"Unexpected input. {key} is not a valid input option." for key in raw_input if key not in schema
    ]
    checked = dict(raw_input)
    for key, rules in schema.items():
        if not isinstance(rules, dict):
            try:
                schema[key] = json.loads(rules)
            except json.JSONDecodeError:
                errors.append(f"Schema error, {key} is not a dictionary.")
    for key, rules in schema.items():
        errors += _filled(key, rules, checked, given=key in raw_input)
    for key, rules in schema.items():
        errors += _faults(key, rules, checked)
    return {"errors": errors} if errors else {"validated_input": checked}


def _filled(key: str, rules: dict[str, Any], checked: dict[str, Any], *, given: bool) -> list[str]:
    """Add the default of a missing value to `checked`. Return the schema's errors, and the error of a missing required
    value.
    """
    errors = [] if "type" in rules else [f"Schema error, missing type for {key}."]
    if "required" not in rules or (rules["required"] and not given):
        errors.append(f"{key} is a required input.")
    elif not given and "default" in rules:
        checked[key] = rules["default"]
    elif not given:
        errors.append(f"Schema error, missing default value for {key}.")
    return errors


def _faults(key: str, rules: Any, checked: dict[str, Any]) -> list[str]:
    errors: list[str] = []
    if not isinstance(rules, dict):
        return errors
    if key in checked:
        wanted = rules["type"]
        if wanted is float and type(checked[key]) is int:
            checked[key] = float(checked[key])
        if "default" in rules and isinstance(checked[key], type(rules["default"])):
            return errors
        if not isinstance(checked[key], wanted):
            errors.append(f"{key} should be {wanted} type, not {type(checked[key])}.")
    if "constraints" in rules and not rules["constraints"](checked.get(key)):
        errors.append(f"{key} does not meet the constraints.")
    return errors
