"""The dialects of web apps keep the contract of dialects."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from pilotflame.errors import SettingsError
from pilotflame.handlers.recognise import installed_dialects
from pilotflame.runtime.ground.settings.function_settings import read_settings, setting_origins
from pilotflame.runtime.plugins.asgi.dialect import ASGI, WSGI
from pilotflame.runtime.testing.dialect import DialectTests


class TestAsgiDialect(DialectTests):
    dialect = ASGI
    file = "app.py"
    source = "from fastapi import FastAPI\napp = FastAPI()\n\n@app.post('/n')\ndef n(n: int):\n    return [n, 'x']\n"
    handler = "app"
    event: ClassVar = {"path": "/n?n=3", "method": "POST"}
    output: ClassVar = [3, "x"]


class TestWsgiDialect(DialectTests):
    dialect = WSGI
    file = "app.py"
    source = "from flask import Flask, request\napp = Flask('x')\n\n@app.post('/n')\ndef n():\n    return [request.json, 'x']\n"
    handler = "app"
    event: ClassVar = {"path": "/n", "body": 3}
    output: ClassVar = [3, "x"]


def settings(folder: Path, text: str, **overrides: object) -> object:
    (folder / "pilotflame.toml").write_text(text)
    return read_settings(folder, overrides=overrides).handler


def test_a_short_key_is_the_handler(tmp_path: Path) -> None:
    assert settings(tmp_path, 'asgi = "shop.main:api"') == "asgi:shop/main.py:api"
    assert setting_origins(tmp_path)["handler"] == "pilotflame.toml"
    assert settings(tmp_path, 'wsgi = "app:app"') == "wsgi:app.py:app"
    assert settings(tmp_path, 'handler = "x.py"', asgi="app:app") == "asgi:app.py:app"
    assert setting_origins(tmp_path, overrides={"asgi": "app:app"})["handler"] == "--set"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('asgi = "app"', "asgi is 'app'; it should be a module and a name in it"),
        ('asgi = "../x:app"', "asgi is '../x:app'"),
        ("asgi = 3", "asgi is 3"),
        ('asgi = "app:app"\nhandler = "x.py"', "handler and asgi exclude each other"),
        ('agsi = "app:app"', "agsi is not a setting"),
    ],
)
def test_a_wrong_short_key_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match="invalid") as caught:
        settings(tmp_path, text)
    assert message in str(caught.value)


def test_an_app_is_called_by_many_callers_at_once(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(TestAsgiDialect.source)
    assert installed_dialects().concurrency(tmp_path, "handler.py") == 100
    (tmp_path / "handler.py").write_text("def handler(event):\n    return event\n")
    assert installed_dialects().concurrency(tmp_path, "handler.py") == 1


def test_only_an_app_wants_a_form_of_messages(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(TestAsgiDialect.source)
    assert '{"path": "/items"}' in installed_dialects().message(tmp_path, "handler.py")
    (tmp_path / "handler.py").write_text("def handler(event):\n    return event\n")
    assert installed_dialects().message(tmp_path, "handler.py") == ""
