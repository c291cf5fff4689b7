"""The gateway's own TLS: all paths over HTTPS, a certificate that is renewed, files that are wrong, and the commands."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import socket
import ssl
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
from live import events, gateway_here, until
from pilotflame.errors import GatewayError, SettingsError
from pilotflame.runtime.front.http.transport import PlainConnection
from pilotflame.runtime.front.listening import tls
from pilotflame.runtime.front.listening.tls import Certificate
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings, read_gateway_settings

ECHO = "def handler(event):\n    return event"
STREAM = "def handler(event):\n    yield from range(event)"
ENCRYPTED = """-----BEGIN ENCRYPTED PRIVATE KEY-----
MIGjMF8GCSqGSIb3DQEFDTBSMDEGCSqGSIb3DQEFDDAkBBBPVJbk0L1oYyXKQxk3dGyaAgIIADAMBggqhkiG9w0CCQUAMB0GCWCGSAFlAwQBKgQQ
-----END ENCRYPTED PRIVATE KEY-----
"""


class Files:
    """An authority, and the files of a certificate that it has signed."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self.chain, self.key, self.authority = folder / "chain.pem", folder / "key.pem", folder / "ca.pem"
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(self.authority)
        self.trust = ssl.create_default_context(cafile=self.authority)
        self.renew()

    def renew(self, *names: str) -> None:
        """Replace the files, each by a rename, as tools for renewing certificates do."""
        issued = self._ca.issue_cert("localhost", "127.0.0.1", *names)
        for path, pem in (
            (self.chain, b"".join(blob.bytes() for blob in issued.cert_chain_pems)),
            (self.key, issued.private_key_pem.bytes()),
        ):
            fresh = path.with_suffix(".new")
            fresh.write_bytes(pem)
            fresh.chmod(0o600)
            fresh.replace(path)

    @property
    def settings(self) -> dict[str, Path]:
        return {"tls_cert": self.chain, "tls_key": self.key}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path / "tls")


async def served(url: str, trust: ssl.SSLContext) -> bytes:
    """Return the certificate that the gateway shows to a new connection."""
    parts = httpx.URL(url)
    _, writer = await asyncio.open_connection(parts.host, parts.port, ssl=trust)
    shown = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return bytes(shown)


@pytest.mark.parametrize(
    ("pattern", "fault"), [("localhost.localdomain", "Add a DNS record"), ("*.apps.test", "Get a certificate that has *.apps.test")]
)  # fmt: skip
def test_doctor_examines_the_host_names_of_functions(
    tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch, pattern: str, fault: str
) -> None:
    def resolve(host: str, _port: None) -> list[Any]:
        if host != pattern.replace("*", "pilotflame-doctor") or fault.startswith("Add"):
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, 0, 0, "", ("192.0.2.1", 0))]

    monkeypatch.setattr(tls.socket, "getaddrinfo", resolve)
    settings = GatewaySettings(state_dir=tmp_path, app_hosts=pattern, **files.settings)
    [(name, found, remedy)] = tls.examine_hosts(settings)
    assert (name, remedy.startswith(fault)) == (f"host {pattern}", True), found
    if "*" in pattern:
        files.renew("*.apps.test")
        assert list(tls.examine_hosts(settings)) == [(name, "192.0.2.1", "")]
        files.key.unlink()
        [(_, found, remedy)] = tls.examine_hosts(settings)
        assert "tls_key" in found


def first_in(chain: Path) -> bytes:
    text = chain.read_text()
    end = "-----END CERTIFICATE-----"
    return ssl.PEM_cert_to_DER_cert(text[: text.index(end) + len(end)])


async def test_all_paths_over_https(state: Path, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[bool] = []
    read = PlainConnection._read

    def watched(*given: Any) -> bool:
        taken.append(read(*given))
        return taken[-1]

    monkeypatch.setattr(PlainConnection, "_read", watched)
    async with gateway_here(state, **files.settings) as gateway:
        assert gateway.url.startswith("https://")
        async with httpx.AsyncClient(base_url=gateway.url, verify=files.trust) as client:
            gateway.client = client
            echo, stream = await gateway.deploy(ECHO), await gateway.deploy(STREAM)
            taken.clear()
            reader, writer = await asyncio.open_connection(*gateway.address, ssl=files.trust)
            for _ in range(3):
                writer.write(
                    f"POST {echo.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n7".encode()
                )
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 OK\r\n")
                assert await reader.readexactly(1) == b"7"
            writer.close()
            assert taken == [True] * 3
            assert await echo.answer("x" * 3_000_000) == "x" * 3_000_000
            assert await echo.answer(4, Prefer="nothing") == 4
            assert len(events((await stream.call(50)).text)) == 51
            prediction = await client.post(
                "/cog/predictions", params={"function": echo.name}, json={"input": 5}
            )
            assert prediction.json()["output"] == 5
        plain = gateway.url.replace("https", "http")
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.TransportError):
                await client.get(f"{plain}/healthz")
        old = ssl.create_default_context(cafile=files.authority)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.raises(ssl.SSLError):
            await served(gateway.url, old)


