"""Describes functions as TensorFlow Serving describes its models: the state of a version, and its only signature."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict

from ...node.functions.live import Live

SIGNATURE = "serving_default"
_DTYPES = {"number": "DT_FLOAT", "integer": "DT_INT64", "boolean": "DT_BOOL", "string": "DT_STRING"}
_DEPTH = 8


class StatusCode(TypedDict):
    """Why a version is not available; the code is OK if it is."""

    error_code: str
    error_message: str


class VersionStatus(TypedDict):
    """The state of a version."""

    version: str
    state: Literal["AVAILABLE", "END"]
    status: StatusCode


class ModelStatus(TypedDict):
    """A function as a model. Its live revision is its only version."""

    model_version_status: list[VersionStatus]


class ModelSpec(TypedDict):
    """The version that is described."""

    name: str
    signature_name: str
    version: str


class ModelMetadata(TypedDict):
    """The signature of a model, as its handler's annotations describe it."""

    model_spec: ModelSpec
    metadata: dict[str, Any]


def model_status(live: Live) -> ModelStatus:
    why = live.unavailable
    status = StatusCode(error_code="UNAVAILABLE" if why else "OK", error_message=why)
    version = VersionStatus(
        version=str(live.record.number), state="END" if why else "AVAILABLE", status=status
    )
    return ModelStatus(model_version_status=[version])


def model_metadata(live: Live) -> ModelMetadata:
    handler = live.record.handler
    signature = {
        "inputs": _tensors(handler.get("input_schema") or {}, "inputs"),
        "outputs": _tensors(handler.get("output_schema") or {}, "outputs"),
        "method_name": "tensorflow/serving/predict",
    }
    return ModelMetadata(
        model_spec=ModelSpec(name=live.record.function, signature_name="", version=str(live.record.number)),
        metadata={"signature_def": {"signature_def": {SIGNATURE: signature}}},
    )


def _tensors(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the tensors of a JSON schema: one for each property of an object, or else one named `name`."""
    definitions = schema.get("$defs", {})
    properties = _resolved(schema, definitions).get("properties") or {name: schema}
    return {
        key: {
            "dtype": _dtype(one, definitions),
            "tensor_shape": {"dim": [], "unknown_rank": True},
            "name": key,
        }
        for key, one in properties.items()
    }


def _dtype(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the type of the elements of a tensor. DT_INVALID means that the schema does not show it."""
    for _ in range(_DEPTH):
        schema = _resolved(schema, definitions)
        if schema.get("type") != "array" or not isinstance(schema.get("items"), dict):
            break
        schema = schema["items"]
    kind = schema.get("type")
    return _DTYPES.get(kind, "DT_INVALID") if isinstance(kind, str) else "DT_INVALID"


def _resolved(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    found = definitions.get(str(schema.get("$ref", "")).rpartition("/")[2], schema)
    return found if isinstance(found, Mapping) else schema
