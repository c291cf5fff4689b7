"""TLS contexts of servers and clients in tests, with the certificates of an authority that trustme makes."""

from __future__ import annotations

import ssl

import trustme


def serving(authority: trustme.CA, host: str = "127.0.0.1") -> ssl.SSLContext:
    """Return the TLS context of a server at `host`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert(host).configure_cert(context)
    return context


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    """Return the TLS context of a client that trusts the authority."""
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context
