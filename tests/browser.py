"""A real browser for tests: Chromium without a window, driven by Playwright."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest

# Take the variable out of the environment, because the commands refuse variables PILOTFLAME_* that they do not know.
REQUIRED = os.environ.pop("PILOTFLAME_REQUIRE_BROWSER", "") == "1"
PROGRAMS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
# Chromium's sandbox does not work as root, so switch it off. The browser loads only pages of the test's own
# gateways.
ARGUMENTS = ("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-proxy-server")


def find_browser() -> str:
    """Return the path of a browser. Skip the test without one; fail it if PILOTFLAME_REQUIRE_BROWSER is set."""
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None and REQUIRED:
        pytest.fail("PILOTFLAME_REQUIRE_BROWSER is set, but no Chromium is installed")
    if found is None:
        pytest.skip("no Chromium is installed")
    return found


@contextlib.asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Run a browser, and yield it as Playwright's `Browser`."""
    path = find_browser()
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            await browser.close()
