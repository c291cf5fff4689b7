"""The route table of a gateway, made without a gateway: its routes can be described, but not called."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
from pilotflame.entry_points import APIS, load
from pilotflame.runtime.front.api.admin import Admin
from pilotflame.runtime.front.api.credentials import CredentialsApi
from pilotflame.runtime.front.api.deploys import Deploys
from pilotflame.runtime.front.api.history import HistoryApi
from pilotflame.runtime.front.api.invoke import Invoker
from pilotflame.runtime.front.api.jobs import JobsApi
from pilotflame.runtime.front.api.logs import LogsApi
from pilotflame.runtime.front.api.openapi import OpenApi
from pilotflame.runtime.front.api.revisions import RevisionsApi
from pilotflame.runtime.front.api.usage import UsageApi
from pilotflame.runtime.front.api.warmup import WarmupApi
from pilotflame.runtime.front.api.webhooks import WebhooksApi
from pilotflame.runtime.front.http.routes import based
from pilotflame.runtime.front.pages.console import Console
from pilotflame.runtime.front.pages.docs_page import DocsPage
from pilotflame.runtime.node.functions.status import FunctionStatus


def described() -> OpenApi:
    missing: Any = None
    backend: Any = SimpleNamespace(
        functions=None,
        jobs=None,
        metrics=None,
        body_limit=None,
        state=Path(),
        origins=None,
        disk=SimpleNamespace(check=None),
        members=None,
        database=None,
    )
    apis = (
        Invoker(backend),
        JobsApi(backend),
        Admin(missing, missing, missing, missing, missing, missing),
        Deploys(missing, lambda: None, local=True),
        LogsApi(missing, missing, missing),
        RevisionsApi(missing),
        CredentialsApi(missing, missing, missing, missing, None),
        WebhooksApi(missing, missing),
        UsageApi(missing),
        HistoryApi(missing, missing),
        WarmupApi(missing),
        DocsPage(),
        Console(missing, missing, missing),
    )
    plugins = [kind(backend) for kind in load(APIS).values()]
    rows = [route for api in apis for route in api.routes()]
    rows += [route for plugin in plugins for route in based(plugin.base, plugin.routes())]
    return OpenApi(rows, lambda _request: (), plugins)


def describe(functions: Iterable[FunctionStatus]) -> dict[str, Any]:
    """Return the document of a gateway that has these functions."""
    found: dict[str, Any] = orjson.loads(orjson.dumps(described().document(functions)))
    return found
