"""What `pilotflame build` prints after a build. tests/runtime/images builds images."""

from __future__ import annotations

from pathlib import Path

from pilotflame.runtime.plugins.images.command import deploy_hint


def test_the_printed_deploy_command_names_the_folder() -> None:
    hint = deploy_hint(Path("my functions/hello"), "localhost/pilotflame/hello@sha256:ab")
    assert (
        "pilotflame deploy 'my functions/hello' --set image.name=localhost/pilotflame/hello@sha256:ab" in hint
    )
