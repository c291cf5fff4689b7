"""The gateway's settings from options, the environment and a file, and the messages for mistakes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pilotflame.errors import SettingsError
from pilotflame.runtime.ground.settings.gateway_settings import GatewaySettings, read_gateway_settings


@pytest.mark.parametrize("price", ["inf", "nan", "-1"])
def test_a_price_is_an_amount(price: str) -> None:
    with pytest.raises(SettingsError, match="price_waiting_s"):
        read_gateway_settings({"HOME": "/", "PILOTFLAME_PRICE_WAITING_S": price})


def test_the_gateway_reads_its_environment(tmp_path: Path) -> None:
    environ = {"PILOTFLAME_PORT": "9000", "PILOTFLAME_STATE_DIR": str(tmp_path), "HOME": "/h", "OTHER": "x"}
    settings = read_gateway_settings(environ, drain_s=5, host=None)
    assert (settings.port, settings.state_dir, settings.drain_s) == (9000, tmp_path, 5.0)
    assert settings.host == "127.0.0.1"
    assert read_gateway_settings(environ, port=1).port == 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HOME": "/home/a"}, "/home/a/.local/state/pilotflame"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "/state"}, "/state/pilotflame"),
        ({"HOME": "/home/a", "XDG_STATE_HOME": "relative"}, "/home/a/.local/state/pilotflame"),
        ({}, str(Path.home() / ".local/state/pilotflame")),
    ],
)
def test_the_default_state_folder_follows_xdg(environ: dict[str, str], expected: str) -> None:
    assert str(read_gateway_settings(environ).state_dir) == expected


def test_a_typo_in_the_environment_is_reported() -> None:
    with pytest.raises(
        SettingsError, match=r"PILOTFLAME_PROT is not a setting; did you mean PILOTFLAME_PORT\?"
    ):
        read_gateway_settings({"PILOTFLAME_PROT": "1"})
    with pytest.raises(SettingsError, match=r"PILOTFLAME_TYPO is not a setting; "):
        read_gateway_settings({"PILOTFLAME_TYPO": "1"})
    assert read_gateway_settings({"PILOTFLAME_URL": "x"}, other_variables=("PILOTFLAME_URL",)).port == 8600


def test_a_setting_that_no_longer_exists_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="PILOTFLAME_LOG_MAX_BYTES no longer exists; remove it"):
        read_gateway_settings({"PILOTFLAME_LOG_MAX_BYTES": "100000"})
    (tmp_path / "gateway.toml").write_text("log_max_bytes = 100000")
    with pytest.raises(SettingsError, match="log_max_bytes no longer exists; remove it"):
        read_gateway_settings({}, config=tmp_path / "gateway.toml")


def test_a_bad_value_in_the_environment_is_reported() -> None:
    with pytest.raises(SettingsError, match="port is '99999'; it should be less than or equal to 65535"):
        read_gateway_settings({"PILOTFLAME_PORT": "99999"})


def test_networks_in_the_environment_have_commas_between_them() -> None:
    found = read_gateway_settings({"PILOTFLAME_WEBHOOK_NETWORKS": "10.0.0.0/8, fd00::/8"})
    assert found.webhook_networks == ("10.0.0.0/8", "fd00::/8")
    assert read_gateway_settings({"PILOTFLAME_WEBHOOK_NETWORKS": ""}).webhook_networks == ()


def test_the_gateways_defaults_need_no_environment() -> None:
    assert (
        GatewaySettings().state_dir
        == read_gateway_settings(os.environ, other_variables=("PILOTFLAME_TEST_LIMIT_S",)).state_dir
    )


@pytest.mark.parametrize("wrong", ["shop.example", "https://shop.example/", "ftp://x", "*.example"])
def test_what_is_no_origin_is_refused(wrong: str) -> None:
    with pytest.raises(SettingsError, match="no origin"):
        read_gateway_settings({"PILOTFLAME_CORS_ORIGINS": f"https://fine.example, {wrong}"})


def test_origins_come_from_the_environment() -> None:
    found = read_gateway_settings({"PILOTFLAME_CORS_ORIGINS": "https://shop.example, http://[::1]:3000"})
    assert found.cors_origins == ("https://shop.example", "http://[::1]:3000")


def test_gpus_come_from_the_environment() -> None:
    found = read_gateway_settings({"PILOTFLAME_GPUS": "0:81920, MIG-4f1c-a:20096"})
    assert found.gpus == ("0:81920", "MIG-4f1c-a:20096")
    assert read_gateway_settings({}).gpus is None


@pytest.mark.parametrize(
    ("gpus", "said"),
    [
        ("0", "is no GPU"),
        ("0:", "is no GPU"),
        ("0:80GiB", "is no GPU"),
        (":1", "is no GPU"),
        ("0:1,0:2", "'0' twice"),
    ],
)
def test_gpus_that_cannot_be_are_refused(gpus: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_gateway_settings({"PILOTFLAME_GPUS": gpus})


TOKEN = "a token of the cluster"


def test_peers_come_from_the_environment() -> None:
    variables = {"PILOTFLAME_PEERS": "http://one:8601, http://[::1]:3", "PILOTFLAME_PEERS_TOKEN": TOKEN}
    found = read_gateway_settings(variables)
    assert found.peers == ("http://one:8601", "http://[::1]:3")
    assert found.peers_token is not None
    assert found.peers_token.get_secret_value() == TOKEN
    assert TOKEN not in repr(found)
    # Files of secrets often end with a line end, which is no part of the token.
    found = read_gateway_settings({**variables, "PILOTFLAME_PEERS_TOKEN": f"{TOKEN}\n"})
    assert found.peers_token is not None
    assert found.peers_token.get_secret_value() == TOKEN


@pytest.mark.parametrize(
    ("peers", "said"),
    [
        ("one:8601", "not the address"),
        ("http://one", "not the address"),
        ("http://one:8601/path", "not the address"),
        ("http://user:password@one:8601", "not the address"),
        ("http://one:1 https://two:2", "one of them"),
        ("https://one:1", "tls_cert is not set"),
    ],
)
def test_peers_that_cannot_be_are_refused(peers: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        read_gateway_settings({"PILOTFLAME_PEERS": peers, "PILOTFLAME_PEERS_TOKEN": TOKEN})


def test_peers_need_a_token_that_is_long_and_not_shown(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="peers_token is not"):
        read_gateway_settings({"PILOTFLAME_PEERS": "http://one:1"})
    for token in ("geheimes", "geheimes Wort für alle", "geheimes Wort\nfuer alle"):
        with pytest.raises(SettingsError, match="16 printable ASCII") as caught:
            read_gateway_settings({"PILOTFLAME_PEERS_TOKEN": token})
        assert "geheim" not in str(caught.value)
    with pytest.raises(SettingsError, match="16 printable ASCII") as caught:
        read_gateway_settings({}, config=config(tmp_path, "peers_token = 4711471147114711"))
    assert "4711" not in str(caught.value)


# -- the gateway's file


def config(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "gateway.toml"
    file.write_text(text)
    return file


def test_options_win_over_variables_and_variables_over_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, "port = 1\ndrain_s = 2\nhost = '::1'\nwebhook_networks = ['10.0.0.0/8']\n")
    found = read_gateway_settings({"PILOTFLAME_DRAIN_S": "3", "PILOTFLAME_PORT": "4"}, config=file, port=5)
    assert (found.port, found.drain_s, found.host, found.webhook_networks) == (5, 3.0, "::1", ("10.0.0.0/8",))


def test_a_relative_folder_is_relative_to_the_file(tmp_path: Path) -> None:
    file = config(tmp_path, 'state_dir = "state"\ncache_dir = "/cache"\n')
    found = read_gateway_settings({}, config=file)
    assert (found.state_dir, found.cache_dir) == (tmp_path / "state", Path("/cache"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "did you mean port"),
        ("port = 'x'", "port is 'x'"),
        ("port", "is not TOML"),
        ("[scale]\nmax = 1", "scale is not"),
    ],
)
def test_a_mistake_in_the_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        read_gateway_settings({}, config=config(tmp_path, text))
    assert "gateway.toml" in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read"):
        read_gateway_settings({}, config=tmp_path / "none.toml")


def test_a_user_without_a_home_uses_the_folders_that_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform gave the container a user id that has no entry in /etc/passwd, and no HOME."""

    def no_entry(_uid: int) -> None:
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr("pwd.getpwuid", no_entry)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    given = read_gateway_settings({"PILOTFLAME_STATE_DIR": "/s", "PILOTFLAME_CACHE_DIR": "/c"})
    assert (given.state_dir, given.cache_dir) == (Path("/s"), Path("/c"))
    assert read_gateway_settings({}, state_dir=Path("/s")).cache_dir == Path("/s/snapshots")
    with pytest.raises(SettingsError, match="Set HOME or PILOTFLAME_STATE_DIR"):
        read_gateway_settings({})
