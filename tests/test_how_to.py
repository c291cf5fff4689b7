"""The pages in docs/how-to: their blocks run, as those of the README do, beside a gateway and moto's S3 and SQS.

What an author has to know, beyond tests/doc_blocks.py:

- A page finds a running gateway, which other pages use too, and an empty folder.
- The word after a block's language is a file below that folder: the block is written there and not run.
- The bucket `models` and the queues `greetings` and `greetings-done` exist. Write moto's address as 127.0.0.1:5000.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import boto3
import pytest
from doc_blocks import ROOT, Background, Block, Terminal, blocks
from moto_server import moto_server

PAGES = sorted((ROOT / "docs" / "how-to").glob("*.md"))
MOTO = "http://127.0.0.1:5000"
REGION = "us-east-1"
# These pages have their own gateway, because callers need a key after them.
ALONE = ("keys",)


@pytest.fixture(scope="module")
def aws() -> Iterator[str]:
    with moto_server() as endpoint:
        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": REGION}
        boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket="models")
        for queue in ("greetings", "greetings-done"):
            boto3.client("sqs", endpoint_url=endpoint, **keys).create_queue(QueueName=queue)
        yield endpoint


@contextmanager
def serving(aws: str) -> Iterator[Terminal]:
    """Run a gateway whose AWS endpoint is moto. Yield a terminal beside it."""
    folder = Path(tempfile.mkdtemp(prefix="plh-"))  # short: a unix socket lies in it
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        terminal = Terminal(folder, stack)
        python = folder / "bin" / "python3"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        # `keys` is to use the state folder of this machine's gateway, which it does only if no address is
        # given.
        wrapper = folder / "bin" / "pilotflame"
        wrapper.write_text(
            wrapper.read_text().replace("exec", "[ $1 != keys ] || unset PILOTFLAME_URL\nexec")
        )
        terminal.environment |= {
            "AWS_ENDPOINT_URL": aws, "AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": REGION, "PILOTFLAME_CACHE_DIR": str(folder / "cache"),
        }  # fmt: skip
        stack.enter_context(Background(terminal, "pilotflame serve", "pilotflame serve"))
        yield terminal


@pytest.fixture(scope="module")
def shared(aws: str) -> Iterator[Terminal]:
    """Run a gateway for all pages that change nothing of the gateway itself."""
    with serving(aws) as terminal:
        yield terminal


@pytest.fixture
def terminal(shared: Terminal, aws: str, page: Path) -> Iterator[Terminal]:
    with ExitStack() as stack:
        mine = stack.enter_context(serving(aws)) if page.stem in ALONE else shared
        shutil.rmtree(mine.folder)
        mine.folder.mkdir()
        yield mine


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.timeout(180)
def test_the_blocks_of_a_page_run(page: Path, terminal: Terminal, aws: str) -> None:
    text = page.read_text().replace(MOTO, aws)
    assert text.count("\n") < 110, "a page is at most two screens"
    for block, path in files(text):
        if path:
            file = terminal.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text + "\n")
        else:
            terminal.block(block)


def files(text: str) -> Iterator[tuple[Block, str]]:
    """Yield each block with the file that its first line names, or ""."""
    lines = text.splitlines()
    for block in blocks(text):
        _, _, path = lines[block.line - 1].partition(" ")
        yield block, path.strip()
