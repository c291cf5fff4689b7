"""The schemas of a function become components of an OpenAPI document in one walk."""

from __future__ import annotations

from datetime import UTC, datetime

from pilotflame.runtime.ground.settings.function_settings import FunctionSettings
from pilotflame.runtime.ground.telemetry.rung_name import RungName
from pilotflame.runtime.node.functions.live import DesiredWorkers, FunctionStatus, Workers
from pilotflame.runtime.plugins.predictions.predictor_schema import predictor_components

COUNT = 1000


def test_each_of_many_definitions_is_referred_to() -> None:
    names = [f"D{number}" for number in range(COUNT)]
    schema = {
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in [*names, "Unknown"]},
        "$defs": {name: {"type": "object"} for name in names},
    }
    status = FunctionStatus(
        name="f", revision="r1-abc", created_at=datetime(2026, 1, 2, tzinfo=UTC), kind="plain", streaming=False, batch=None,
        snapshot=None, workers=Workers(ready=0, parked=0, starting=0, draining=0), desired=DesiredWorkers(awake=0, held=0, because=[]),
        standby=False, rung=RungName.LOCAL, zygote=False, queued=0, in_flight=0, activations=0, last_cold_start_ms=None,
        last_cold_start_phases_ms={}, warnings=[], settings=FunctionSettings(name="f"), input_schema=schema, output_schema={},
    )  # fmt: skip
    components = predictor_components(status, {"D7"})
    found = [one["$ref"].rpartition("/")[2] for one in components["Input"]["properties"].values()]
    assert found == [name if name != "D7" else "f.D7" for name in names] + ["Unknown"]
    assert components["Input"]["properties"]["Unknown"] == {"$ref": "#/$defs/Unknown"}
    assert {"D0", "f.D7"} <= components.keys()
    assert "D7" not in components
