"""Defines and validates the alerts of a function, which are the table `[alerts]` of pilotflame.toml."""

from __future__ import annotations

from typing import Self

from pydantic import BaseModel, Field, model_validator


class Alerts(BaseModel, frozen=True, extra="forbid", strict=True):
    """The conditions whose beginning and end the gateway reports to a webhook. Without a URL, it reports none."""

    url: str | None = Field(
        None,
        max_length=2048,
        pattern=r"^https?://\S+$",
        description="Where alerts are sent, as signed webhooks; by default nowhere.",
    )
    cold_start_ms: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="Milliseconds of a cold start above which there is an alert; by default none.",
    )
    error_share: float = Field(
        0.1,
        gt=0,
        le=1,
        description="The share of at least 20 calls in 300 s that fail with a status of 500 or above, from which on there is an alert.",
    )

    @model_validator(mode="after")
    def _to_somewhere(self) -> Self:
        if self.url is not None:
            return self
        for key, setting in type(self).model_fields.items():
            if getattr(self, key) != setting.default:
                raise ValueError(f"alerts.{key} is set, but alerts.url is not; set alerts.url, or remove it")
        return self
