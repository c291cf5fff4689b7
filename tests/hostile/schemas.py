"""Reports a schema whose example has 10 billion characters and items, and one of 0.9 MB."""

from pydantic import BaseModel, ConfigDict, Field


class Event(BaseModel):
    text: str = Field(json_schema_extra={"minLength": 10**10})
    items: list[int] = Field(json_schema_extra={"minItems": 10**10})


class Answer(BaseModel):
    model_config = ConfigDict(json_schema_extra={"description": "x" * 900_000})


def handler(event: Event) -> Answer:
    return Answer()
