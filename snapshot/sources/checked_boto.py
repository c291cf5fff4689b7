"""Lets a boto3 client connect only to allowed addresses.

Import this module only where such a client is used, because importing botocore takes time.
"""

from __future__ import annotations

import socket
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)
from botocore.exceptions import HTTPClientError
from botocore.httpsession import URLLib3Session
from urllib3.exceptions import NewConnectionError

from ...addresses import Addresses
from ...errors import SourceDenied
from .access import refused
from .dialer import AddressRefused, Dialer

CONNECT_TIMEOUT_S = 10.0


def check_addresses(client: Any, addresses: Addresses, ca_bundle: str | None = None) -> None:
    """Let `client` connect only to `addresses`, without a proxy. Its calls raise SourceDenied for other addresses."""
    config = client.meta.config
    session = URLLib3Session(
        verify=ca_bundle or True, timeout=(config.connect_timeout, config.read_timeout),
        max_pool_connections=config.max_pool_connections,
    )  # fmt: skip
    # Set a private attribute, because botocore has no setting for the class of its connections. If botocore renames the
    # manager, this line raises.
    session._manager.pool_classes_by_scheme = _pools(Dialer(addresses))  # noqa: SLF001

    def send(request: Any, **_: Any) -> Any:
        try:
            return session.send(request)
        except HTTPClientError as error:
            if isinstance(denied := error.kwargs.get("error"), SourceDenied):
                raise denied from None
            raise

    # botocore uses the response of this handler, and does not send the request itself.
    client.meta.events.register("before-send", send)


def _pools(dialer: Dialer) -> dict[str, Any]:
    """Return the classes of urllib3's pools, whose connections are made by `dialer`."""

    class BotoHttp(AWSHTTPConnection):  # type: ignore[misc]
        def _new_conn(self) -> socket.socket:
            return _connected(self, dialer)

    class BotoHttps(AWSHTTPSConnection):  # type: ignore[misc]
        def _new_conn(self) -> socket.socket:
            return _connected(self, dialer)

    class PlainPool(AWSHTTPConnectionPool):  # type: ignore[misc]
        ConnectionCls = BotoHttp

    class TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
        ConnectionCls = BotoHttps

    return {"http": PlainPool, "https": TlsPool}


def _connected(connection: Any, dialer: Dialer) -> socket.socket:
    """Return a socket that is connected to the host of urllib3's `connection`."""
    try:
        found = dialer.dial(connection.host, connection.port, CONNECT_TIMEOUT_S, connection.timeout)
    except AddressRefused as error:
        raise refused(connection.host, error.reason) from None
    except OSError as error:
        raise NewConnectionError(connection, str(error)) from error
    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found
