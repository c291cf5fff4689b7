"""infra/terminal_recording.py: the picture has the command's real output, each line at its own time."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.append(str(Path(__file__).parents[2] / "infra"))

import terminal_recording as recording

SCRIPT = "import sys; print('one & two'); print('\\x1b[1m█ three\\x1b[0m' if sys.stdout.isatty() else 'no terminal')"


def test_the_picture_has_the_output_of_the_command() -> None:
    command = [sys.executable, "-c", SCRIPT]
    lines = recording.record(command)
    assert [line.text for line in lines] == ["one & two", "\x1b[1m█ three\x1b[0m"]
    picture = recording.svg(["show"], lines)
    texts = [
        "".join(element.itertext()) for element in ElementTree.fromstring(picture).iter() if element.text
    ]
    shown = " ".join(texts).replace("\xa0", " ")
    assert "$ show" in shown
    assert "one & two" in shown
    assert "█ three" in shown
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_a_line_appears_when_it_was_printed() -> None:
    lines = [recording.Line(1.0, "early"), recording.Line(4.0, "late")]
    picture = recording.svg(["show"], lines)
    starts = [float(start) for start in re.findall(r"appear 1ms ([\d.]+)s", picture)]
    assert sorted(set(starts)) == [0.0, recording.PLAYED_S / 4, recording.PLAYED_S]


def test_a_command_that_fails_is_not_recorded() -> None:
    with pytest.raises(subprocess.CalledProcessError) as caught:
        recording.record([sys.executable, "-c", "raise SystemExit('why')"])
    assert "why" in caught.value.stderr
