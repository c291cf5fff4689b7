"""The folder watch of `pilotflame dev`: a change is deployed, a mistake leaves the previous revision live."""

from __future__ import annotations

import signal

from live import gateway_process, until


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
        # The message names the edited file, not the gateway's copy of it.
        assert f"changed: {handler}" in log.read_text()
        handler.write_text("def fails():\n    1 / 0\nfails()\n")
        await until(lambda: told(f'File "{handler}", line 2, in fails'), "the traceback")
        assert str(state) not in log.read_text()

        handler.write_text("def handler(event):\n    return 2\n")

        async def second() -> bool:
            return await answers() == 2

        await until(second, "the second revision")
        assert gateway.process is not None
        gateway.process.terminate()
        assert await gateway.process.wait() == 0


async def test_an_end_during_the_first_deploy_is_no_error(state):
    folder, begun = state.parent / "slow", state.parent / "begun"
    folder.mkdir()
    (folder / "handler.py").write_text(f"import time\nopen({str(begun)!r}, 'w').close()\ntime.sleep(60)\n")

    async def importing() -> bool:
        return begun.exists()

    async with gateway_process(state, watch=str(folder)) as gateway:
        await until(importing, "the import of the handler")
        assert gateway.process is not None
        gateway.process.send_signal(signal.SIGINT)
        assert await gateway.process.wait() == 0
    told = (state.parent / "gateway.log").read_text()
    assert "Traceback" not in told
    assert "not deployed" not in told
