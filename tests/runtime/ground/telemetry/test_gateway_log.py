"""What the gateway itself says: on standard error, as text or JSON, and in its log."""

import asyncio
import json
import logging
import os
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from pilotflame.runtime.ground.telemetry import gateway_log
from pilotflame.runtime.ground.telemetry.gateway_log import Format, Level, collected, gateway_logging
from pilotflame.runtime.ground.telemetry.log_files import LogFiles, LogQuery
from pilotflame.runtime.ground.telemetry.logs import Logs


async def said(tmp_path: Path, level: Level, form: Format) -> list[Any]:
    files = LogFiles(tmp_path, max_bytes=1 << 20, keep_s=1000.0)
    files.start()
    logs, log = Logs(files), logging.getLogger("pilotflame.runtime.tested")
    with gateway_logging(logs, level, form):
        channel = logs.channel("gateway")
        with channel.subscribe() as news:
            log.debug("of no use")
            log.info("to be %s", "known")
            try:
                json.loads("broken")
            except ValueError:
                log.exception("it failed")
            log.error("the end")
            while (await news.get()).text != "the end":
                pass
    log.info("after the gateway")
    lines = await logs.history("gateway", LogQuery())
    files.close()
    return [(line.level, line.text.splitlines()[0]) for line in lines]


async def test_messages_are_printed_and_stored(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = [("info", "to be known"), ("error", "it failed"), ("error", "the end")]
    assert await said(tmp_path, "info", "text") == expected
    printed = capfd.readouterr().err
    assert "Z INFO pilotflame: to be known\n" in printed
    assert "JSONDecodeError: Expecting value" in printed
    assert "of no use" not in printed
    assert "after the gateway" not in printed


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_message_about_a_request_has_its_id(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], form: Format
) -> None:
    files = LogFiles(tmp_path, max_bytes=1 << 20, keep_s=1000.0)
    files.start()
    logs = Logs(files)
    with gateway_logging(logs, "info", form), (channel := logs.channel("gateway")).subscribe() as news:
        logging.getLogger("pilotflame.runtime.tested").error("failed", extra={"request_id": "q1"})
        assert (await news.get()).request_id == "q1"
    assert channel.tail(1)[0].text == "failed"
    files.close()
    printed = capfd.readouterr().err
    if form == "json":
        assert json.loads(printed)["request_id"] == "q1"
    else:
        assert printed.endswith("ERROR pilotflame: [q1] failed\n")


@pytest.mark.parametrize("form", ["text", "json"])
async def test_a_terminal_gets_no_control_characters(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], form: Format
) -> None:
    files = LogFiles(tmp_path, max_bytes=1 << 20, keep_s=1000.0)
    files.start()
    logs, text = Logs(files), "a\x1b[2Jb\x9b2Jc\x7f"
    with gateway_logging(logs, "info", form), (channel := logs.channel("gateway")).subscribe() as news:
        logging.getLogger("pilotflame.runtime.tested").error("%s", text)
        await news.get()
    assert channel.tail(1)[0].text == text
    files.close()
    printed = capfd.readouterr().err
    assert printed.rstrip("\n").isprintable()
    assert form == "text" or json.loads(printed)["text"] == text


