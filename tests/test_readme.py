"""The README's blocks run, in order, in one empty folder, with a gateway of their own (tests/doc_blocks.py).

Install and Quick start also run as a reader pastes them: both sections as the input of one bash.
"""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from doc_blocks import README, ROOT, Block, Terminal, blocks, commands


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    folder = Path(tempfile.mkdtemp(prefix="plr-"))  # short: a unix socket lies in it
    with ExitStack() as folders, ExitStack() as stack:
        folders.callback(shutil.rmtree, folder)
        yield Terminal(folder, stack)


@pytest.mark.skipif(not README.is_file(), reason="there is no README yet")
@pytest.mark.timeout(300)
def test_the_readmes_blocks_run(terminal: Terminal) -> None:
    found = list(blocks(README.read_text()))
    assert any(block.language == "sh" and block.skipped is None for block in found)
    for block in found:
        terminal.block(block)


# INSTALLERS: these commands are replaced by `true`, since the test's own environment has pilotflame.
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "templates").rglob("*.md"))]
INSTALLERS = ("git", "pip", "pip3", "pipx", "python3", "uv", "virtualenv")
PASTED = ("Install", "Quick start")
# Appended to the pasted text. `$!` is the process of `serve &`, the only job of this bash.
ENDING = "\nkill $! && wait $!; echo gateway ended with $?\n"


def section(text: str, heading: str) -> str:
    """Return the commands of a section, as a reader copies them."""
    part = re.split(r"^#+ ", text.split(f"\n## {heading}\n", 1)[1], maxsplit=1, flags=re.MULTILINE)[0]
    return "".join(f"{block.text}\n" for block in blocks(part) if block.language == "sh")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_block_that_is_pasted_has_prompts(page: Path) -> None:
    # A block without a language can be a recording, with output.
    pasted = [block for block in blocks(page.read_text()) if block.language]
    prompts = [line for block in pasted for line in block.text.splitlines() if line.startswith("$ ")]
    assert not prompts


@pytest.mark.timeout(120)
def test_install_and_quick_start_run_as_pasted(terminal: Terminal) -> None:
    for name in INSTALLERS:
        (terminal.folder.parent / "bin" / name).symlink_to(shutil.which("true") or "/bin/true")
    (terminal.folder / ".venv" / "bin").mkdir(parents=True)
    (terminal.folder / ".venv" / "bin" / "activate").touch()
    pasted = terminal.addressed("".join(section(README.read_text(), heading) for heading in PASTED))
    assert "pilotflame serve &\n" in pasted
    told = "trap 'echo FAILED: $BASH_COMMAND' ERR\n" + pasted + ENDING
    done = terminal.run(["bash"], given=told)
    assert "FAILED" not in done.stdout, done.stdout
    assert "gateway ended with 0" in done.stdout, done.stdout


# -- the convention itself

SAMPLE = """
Words.

```python
x = 1
```

<!-- not run: it takes a minute,
     on a good day -->

```sh
make demo
```
<!-- not run: this one is not about the next block -->
Words between.
```sh
pilotflame init hello \\
    --template hello
pilotflame serve &
export KEY=x
echo $KEY | pilotflame invoke hello -
```

```
no language
```
"""


def test_blocks_are_found_with_their_reasons() -> None:
    python, demo, shell, plain = blocks(SAMPLE)
    assert (python.language, python.text, python.skipped, python.line) == ("python", "x = 1", None, 4)
    assert demo.skipped is not None
    assert demo.skipped.startswith("it takes a minute")
    assert shell.skipped is None
    assert plain.language == ""
    assert commands(shell) == [
        "pilotflame init hello \\\n    --template hello",
        "pilotflame serve &",
        "export KEY=x\necho $KEY | pilotflame invoke hello -",
    ]


def test_a_block_without_an_end_is_an_error() -> None:
    with pytest.raises(AssertionError, match="does not end"):
        list(blocks("```python\nx = 1\n"))


@pytest.mark.parametrize(
    "block",
    [
        Block(1, "python", "1 / 0"),
        Block(1, "python", "import warnings; warnings.warn('x')"),
        Block(1, "sh", "make no-such-target"),
        Block(1, "sh", "rm -rf something"),
        Block(1, "sh", "pilotflame no-such-command"),
        Block(1, "sh", "pilotflame status nothing"),
        Block(1, "sh", "pilotflame deploy missing &"),
        Block(1, "sh", "make test", skipped=""),
        Block(1, "json", "{"),
        Block(1, "toml", "x ="),
    ],
    ids=lambda block: block.text,
)
def test_a_block_that_does_not_work_fails(terminal: Terminal, block: Block) -> None:
    def works() -> None:
        terminal.block(block)
        terminal.end()

    with pytest.raises((AssertionError, ValueError)):
        works()


def test_a_block_that_works_passes(terminal: Terminal) -> None:
    for block in (
        Block(1, "python", "import pilotflame\nassert pilotflame.__version__"),
        Block(1, "sh", "pilotflame --version\nmake test\ngit clone x\ncd x"),
        Block(1, "sh", "rm -rf /", skipped="no"),
        Block(1, "text", "anything"),
    ):
        terminal.block(block)
