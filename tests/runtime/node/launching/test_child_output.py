"""The last line that a base or fetcher printed:
only the function's owner sees it in an error, and only if it is recent enough to explain the end of the process.
"""

import json
import os

import pytest
from pilotflame.errors import PilotflameError, for_callers, not_whole
from pilotflame.runtime.node.launching import child_output
from pilotflame.runtime.node.launching.child_output import ChildOutput


async def ended(printed: bytes) -> PilotflameError:
    output = ChildOutput("fetcher")
    os.write(output.fileno(), printed)
    output.started()
    return output.end("The fetcher ended", remedy="See its output.")


async def test_only_the_owner_reads_the_last_line() -> None:
    error = await ended(b"begins\ncannot read s3://hidden/model")
    for one in (error, for_callers(error), not_whole(error)):
        assert "hidden" not in json.dumps(one.to_wire()) + str(one)
        assert "The fetcher ended. See its output." in str(one)
        assert "The fetcher ended: cannot read s3://hidden/model. See its output." in str(one.whole)
    assert str((await ended(b"")).whole) == "The fetcher ended. See its output."


async def test_a_line_from_long_before_the_end_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_output, "RECENT_S", -1.0)
    assert str((await ended(b"a warning")).whole) == "The fetcher ended. See its output."
