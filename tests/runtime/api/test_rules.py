"""The rules: every route of a gateway takes what it should, and one that nobody thought of takes `admin`."""

from __future__ import annotations

import pytest
from pilotflame.runtime.access.keys import Scope
from pilotflame.runtime.api.rules import OPEN, scope_of


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/invoke/{function}", Scope.INVOKE),
        ("/v2/{function}/run", Scope.INVOKE),
        ("/predictions", Scope.INVOKE),
        ("/predictions/{id}/cancel", Scope.INVOKE),
        ("/2015-03-31/functions/{function}/invocations", Scope.INVOKE),
        ("/v1/functions", Scope.DEPLOY),
        ("/v1/functions/{function}/logs", Scope.DEPLOY),
        ("/v1/functions/{function}/secrets/{key}", Scope.DEPLOY),
        ("/openapi.json", None),
        ("/metrics", Scope.ADMIN),
        ("/v1/keys", Scope.ADMIN),
        ("/v1/keys/{id}", Scope.ADMIN),
        ("/v1/anything", Scope.ADMIN),
        ("/", Scope.ADMIN),
    ],
)
def test_a_route_takes_its_scope(path: str, scope: Scope | None):
    assert scope_of(path) is scope


def test_health_is_all_that_is_open():
    assert {"/healthz", "/readyz"} == OPEN
