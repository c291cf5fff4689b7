"""Only addresses that are certainly this machine are loopback."""

from __future__ import annotations

import pytest
from pilotflame.addresses import is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_this_machine_alone(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.2", "localhost.example.org", "", "example.org", "::ffff:10.0.0.1"]
)
def test_other_machines_can_reach_it(host: str):
    assert not is_loopback(host)
