"""Defines a gateway's default address, and the certificate authorities that commands trust."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ....errors import GatewayError

if TYPE_CHECKING:
    import ssl

DEFAULT_URL = "http://127.0.0.1:8600"
CA_VARIABLE = "PILOTFLAME_CA"


def trusted_authorities() -> ssl.SSLContext | None:
    """Return a TLS context that trusts the authorities in the file PILOTFLAME_CA, or else SSL_CERT_FILE.

    Return None if neither variable is set. Then httpx or aiohttp trusts the well-known authorities. Raise GatewayError
    if the file cannot be read.
    """
    # The import of ssl takes time, and only commands that send requests need it.
    import ssl  # noqa: PLC0415

    variable = next((name for name in (CA_VARIABLE, "SSL_CERT_FILE") if os.environ.get(name)), None)
    if variable is None:
        return None
    try:
        return ssl.create_default_context(cafile=os.environ[variable])
    except OSError as error:
        why = getattr(error, "reason", "") or error.strerror
        wrong = f"{variable} is {os.environ[variable]}, which holds no certificate that can be read: {why}."
        raise GatewayError(wrong, remedy="Name a PEM file with the authority's certificate.") from None