async def test_a_level_and_json(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert [level for level, _ in await said(tmp_path, "warning", "json")] == ["error", "error"]
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert [(line["level"], line["source"]) for line in lines] == [("error", "gateway")] * 2
    assert "JSONDecodeError: Expecting value" in lines[0]["text"]


async def test_libraries_print_no_lines_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    monkeypatch.setattr(sys, "unraisablehook", sys.__unraisablehook__)
    files = LogFiles(tmp_path, max_bytes=1 << 20, keep_s=1000.0)
    files.start()
    logs = Logs(files)

    class Broken:
        def __del__(self) -> None:
            raise ValueError("in a finaliser")

    def fails() -> None:
        raise ValueError("in a thread")

    with gateway_logging(logs, "info", "json"), (channel := logs.channel("gateway")).subscribe() as news:
        for name in ("botocore.credentials", "urllib3.connectionpool", "aiohttp.access"):
            logging.getLogger(name).warning("from %s", name)
        logging.getLogger("botocore.hooks").info("of no use")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("an old call", DeprecationWarning, stacklevel=1)
        Broken()
        thread = threading.Thread(target=fails)
        thread.start()
        thread.join()
        logging.getLogger("asyncio").error("the end")
        while "the end" not in (await news.get()).text:
            pass
    texts = [line.text for line in channel.tail(10)]
    files.close()
    printed = [json.loads(line)["text"] for line in capfd.readouterr().err.splitlines()]
    assert printed == texts
    assert texts[0] == "botocore.credentials: from botocore.credentials"
    for text, part in zip(
        texts[3:], ("an old call", "in a finaliser", "in a thread", "asyncio: the end"), strict=True
    ):
        assert part in text
    assert logging.getLogger().level == logging.WARNING


async def test_a_collector_reads_all_lines_on_standard_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = LogFiles(tmp_path, max_bytes=1 << 20, keep_s=1000.0)
    files.start()
    logs = Logs(files)
    with collected(logs):
        function = logs.of_function("f")
        function.write("w1", "printed\x1b", request_id="q1", revision="r1")
        audit = logs.channel("audit")
        facts = {"by": "key a", "from": "192.0.2.1", "function": "f", "outcome": "201"}
        audit.write("audit", "all", facts=facts)
        gateway = logs.channel("gateway")
        gateway.write("gateway", "on standard error")
    function.write("w1", "later")
    stored = (await logs.history("audit", LogQuery()))[0]
    files.close()
    assert dict(stored.facts) == {}
    first, second = (json.loads(line) for line in capfd.readouterr().out.splitlines())
    assert {key: first[key] for key in ("log", "text", "function", "revision", "request_id")} == {
        "log": "function", "text": "printed\x1b", "function": "f", "revision": "r1", "request_id": "q1",
    }  # fmt: skip
    assert second == {"at": second["at"], "source": "audit", "text": "all", "level": "info", "revision": "",
                      "request_id": "", "log": "audit", **facts}  # fmt: skip


async def test_a_message_that_a_finaliser_logs_inside_a_message_does_not_wait(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    files = LogFiles(tmp_path, max_bytes=1 << 20, keep_s=1000.0)
    files.start()
    log = logging.getLogger("pilotflame.runtime.tested")

    def collects(frame: Any, event: str, called: Any) -> None:
        """Log inside the first call of the queue's put, where the garbage collector may run finalisers."""
        if (event, getattr(called, "__name__", frame.f_code.co_name)) in (
            ("call", "_put"),
            ("c_call", "put"),
        ):
            sys.setprofile(None)
            log.error("inside")

    def logs_twice() -> None:
        sys.setprofile(collects)
        log.error("outside")

    with gateway_logging(Logs(files), "info", "text"):
        thread = threading.Thread(target=logs_twice, daemon=True)
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()
    files.close()
    printed = capfd.readouterr().err
    assert "inside" in printed
    assert "outside" in printed


@pytest.mark.parametrize("gone", [True, False])
async def test_lines_without_a_reader_are_dropped_and_counted_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    files = LogFiles(tmp_path, max_bytes=1 << 20, keep_s=1000.0)
    files.start()
    logs = Logs(files)
    with (
        os.fdopen(os.dup(writer) if gone else os.open(os.devnull, os.O_WRONLY), "w") as output,
        gateway_logging(logs, "info", "text"),
        (channel := logs.channel("gateway")).subscribe() as news,
    ):
        with monkeypatch.context() as patched:
            patched.setattr(sys, "stdout", output)
            if not gone:
                patched.setattr(gateway_log, "MAX_WAITING", 0)
            with collected(logs):
                for _ in range(12):
                    logs.of_function("f").write("w1", "printed")
                async with asyncio.timeout(10.0):
                    for _ in range(2):
                        await news.get()
        if gone:
            # Replace the pipe, which has no reader, by /dev/null. Otherwise the close of `output` would fail.
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    os.close(writer)
    files.close()
    said = [line.text for line in channel.tail(10) if line.text.startswith("standard output: ")]
    assert said == [
        f"standard output: lines were dropped ({count}): its reader is too slow or gone" for count in (1, 10)
    ]
    assert "Traceback" not in capfd.readouterr().err
