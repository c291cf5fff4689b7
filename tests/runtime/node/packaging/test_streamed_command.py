"""Commands of other programs: their lines, their deadline, and the end of all their processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from pilotflame.runtime.node.packaging.streamed_command import run_streamed


def test_each_line_arrives_and_the_last_are_kept() -> None:
    lines: list[str] = []
    command = ["sh", "-c", "for n in $(seq 30); do echo line $n; done; echo bad >&2; exit 3"]
    ended = run_streamed(command, lines.append, deadline_s=30)
    assert (ended.status, ended.late, ended.failed) == (3, False, True)
    assert lines == [*(f"line {number}" for number in range(1, 31)), "bad"]
    assert ended.lines == tuple(lines[-20:])


def test_at_the_deadline_it_can_clean_up_and_has_failed(tmp_path: Path) -> None:
    script = f"trap 'touch {tmp_path}/cleaned; exit 0' TERM; echo begun; sleep 60 & wait"
    ended = run_streamed(["sh", "-c", script], lambda _line: None, deadline_s=0.5)
    assert (ended.status, ended.late, ended.failed) == (0, True, True)
    assert ended.lines == ("begun",)
    assert (tmp_path / "cleaned").exists()


def test_a_process_that_it_leaves_is_killed_at_the_deadline() -> None:
    # The first process ends at SIGTERM. The second process ignores SIGTERM, and keeps the output open.
    child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    script = f'{sys.executable} -c "{child}" & wait'
    started_s = time.monotonic()
    ended = run_streamed(["sh", "-c", script], lambda _line: None, deadline_s=2)
    assert ended.late
    assert ended.lines == ("deaf",)
    assert time.monotonic() - started_s < 30


def test_if_the_reader_fails_it_is_ended(tmp_path: Path) -> None:
    def progress(_line: str) -> None:
        raise KeyboardInterrupt

    script = f"trap 'touch {tmp_path}/cleaned; exit 0' TERM; echo begun; sleep 60 & wait"
    with pytest.raises(KeyboardInterrupt):
        run_streamed(["sh", "-c", script], progress, deadline_s=60)
    assert (tmp_path / "cleaned").exists()
