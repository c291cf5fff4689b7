"""Models of the files of Prometheus and Grafana in infra/, and the metrics that their queries name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import promql_parser
from custom_kinds import Duration, Strict, Text
from pydantic import Field

# Grafana's variables in queries, and the values that replace them for the parser.
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$function": ".*"}
_LEGEND_LABEL = re.compile(r"\{\{\s*(?:\$labels\.)?([a-z_]+)\s*\}\}")


class Rule(Strict):
    alert: Text
    expr: Text
    wait: Annotated[Duration, Field(alias="for")] = "0s"
    labels: dict[Literal["severity"], Literal["page", "ticket"]]
    annotations: dict[Literal["summary", "description"], Text]


class RuleGroup(Strict):
    name: Text
    rules: list[Rule] = Field(min_length=1)


class RuleFile(Strict):
    groups: list[RuleGroup] = Field(min_length=1)


class AlertRoute(Strict):
    receiver: Text
    group_by: list[Text]
    repeat_interval: Duration


class Receiver(Strict):
    name: Text


class Alertmanager(Strict):
    route: AlertRoute
    receivers: list[Receiver] = Field(min_length=1)


class Datasource(Strict):
    type: Literal["prometheus"]
    uid: Text


class Target(Strict):
    expr: Text
    ref_id: Text = Field(alias="refId")
    legend: str = Field("", alias="legendFormat")


class GridPos(Strict):
    x: int = Field(ge=0, le=23)
    y: int = Field(ge=0)
    w: int = Field(ge=1, le=24)
    h: int = Field(ge=1)


class Defaults(Strict):
    unit: Literal["s", "bytes", "reqps", "ops", "percentunit", "short"]
    min: float | None = None
    max: float | None = None


class FieldConfig(Strict):
    defaults: Defaults
    overrides: list[Any] = Field([], max_length=0)


class Panel(Strict):
    id: int = Field(ge=1)
    type: Literal["timeseries", "stat"]
    title: Text
    description: str = ""
    datasource: Datasource
    grid: GridPos = Field(alias="gridPos")
    field_config: FieldConfig = Field(alias="fieldConfig")
    targets: list[Target] = Field(min_length=1)


class Variable(Strict):
    name: Text
    label: Text
    type: Literal["query"]
    datasource: Datasource
    query: Text
    refresh: Literal[1, 2]
    include_all: bool = Field(alias="includeAll")
    all_value: str = Field(alias="allValue")
    multi: bool


class Templating(Strict):
    list: tuple[Variable, ...] = Field(strict=False)


class TimeRange(Strict):
    start: Text = Field(alias="from")
    to: Text


class Dashboard(Strict):
    uid: Text
    title: Text
    tags: list[Text]
    schema_version: int = Field(ge=39, alias="schemaVersion")
    editable: bool
    refresh: Duration
    time: TimeRange
    templating: Templating
    panels: list[Panel] = Field(min_length=1)


class ProvisionedSource(Strict):
    name: Text
    uid: Text
    type: Literal["prometheus"]
    access: Literal["proxy"]
    url: Text
    is_default: bool = Field(alias="isDefault")


class Datasources(Strict):
    api_version: Literal[1] = Field(alias="apiVersion")
    datasources: list[ProvisionedSource] = Field(min_length=1)


class ProviderOptions(Strict):
    path: Text


class Provider(Strict):
    name: Text
    type: Literal["file"]
    options: ProviderOptions


class Providers(Strict):
    api_version: Literal[1] = Field(alias="apiVersion")
    providers: list[Provider] = Field(min_length=1)


def parse_query(query: str) -> promql_parser.Expr:
    """Parse a query of Prometheus, with variables of Grafana. Raise ValueError if the query is invalid."""
    for name, value in VARIABLES.items():
        query = query.replace(name, value)
    return promql_parser.parse(query)


def metrics_of(query: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each metric that a query names, with the labels that the metric must have."""
    nodes: list[Any] = []
    promql_parser.walk(parse_query(query), nodes.append)
    grouped: set[str] = set()
    for node in nodes:
        if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            grouped.update(node.modifier.labels)
    for node in nodes:
        if isinstance(node, promql_parser.VectorSelector) and node.name:
            yield node.name, {matcher.name for matcher in node.matchers.matchers} | grouped


def labels_of(template: str) -> set[str]:
    """Return the labels that a legend or an annotation shows."""
    return set(_LEGEND_LABEL.findall(template))