async def test_a_renewed_certificate_is_served_and_a_broken_one_is_not(
    state: Path, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        gateway_here(state, **files.settings) as gateway,
        httpx.AsyncClient(base_url=gateway.url, verify=files.trust) as client,
    ):
        assert (await client.get("/healthz")).status_code == 200
        old = first_in(files.chain)
        assert await served(gateway.url, files.trust) == old
        files.renew()
        new = first_in(files.chain)

        async def shows_new() -> bool:
            return await served(gateway.url, files.trust) == new

        await until(shows_new, "the new certificate")
        files.chain.write_text("-----BEGIN CERTIFICATE-----\nbroken\n-----END CERTIFICATE-----\n")

        async def refused() -> bool:
            assert await served(gateway.url, files.trust) == new
            return "stays in use" in caplog.text

        await until(refused, "a message about the broken certificate")
        files.chain.unlink()
        assert await served(gateway.url, files.trust) == new
        # The connection from before the renewal still works.
        assert (await client.get("/healthz")).status_code == 200


async def test_a_reload_reads_the_files_again(
    state: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "CHECK_S", 3600.0)
    async with gateway_here(state, **files.settings) as gateway:
        old = await served(gateway.url, files.trust)
        files.renew()
        assert await served(gateway.url, files.trust) == old
        assert gateway.server is not None
        gateway.server.reload()
        assert await served(gateway.url, files.trust) == first_in(files.chain)


Spoil = Callable[[Files], object]


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (lambda files: files.chain.unlink(), "tls_cert is .*chain.pem, which cannot be read: No such file"),
        (lambda files: files.key.unlink(), "tls_key is .*key.pem, which cannot be read: No such file"),
        (lambda files: files.chain.write_text("x"), "tls_cert is .*chain.pem, which holds no certificate"),
        (lambda files: files.key.write_text("x"), "tls_key is .*key.pem, which holds no key"),
        (lambda files: files.key.write_text(ENCRYPTED), "tls_key is .*key.pem, which holds no key"),
        (lambda files: shutil.copy(files.key, files.chain), "tls_cert is .*chain.pem, which holds no certif"),
        (
            lambda files: Files(files.chain.parent / "other").key.replace(files.key),
            "tls_key is .*key.pem, which is not the key of the certificate in .*chain.pem",
        ),
    ],
)
async def test_files_that_cannot_be_used_are_named(
    state: Path, files: Files, spoil: Spoil, named: str
) -> None:
    spoil(files)
    with pytest.raises(GatewayError, match=named):
        async with gateway_here(state, **files.settings):
            pass


@pytest.mark.parametrize(("given", "missing"), [("tls_cert", "tls_key"), ("tls_key", "tls_cert")])
def test_both_files_or_none(given: str, missing: str) -> None:
    with pytest.raises(SettingsError, match=f"{given} is set, but {missing} is not"):
        read_gateway_settings({"HOME": "/", f"PILOTFLAME_{given.upper()}": "/x.pem"})


def test_files_in_a_config_are_relative_to_it(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text('tls_cert = "chain.pem"\ntls_key = "~/key.pem"\n')
    settings = read_gateway_settings({"HOME": "/"}, config=config)
    assert (settings.tls_cert, settings.tls_key) == (tmp_path / "chain.pem", Path("~/key.pem").expanduser())


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_can_read_is_a_warning(
    files: Files, caplog: pytest.LogCaptureFixture, mode: int, warned: bool
) -> None:
    files.key.chmod(mode)
    with caplog.at_level(logging.WARNING):
        Certificate(files.chain, files.key)
    assert (f"chmod o-r {files.key}" in caplog.text) is warned


def test_commands_accept_https_with_the_authority(
    state: Path, tmp_path: Path, files: Files, run: Callable[..., object], start: Callable[..., object]
) -> None:
    (folder := tmp_path / "echo").mkdir()
    (folder / "handler.py").write_text(ECHO)
    (lines := tmp_path / "in.jsonl").write_text("1\n2\n")
    arguments = ("--port", 0, "--state-dir", state, "--tls-cert", files.chain, "--tls-key", files.key)
    process = start("serve", "--json", *arguments)
    url = json.loads(process.stdout.readline())["url"]  # type: ignore[attr-defined]
    assert url.startswith("https://127.0.0.1:")
    refused = run("list", PILOTFLAME_URL=url)
    assert refused.returncode == 3  # type: ignore[attr-defined]
    assert "PILOTFLAME_CA" in refused.stderr  # type: ignore[attr-defined]
    wrong = run("list", PILOTFLAME_URL=url, PILOTFLAME_CA=str(files.key))
    assert f"PILOTFLAME_CA is {files.key}" in wrong.stderr  # type: ignore[attr-defined]
    trusting = {"PILOTFLAME_URL": url, "PILOTFLAME_CA": str(files.authority)}
    for words in (("deploy", folder), ("invoke", "echo", "1"), ("batch", "echo", lines, tmp_path / "out")):
        done = run(*words, **trusting)
        assert done.returncode == 0, done.stderr  # type: ignore[attr-defined]
    assert (tmp_path / "out").read_text() == "1\n2\n"
    listed = run("list", "--json", PILOTFLAME_URL=url, SSL_CERT_FILE=str(files.authority))
    assert listed.returncode == 0, listed.stderr  # type: ignore[attr-defined]
