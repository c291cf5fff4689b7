"""`pilotflame batch` against a gateway: each line is answered once, in order, also after kills and interrupts."""

from __future__ import annotations

import json
import random
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from moto_server import moto_server

HANDLER = """
from pilotflame import batch

def handler(event: object) -> object:
    if isinstance(event, dict) and event.get("fail"):
        raise ValueError("as asked")
    return {"got": event}
"""
SLOW = """
import time

def handler(event: int) -> int:
    time.sleep(0.002)
    return event * 2
"""


def write(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(value, ensure_ascii=False) + "\n" for value in values))
    return path


def read(path: Path) -> list[Any]:
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line) for line in text[:-1].split(b"\n")]


def test_answers_are_in_order_and_failed_lines_say_why(
    pilotflame: Any, deployed: Callable[..., str], tmp_path: Path
) -> None:
    name = deployed(HANDLER)
    values: list[Any] = [*range(100), {"text": "line\u2028end"}, None, 12345678901234567]
    source = write(tmp_path / "in.jsonl", values)
    text = source.read_bytes().split(b"\n")
    text[50], text[60] = b'1,"webhook":"http://127.0.0.1"', b'{"fail": true}'
    # Python's json reads these lines, but they are not valid JSON.
    text[70], text[71] = b'{"x": NaN}', rb'"\ud800"'
    values[72], text[72] = 123456789012345678901, b"123456789012345678901"
    source.write_bytes(b"\n".join(text))
    done = pilotflame("batch", name, source, tmp_path / "out.jsonl", "--json")
    assert done.returncode == 4, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["lines"], summary["failed"], summary["resumed_at"]) == (103, 4, 0)
    found = read(tmp_path / "out.jsonl")
    bad, failed = found[50]["error"], found[60]["error"]
    assert (bad["type"], bad["details"]["input_line"]) == ("bad_json", 51)
    assert bad["message"].startswith("in.jsonl, line 51: ")
    assert (failed["type"], failed["details"]["input_line"]) == ("handler_failed", 61)
    assert "as asked" in failed["message"]
    for number in (70, 71):
        assert found[number]["error"]["type"] == "bad_json"
        values[number], found[number] = None, {"got": None}
    values[50] = values[60] = None
    found[50] = found[60] = {"got": None}
    assert found == [{"got": value} for value in values]
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out.jsonl"]


def test_killed_and_resumed_every_line_is_there_once_and_ran_once(
    pilotflame: Any, deployed: Callable[..., str], start: Any, served: str, tmp_path: Path
) -> None:
    name, count, chance = (
        deployed(SLOW, "--set", "scale.max=2", "--set", "concurrency=4"),
        2000,
        random.Random(11),
    )
    source, output = write(tmp_path / "in.jsonl", list(range(count))), tmp_path / "out.jsonl"
    for _ in range(3):
        process = start("batch", name, source, output, PILOTFLAME_URL=served)
        _wait_until_longer(output, process, output.stat().st_size if output.exists() else 0, chance)
        process.kill()
        process.wait()
    before = output.read_bytes()
    # Cut the last line, as if the process had been killed while it wrote the line.
    output.write_bytes(before[: -chance.randrange(1, 4)])
    done = pilotflame("batch", name, source, output, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["resumed_at"] == output.read_bytes()[: len(before)].count(b"\n") - 1
    assert read(output) == [2 * value for value in range(count)]
    jobs = httpx.get(f"{served}/v2/{name}/health").json()["jobs"]
    assert (jobs["completed"], jobs["failed"]) == (count, 0)


def _wait_until_longer(
    output: Path, process: subprocess.Popen[str], size: int, chance: random.Random
) -> None:
    """Wait until the output is longer than `size` by a random number of bytes."""
    while (output.stat().st_size if output.exists() else 0) <= size + chance.randrange(10, 300):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""


def test_an_interrupted_batch_says_how_to_continue(
    pilotflame: Any, deployed: Callable[..., str], start: Any, served: str, tmp_path: Path
) -> None:
    name = deployed(SLOW)
    source, output = write(tmp_path / "in.jsonl", list(range(300))), tmp_path / "out.jsonl"
    process = start("batch", name, source, output, PILOTFLAME_URL=served)
    _wait_until_longer(output, process, 0, random.Random(1))
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130, said
    assert "the same command continues from there" in said
    assert "Traceback" not in said
    done = pilotflame("batch", name, source, output)
    assert done.returncode == 0, done.stderr
    assert read(output) == [2 * value for value in range(300)]


def test_a_batch_that_cannot_continue_says_why(
    pilotflame: Any, deployed: Callable[..., str], tmp_path: Path
) -> None:
    source, output = write(tmp_path / "in.jsonl", [1]), tmp_path / "out.jsonl"
    unknown = pilotflame("batch", "nobody", source, output)
    assert unknown.returncode == 1
    assert "no function 'nobody'" in unknown.stderr
    name = deployed(HANDLER)
    other = pilotflame("batch", name, source, output)
    assert other.returncode == 1
    assert "half done with another function" in other.stderr
    assert pilotflame("batch", name, source, output, "--restart").returncode == 0
    twice = pilotflame("batch", name, source, output)
    assert twice.returncode == 1
    assert "already exists" in twice.stderr
    assert read(output) == [{"got": 1}]


@pytest.fixture
def moto() -> Iterator[str]:
    """Yield the endpoint of moto's S3."""
    with moto_server() as endpoint:
        yield endpoint


def test_from_s3_to_s3(pilotflame: Any, deployed: Callable[..., str], moto: str, tmp_path: Path) -> None:
    name = deployed(HANDLER)
    aws = {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": moto, "XDG_STATE_HOME": str(tmp_path),
        "AWS_EC2_METADATA_DISABLED": "true", "AWS_CONFIG_FILE": "/nonexistent",
    }  # fmt: skip
    store = boto3.client(
        "s3", endpoint_url=moto, region_name="us-east-1",
        aws_access_key_id="a", aws_secret_access_key="b",
    )  # fmt: skip
    try:
        store.create_bucket(Bucket="lots")
        store.put_object(Bucket="lots", Key="in/a.jsonl", Body=b"1\n2\n")
        store.put_object(Bucket="lots", Key="in/b.jsonl", Body=b"3\n")
        done = pilotflame("batch", name, "s3://lots/in/", "s3://lots/out/all.jsonl", "--json", **aws)
        assert done.returncode == 0, done.stderr
        body = store.get_object(Bucket="lots", Key="out/all.jsonl")["Body"]
        assert body.read() == b'{"got":1}\n{"got":2}\n{"got":3}\n'
        body.close()
        assert not list((tmp_path / "pilotflame" / "batches").iterdir())
    finally:
        store.close()
