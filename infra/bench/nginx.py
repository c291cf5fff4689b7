"""nginx on loopback: the fast range server of the snapshot benchmark, in plain and in TLS.

python infra/bench/nginx.py FOLDER      serve a folder until interrupted
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme

_HOST = "127.0.0.1"
_START_S = 10.0
_STOP_S = 10.0
_PLACES = ("/usr/sbin/nginx", "/usr/local/sbin/nginx")

# Nothing logged, bodies by sendfile, connections kept: the server is to be no part of the measurement.
_CONFIG = """
daemon off;
worker_processes 2;
pid {folder}/nginx.pid;
error_log {folder}/error.log warn;
{user}
events {{ worker_connections 1024; }}
http {{
    access_log off;
    sendfile on;
    sendfile_max_chunk 2m;
    tcp_nopush on;
    tcp_nodelay on;
    keepalive_requests 100000000;
    keepalive_timeout 3600s;
    default_type application/octet-stream;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    server {{
        listen {host}:{port};
        listen {host}:{tls_port} ssl;
        ssl_certificate {folder}/server.pem;
        ssl_certificate_key {folder}/server.pem;
        ssl_protocols TLSv1.3;
        root {root};
    }}
}}
"""


class NginxError(Exception):
    """nginx is missing, or did not start or end."""


@dataclass(frozen=True)
class Nginx:
    """A running one. Signatures and credentials are ignored: S3 clients take it for a public, path-style endpoint."""

    port: int
    tls_port: int
    authority: Path
    """The certificate that clients are to trust."""
    pid: int

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def tls_url(self) -> str:
        return f"https://{_HOST}:{self.tls_port}"


@contextmanager
def start_nginx(root: Path) -> Iterator[Nginx]:
    """Serve folder `root` on two free ports, in plain and in TLS; ended by its pid."""
    with tempfile.TemporaryDirectory(prefix="nginx-bench-") as name:
        folder = Path(name)
        port, tls_port = _free_ports()
        authority = trustme.CA()
        authority.issue_cert(_HOST).private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        authority.cert_pem.write_to_path(str(folder / "authority.pem"))
        config = _CONFIG.format(
            folder=folder,
            host=_HOST,
            port=port,
            tls_port=tls_port,
            root=root.resolve(),
            user="user root;" if os.geteuid() == 0 else "",  # else workers may not read what root made
        )
        (folder / "nginx.conf").write_text(config)
        process = subprocess.Popen(
            [_binary(), "-p", name, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            _wait(process, folder / "error.log", (port, tls_port))
            yield Nginx(port, tls_port, folder / "authority.pem", process.pid)
        finally:
            _stop(process)


def _binary() -> str:
    found = shutil.which("nginx") or next((place for place in _PLACES if Path(place).exists()), None)
    if found is None:
        raise NginxError(
            "nginx is not installed: `make bench-snapshot` installs it, or apt-get install nginx-light"
        )
    return found


def _free_ports() -> tuple[int, int]:
    with socket.create_server((_HOST, 0)) as one, socket.create_server((_HOST, 0)) as two:
        return int(one.getsockname()[1]), int(two.getsockname()[1])


def _wait(process: subprocess.Popen[bytes], log: Path, ports: tuple[int, ...]) -> None:
    """nginx does not say when it listens: connect until it does."""
    deadline = time.monotonic() + _START_S
    for port in ports:
        while True:
            try:
                socket.create_connection((_HOST, port), timeout=1).close()
                break
            except OSError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    text = log.read_text() if log.exists() else ""
                    raise NginxError(f"nginx does not listen: {text[-1000:]}") from error
                time.sleep(0.01)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def main() -> None:
    with start_nginx(Path(sys.argv[1])) as server:
        print(server.url, server.tls_url, server.authority, flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    main()
