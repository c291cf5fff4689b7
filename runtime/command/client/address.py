"""Defines a gateway's address and key, and the certificate authorities that commands trust."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from ....addresses import is_loopback
from ....errors import GatewayError, Unauthorized

if TYPE_CHECKING:
    import ssl

# The variable of the setting `port` also tells the commands where a gateway of this machine listens.
_PORT = os.environ.get("PILOTFLAME_PORT", "")
DEFAULT_URL = f"http://127.0.0.1:{_PORT if _PORT.isdecimal() and int(_PORT) else 8600}"
URL_VARIABLE = "PILOTFLAME_URL"
KEY_VARIABLE = "PILOTFLAME_API_KEY"
CA_VARIABLE = "PILOTFLAME_CA"


def trusted_authorities(url: str = "https:") -> ssl.SSLContext | None:
    """Return a TLS context that trusts the authorities in the file PILOTFLAME_CA, or else SSL_CERT_FILE.

    Return None if neither variable is set, and for a URL without TLS. Then httpx or aiohttp trusts the well-known authorities. Raise
    GatewayError if the file cannot be read.
    """
    # The import of ssl takes time, and only commands that send requests need it.
    import ssl  # noqa: PLC0415

    variable = next((name for name in (CA_VARIABLE, "SSL_CERT_FILE") if os.environ.get(name)), None)
    if variable is None or not url.lower().startswith("https:"):
        return None
    try:
        return ssl.create_default_context(cafile=os.environ[variable])
    except OSError as error:
        why = getattr(error, "reason", "") or error.strerror
        wrong = f"{variable} is {os.environ[variable]}, which holds no certificate that can be read: {why}."
        raise GatewayError(wrong, remedy="Name a PEM file with the authority's certificate.") from None


def host_of(url: str) -> str:
    """Return the host in the address of a gateway. Raise GatewayError if `url` has no host, or another scheme than http and https."""
    try:
        parsed, why = urlsplit(url), "it must begin with http:// or https:// and name a host"
        if parsed.scheme in ("http", "https") and parsed.hostname and parsed.port != 0:
            return parsed.hostname
    except ValueError as error:
        why = str(error)
    raise GatewayError(f"{url!r} is not a gateway's address: {why}.", remedy=f"An example: {DEFAULT_URL}.")


def proxy_of(url: str) -> str | None:
    """Return the proxy that the environment names for a gateway, or None. A proxy cannot reach a gateway on this machine."""
    # The import takes time, and only commands that send requests need it.
    from urllib.request import getproxies, proxy_bypass  # noqa: PLC0415

    if is_loopback(host := host_of(url)) or proxy_bypass(host):
        return None
    found = getproxies().get(urlsplit(url).scheme)
    return found if found is None or "://" in found else f"http://{found}"


def authorization(api_key: str, url: str) -> dict[str, str]:
    """Return the headers that send an API key to `url`. Raise Unauthorized if the key is malformed, or if `url` has a user, who would replace it."""
    if not (api_key.isascii() and api_key.isprintable()) or " " in api_key:
        remedy = f"Check --api-key and {KEY_VARIABLE}; a key looks like pf_…."
        raise Unauthorized("The API key contains spaces or characters outside ASCII.", remedy=remedy)
    if api_key and "@" in urlsplit(url).netloc:
        remedy = f"Remove them from --url and {URL_VARIABLE}, or set no API key."
        raise Unauthorized(
            "The gateway's address has a user or a password, which replaces the API key.", remedy=remedy
        )
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def path_of(*segments: str) -> str:
    """Return the path of a route. Each segment is quoted, so that a function's name cannot lead to another route."""
    return "".join(f"/{quote(segment, safe='')}" for segment in segments)
