"""Which function has which host name."""

from __future__ import annotations

import pytest
from pilotflame.errors import Forbidden, SettingsError
from pilotflame.runtime.ground.access.host_claims import NOBODY, HostClaims
from pilotflame.runtime.ground.settings.function_settings import FunctionSettings, name_problem

ALLOWED = ("*.apps.test", "given.apps.test", "shop.test")


def of(name: str, *hosts: str) -> FunctionSettings:
    return FunctionSettings(name=name, hosts=hosts)


@pytest.fixture
def live() -> list[FunctionSettings]:
    return [of("shop", "shop.test", "given.apps.test"), of("old", "a.apps.test")]


@pytest.fixture
def claims(live: list[FunctionSettings]) -> HostClaims:
    found = HostClaims(ALLOWED, lambda: live)
    found.update()
    return found


@pytest.mark.parametrize(
    ("host", "function"),
    [
        ("shop.localhost", "shop"), ("SHOP.localhost.:8600", "shop"), ("shop.apps.test", "shop"), ("shop.test:80", "shop"),
        ("given.apps.test", "shop"), ("absent.localhost", "absent"),
        # The stored function `old` claimed this name when names below a pattern had no default owners.
        ("a.apps.test", "old"), ("old.apps.test", "old"),
        ("b.shop.localhost", NOBODY), ("x/../y.localhost", NOBODY), ("a@b.localhost", NOBODY), (".localhost", NOBODY),
        ("-.localhost", NOBODY), ("models.localhost", NOBODY), ("_x.apps.test", NOBODY),
        ("localhost:8600", None), ("localhost", None), ("127.0.0.1:8600", None), ("[::1]:8600", None), ("apps.test", None),
        ("gateway.test", None), ("", None), ("shop.localhost.test", None),
    ],
)  # fmt: skip
def test_each_name_has_one_function(claims: HostClaims, host: str, function: str | None) -> None:
    assert claims.find(host) == function


def test_no_function_can_be_nobody() -> None:
    assert name_problem(NOBODY) is not None


def test_a_name_that_fits_a_pattern_stays_away_from_the_gateway_after_its_function(
    claims: HostClaims, live: list[FunctionSettings]
) -> None:
    live.clear()
    claims.update()
    assert (claims.find("shop.test"), claims.find("a.apps.test")) == (NOBODY, "a")


def test_the_name_of_another_function_is_refused(claims: HostClaims) -> None:
    for host in ("old.apps.test", "old.localhost", "later.apps.test", "shop.test"):
        with pytest.raises(SettingsError, match=host):
            claims.check(of("new", host))
    for host in ("gateway.test", "localhost.test", "apps.test"):
        with pytest.raises(Forbidden, match=host):
            claims.check(of("new", host))
    claims.check(of("new", "new.apps.test", "new.localhost", "deep.new.apps.test"))
    claims.check(of("shop", "shop.test", "given.apps.test"))


def test_a_browser_finds_a_function_at(claims: HostClaims) -> None:
    assert claims.name_of(of("new")) == "new.apps.test"
    assert claims.name_of(of("shop", "refused.example", "shop.test")) == "shop.test"
    assert HostClaims((), tuple).name_of(of("new")) == "new.localhost"
    assert HostClaims(("shop.test",), tuple).name_of(of("new")) == "new.localhost"
