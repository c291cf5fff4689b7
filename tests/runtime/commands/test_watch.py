"""The watch deploys a folder at the start and after each change; a change that fails is reported and not deployed."""

from __future__ import annotations

import pytest
from live import gateway_process, until
from pilotflame.errors import GatewayError
from pilotflame.runtime.main import run
from pilotflame.runtime.settings.gateway_settings import GatewaySettings

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_a_change_is_a_deploy(state):
    folder = state.parent / "watched"
    folder.mkdir()
    handler, log = folder / "handler.py", state.parent / "gateway.log"
    handler.write_text("print('loaded')\ndef handler(event):\n    print('said', event)\n    return 1\n")
    async with gateway_process(state, watch=str(folder)) as gateway:
        function = gateway.function("watched")

        async def answers() -> int | None:
            response = await function.call("x")
            return response.json() if response.status_code == 200 else None

        async def told(text: str) -> bool:
            return text in log.read_text()

        await until(answers, "the first revision")
        await until(lambda: told("said x"), "the function's log")

        handler.write_text("def handler(event):\n    return (\n")
        await until(
            lambda: told("not deployed: Importing handler.py failed at handler.py, line 2"), "the mistake"
        )
        assert await answers() == 1

        handler.write_text("def handler(event):\n    return 2\n")

        async def second() -> bool:
            return await answers() == 2

        await until(second, "the second revision")
        assert gateway.process is not None
        gateway.process.terminate()
        assert await gateway.process.wait() == 0


async def test_a_folder_that_does_not_exist_is_an_error(state):
    settings = GatewaySettings(port=0, state_dir=state)
    with pytest.raises(GatewayError, match="nowhere is not a folder"):
        run(settings, on_listening=lambda _url: None, folder=state.parent / "nowhere")
    assert not state.exists()
