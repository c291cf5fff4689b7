"""nginx on loopback: the range server of the snapshot benchmark, in plain and in TLS."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
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

# No log, bodies by sendfile, and kept connections, so that the server uses little CPU time.
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


@dataclass(frozen=True)
class Nginx:
    """A running nginx. It ignores signatures, so S3 clients can use it as a path-style endpoint."""

    port: int
    tls_port: int
    authority: Path
    """The certificate that clients must trust."""

    @property
    def url(self) -> str:
        return f"http://{_HOST}:{self.port}"

    @property
    def tls_url(self) -> str:
        return f"https://{_HOST}:{self.tls_port}"


@contextmanager
def start_nginx(root: Path) -> Iterator[Nginx]:
    """Serve folder `root` on two free ports, in plain and in TLS, during the block."""
    with tempfile.TemporaryDirectory(prefix="nginx-bench-") as name:
        folder = Path(name)
        with socket.create_server((_HOST, 0)) as one, socket.create_server((_HOST, 0)) as two:
            port, tls_port = (int(each.getsockname()[1]) for each in (one, two))
        authority = trustme.CA()
        authority.issue_cert(_HOST).private_key_and_cert_chain_pem.write_to_path(str(folder / "server.pem"))
        authority.cert_pem.write_to_path(str(folder / "authority.pem"))
        # The workers of nginx must also run as root. As another user, they could not read files that root has
        # made.
        user = "user root;" if os.geteuid() == 0 else ""
        config = _CONFIG.format(
            folder=folder, host=_HOST, port=port, tls_port=tls_port, root=root.resolve(), user=user
        )
        (folder / "nginx.conf").write_text(config)
        binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
        if binary is None:
            raise RuntimeError(
                "nginx is missing: `make bench-snapshot` installs it, or apt-get install nginx-light"
            )
        command = [binary, "-p", name, "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            _wait(process, folder / "error.log", port)
            yield Nginx(port, tls_port, folder / "authority.pem")
        finally:
            process.terminate()
            process.wait(_STOP_S)


def _wait(process: subprocess.Popen[bytes], log: Path, port: int) -> None:
    """Connect until nginx listens, because it does not report that."""
    deadline = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((_HOST, port), timeout=1).close()
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                text = log.read_text() if log.exists() else ""
                raise RuntimeError(f"nginx does not listen: {text[-1000:]}") from error
            time.sleep(0.01)
        else:
            return
