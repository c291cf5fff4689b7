"""Only addresses that are certainly this machine are loopback, and only public or allowed ones are connected to."""

from __future__ import annotations

import pytest
from pilotflame.addresses import Addresses, is_loopback


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "127.8.9.10", "::1"])
def test_this_machine_alone(host: str):
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "192.0.2.2", "localhost.example.org", "", "example.org", "::ffff:10.0.0.1"]
)
def test_other_machines_can_reach_it(host: str):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("address", "refused", "refused_here"),
    [
        ("8.8.8.8", False, False), ("2606:4700::1111", False, False), ("2606:4700::1111%eth0", False, False),
        ("127.0.0.1", True, True), ("::1", True, True), ("169.254.169.254", True, True), ("192.168.0.1", True, True),
        ("fe80::1%eth0", True, True), ("100::1", True, True), ("not an address", True, True), ("", True, True),
        ("10.1.2.3", True, False), ("::ffff:10.1.2.3", True, False), ("64:ff9b::a01:203", True, False),
        ("::ffff:127.0.0.1", True, True), ("64:ff9b::7f00:1", True, True), ("::ffff:8.8.8.8", False, False),
        ("fd00::5", True, False), ("fd01::5", True, True),
    ],
)  # fmt: skip
def test_only_public_and_allowed_addresses_have_no_fault(
    address: str, refused: bool, refused_here: bool
) -> None:
    assert (Addresses().fault(address) is not None) == refused
    here = Addresses.of(["10.1.0.0/16", "fd00::/64"])
    assert (here.fault(address) is not None) == refused_here
