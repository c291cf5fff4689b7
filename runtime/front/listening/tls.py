"""Serves HTTPS with a certificate from files, and follows these files: certificates are renewed every few weeks."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from ....errors import GatewayError
from ...ground.settings.gateway_settings import GatewaySettings

LOG = logging.getLogger(__name__)
CHECK_S = 1.0
PROTOCOLS = ("http/1.1",)
HOST_MISMATCH = 62
"""OpenSSL's code of a certificate for another host name."""
FileStamps: TypeAlias = tuple[tuple[int, int, int], ...]
"""The inode, the size and the time of the last change of each file. These numbers tell whether the files have changed."""


class Certificate:
    """The gateway's certificate chain and private key, in PEM files. The constructor raises GatewayError if the files
    cannot be used.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._chain, self._key = chain, key
        self._seen = self._look()
        self._checked_s = time.monotonic()
        self._current = self._load()
        self._warn_of_readers()
        self.context = self._load()
        """The TLS context of all listening sockets. This object stays the same, and gives each connection the current certificate."""
        self.context.sni_callback = self._choose

    def reload(self) -> None:
        """Read the files again. If they cannot be used, log why, and go on with the old certificate."""
        try:
            self._seen = self._look()
            self._current = self._load()
            self._warn_of_readers()
        except GatewayError as error:
            LOG.warning("the old TLS certificate stays in use: %s", error)
            return
        LOG.info("the TLS certificate was read again from %s", self._chain)

    def covers(self, host: str) -> bool:
        """Return True if the certificate is for this host name. Decide with a TLS handshake in memory, so that the
        rules of real clients apply.
        """
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client.load_verify_locations(self._chain)
        sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
        asking = client.wrap_bio(received, sent, server_hostname=host)
        answering = self._current.wrap_bio(sent, received, server_side=True)
        for side in (asking, answering, asking):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                # Ignore other errors, such as an unknown issuer or an expired certificate.
                return error.verify_code != HOST_MISMATCH
        return True

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        """Give a new connection the current certificate."""
        self._follow()
        connection.context = self._current

    @property
    def pem(self) -> tuple[bytes, bytes]:
        """The current chain and key, for servers that use no `context`. These servers may use threads of their own."""
        self._follow()
        return self._pem

    def _follow(self) -> None:
        """Reload the files if they have changed. Check at most once a second. If the files have not changed, a check
        takes only two calls of stat.
        """
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_S:
            self._checked_s = now_s
            if self._changed():
                self.reload()

    def _changed(self) -> bool:
        try:
            return self._look() != self._seen
        except GatewayError:
            # Keep the current certificate. The old file was removed, and the new file does not exist yet.
            return False

    def _look(self) -> FileStamps:
        return tuple(
            (found.st_ino, found.st_size, found.st_mtime_ns)
            for found in (_status(self._chain, "tls_cert"), _status(self._key, "tls_key"))
        )

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(PROTOCOLS)
        try:
            # The password is empty. Otherwise, OpenSSL would ask for a password on the terminal.
            context.load_cert_chain(self._chain, self._key, password="")
            self._pem = self._chain.read_bytes(), self._key.read_bytes()
        except (OSError, ValueError) as error:
            raise self._refused(error) from None
        return context

    def _refused(self, error: Exception) -> GatewayError:
        """Return an error that names the file at fault."""
        reason = getattr(error, "reason", "") or str(error)
        if "KEY_VALUES_MISMATCH" in reason:
            message = f"tls_key is {self._key}, which is not the key of the certificate in {self._chain}."
            return GatewayError(message, remedy="Give the key with which the certificate was made.")
        try:
            ssl.create_default_context(cafile=self._chain)
        except (OSError, ValueError):
            message = f"tls_cert is {self._chain}, which holds no certificate that can be read: {reason}."
            return GatewayError(
                message, remedy="Give a file with the chain in PEM, the gateway's certificate first."
            )
        message = f"tls_key is {self._key}, which holds no key that can be read: {reason}."
        return GatewayError(message, remedy="Give a file with the key in PEM, without a password.")

    def _warn_of_readers(self) -> None:
        if _status(self._key, "tls_key").st_mode & stat.S_IROTH:
            LOG.warning(
                "every user of this machine can read the TLS key %s: chmod o-r %s", self._key, self._key
            )


def examine_hosts(settings: GatewaySettings) -> Iterator[tuple[str, str, str]]:
    """Yield (name, found, what to do) for each pattern of `app_hosts`: whether such names have an address, and are in the
    certificate, if the gateway has one.
    """
    for pattern in settings.app_hosts:
        yield f"host {pattern}", *_examine_host(pattern, settings.tls_cert, settings.tls_key)


def _examine_host(pattern: str, chain: Path | None, key: Path | None) -> tuple[str, str]:
    host = pattern.replace("*", "pilotflame-doctor")
    try:
        found = ", ".join(sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None)}))
        if chain is not None and key is not None and not Certificate(chain, key).covers(host):
            return (
                f"the certificate in {chain} is not for {host}",
                f"Get a certificate that has {pattern}, too.",
            )
    except OSError as error:
        return (
            f"{host}: {error.strerror}",
            f"Add a DNS record {pattern} with the address of the gateway or its proxy.",
        )
    except GatewayError as error:
        return error.message, error.remedy
    return found, ""


def _status(file: Path, setting: str) -> os.stat_result:
    try:
        return file.stat()
    except OSError as error:
        message = f"{setting} is {file}, which cannot be read: {error.strerror}."
        raise GatewayError(
            message, remedy="Check the path, and that the gateway's user may read it."
        ) from None
