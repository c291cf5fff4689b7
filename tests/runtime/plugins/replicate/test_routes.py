"""Replicate's routes over plain HTTP: what its clients do not show."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import resource
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Function, Gate, Gateway, gateway_here, short_folder, until
from pilotflame.runtime.front.http.requests import parse_preferences
from pilotflame.runtime.plugins.replicate import files, models, routes
from pilotflame.runtime.plugins.replicate.routes import preferred_wait

from .conftest import STREAM

pytestmark = pytest.mark.asyncio(loop_scope="module")


class Caller:
    """A caller with a key of their own."""

    def __init__(self, gateway: Gateway, token: str, scheme: str = "Bearer") -> None:
        self._client, self._headers = gateway.client, {"Authorization": f"{scheme} {token}"}

    async def __call__(self, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
        return await self._client.request(method, path, json=body, headers=self._headers | headers)

    async def upload(self, name: str, content: bytes, metadata: Any = None) -> httpx.Response:
        data = {} if metadata is None else {"metadata": metadata}
        files = {"content": (name, content, "text/plain")}
        return await self._client.post("/replicate/v1/files", files=files, data=data, headers=self._headers)

    async def made(self, function: Function, text: str = "a", **headers: str) -> dict[str, Any]:
        response = await self("POST", "/replicate/v1/predictions", {"version": function.name, "input": {"text": text}}, **headers)  # fmt: skip
        assert response.status_code == 201, response.text
        return dict(response.json())


@pytest.fixture
def caller(gateway: Gateway, key: Callable[..., Any]) -> Callable[..., Any]:
    async def made(scheme: str = "Bearer", **wanted: Any) -> Caller:
        return Caller(gateway, await key(**wanted), scheme)

    return made


async def test_a_prediction_belongs_to_its_key(
    caller: Callable[..., Any], predictor: Callable[..., Any]
) -> None:
    function, mine, theirs = await predictor(), await caller("Token"), await caller()
    made = await mine.made(function, Prefer="wait=5")
    assert (made["status"], made["output"], made["source"]) == ("succeeded", "a", "api")
    own = made["urls"]["get"]
    assert own.endswith(f"/replicate/v1/predictions/{made['id']}")
    assert (await mine("GET", own)).json() == made
    for method, path in (
        ("GET", own),
        ("POST", made["urls"]["cancel"]),
        ("GET", f"/replicate/v1/predictions?cursor={made['id']}"),
    ):
        response = await theirs(method, path)
        assert (response.status_code, response.json()["title"]) == (404, "Not Found")
        assert made["id"] in response.json()["detail"]
    assert (await theirs("GET", "/replicate/v1/predictions")).json()["results"] == []
    assert [one["id"] for one in (await mine("GET", "/replicate/v1/predictions")).json()["results"]] == [
        made["id"]
    ]


async def test_a_key_of_another_function(caller: Callable[..., Any], predictor: Callable[..., Any]) -> None:
    function, other = await predictor(), await predictor()
    stranger = await caller(functions=[other.name])
    body: dict[str, Any] = {"input": {"text": "a"}}
    for path in ("models", "deployments"):
        assert (
            await stranger("POST", f"/replicate/v1/{path}/me/{function.name}/predictions", body)
        ).status_code == 404
        assert (await stranger("GET", f"/replicate/v1/{path}/me/{function.name}")).status_code == 404
        assert [
            one["name"] for one in (await stranger("GET", f"/replicate/v1/{path}")).json()["results"]
        ] == [other.name]
    assert (
        await stranger("POST", "/replicate/v1/predictions", body | {"version": function.name})
    ).status_code == 404


@pytest.mark.parametrize("reference", ["{}", "me/{}", "me/{}:anything", "{}:1"])
async def test_what_a_version_may_be(
    caller: Callable[..., Any], predictor: Callable[..., Any], reference: str
) -> None:
    function, call = await predictor(), await caller()
    body = {"version": reference.format(function.name), "input": {"text": "a"}}
    assert (await call("POST", "/replicate/v1/predictions", body)).json()["version"] == function.name
    refused = await call("POST", "/replicate/v1/predictions", {"input": {"text": "a"}})
    assert (refused.status_code, refused.json()["error"]["type"]) == (422, "input_invalid")


async def test_the_url_of_a_stream_is_the_permission(
    gateway: Gateway, caller: Callable[..., Any], predictor: Callable[..., Any]
) -> None:
    function, call = await predictor(STREAM), await caller()
    url = (await call.made(function, "once upon"))["urls"]["stream"]
    async with httpx.AsyncClient() as anybody:
        told = (await anybody.get(url)).text.replace(": waiting\n\n", "")
        assert told.startswith("event: output\nid: 1\ndata: once\ndata:  \n\n")
        assert told.endswith("event: done\nid: 3\ndata: {}\n\n")
        forged = url[:-1] + ("0" if url[-1] != "0" else "1")
        assert (await anybody.get(forged)).status_code == 404
        assert (await anybody.get(url.partition("?")[0])).status_code == 404
        assert (await anybody.get(url, headers={"Last-Event-ID": "1"})).text.count("event: output") == 1


async def test_the_webhook_secret_signs_no_stream(
    gateway: Gateway, caller: Callable[..., Any], predictor: Callable[..., Any]
) -> None:
    function, call = await predictor(STREAM), await caller()
    made = await call.made(function, "once upon")
    path, _, sent = made["urls"]["stream"].rpartition("=")
    found = (await gateway.client.get(f"/v1/functions/{function.name}/webhooks/secret")).json()["secret"]
    raw = base64.b64decode(found.removeprefix("whsec_"))
    async with httpx.AsyncClient() as receiver:
        for key in (found.encode(), raw):
            for text in (f"stream:{made['id']}", f"{function.name}:{made['id']}", made["id"]):
                forged = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
                assert (await receiver.get(f"{path}={forged}")).status_code == 404
        assert (await receiver.get(f"{path}={sent}")).status_code == 200


async def test_a_wait_that_runs_out(
    caller: Callable[..., Any], predictor: Callable[..., Any], gate: Gate
) -> None:
    function, call = await predictor(gate=gate), await caller()
    made = await call.made(function, "wait", Prefer="wait=1")
    assert (made["status"], made["started_at"] is not None) == ("starting", True)
    assert (await call("GET", made["urls"]["get"])).json()["status"] == "processing"
    gate.open()


async def test_pages(
    caller: Callable[..., Any], predictor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, call = await predictor(), await caller()
    monkeypatch.setattr(routes, "PAGE", 2)
    made = [(await call.made(function))["id"] for _ in range(3)]
    first = (await call("GET", "/replicate/v1/predictions")).json()
    assert [one["id"] for one in first["results"]] == made[:0:-1]
    second = (await call("GET", first["next"])).json()
    assert ([one["id"] for one in second["results"]], second["next"]) == (made[:1], None)
    assert first["previous"] is None
    back = (await call("GET", second["previous"])).json()
    assert ([one["id"] for one in back["results"]], back["previous"]) == (made[:0:-1], None)
    more = [(await call.made(function))["id"] for _ in range(2)]
    third = (
        await call(
            "GET", (await call("GET", f"/replicate/v1/predictions?cursor={made[1]}")).json()["previous"]
        )
    ).json()
    assert [one["id"] for one in third["results"]] == [made[2], made[1]]
    top = (await call("GET", third["previous"])).json()
    assert ([one["id"] for one in top["results"]], top["previous"]) == (more[::-1], None)


async def test_pages_of_functions(
    caller: Callable[..., Any], predictor: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = sorted([(await predictor()).name for _ in range(3)])
    call = await caller(functions=names)
    monkeypatch.setattr(models, "PAGE", 2)
    for path in ("/replicate/v1/models", "/replicate/v1/deployments"):
        first = (await call("GET", path)).json()
        assert ([one["name"] for one in first["results"]], first["previous"]) == (names[:2], None)
        second = (await call("GET", first["next"])).json()
        assert ([one["name"] for one in second["results"]], second["next"]) == (names[2:], None)
        assert (await call("GET", second["previous"])).json() == first


async def test_files_are_their_uploaders(caller: Callable[..., Any], predictor: Callable[..., Any]) -> None:
    function, mine, theirs = await predictor(), await caller(), await caller()
    file = (await mine.upload("in.txt", b"content", json.dumps({"a": 1}))).json()
    assert (file["name"], file["size"], file["metadata"], file["content_type"]) == (
        "in.txt",
        7,
        {"a": 1},
        "text/plain",
    )
    own = file["urls"]["get"]
    downloaded = await mine("GET", f"{own}/download")
    assert (downloaded.content, downloaded.headers["content-disposition"]) == (b"content", "attachment")
    for method, path in (("GET", own), ("DELETE", own), ("GET", f"{own}/download")):
        assert (await theirs(method, path)).status_code == 404
    assert (await theirs("GET", "/replicate/v1/files")).json()["results"] == []
    body = {"version": function.name, "input": {"text": "a", "image": own}}
    assert (await mine("POST", "/replicate/v1/predictions", body, Prefer="wait")).json()[
        "output"
    ] == "acontent.txt"
    refused = await theirs("POST", "/replicate/v1/predictions", body)
    assert (refused.status_code, "not there" in refused.json()["detail"]) == (422, True)
    assert (await mine("DELETE", own)).status_code == 204


async def test_forms_that_are_refused(gateway: Gateway, caller: Callable[..., Any]) -> None:
    call = await caller()
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    for body in (
        b"",
        b"--x\r\n\r\n",
        b'--x\r\nContent-Disposition: form-data; name="a\x7f"\r\n\r\n\r\n--x--\r\n',
        b"--y--",
        b"--x\r\n" + b"\r\n" * (1 << 20),
        b"--x\r\nContent-Disposition: form-data; name=content\r\n\r\n\r\n" * 40_000,
    ):
        response = await gateway.client.post("/replicate/v1/files", content=body, headers=form)
        assert (response.status_code, response.json()["error"]["type"]) == (400, "bad_json"), response.text
    assert (await call("POST", "/replicate/v1/files", {})).status_code == 400
    assert (await call.upload("a", b"a", "[]")).status_code == 400
    assert (await call.upload("a", b"a", "{")).status_code == 400
    assert (await call("GET", "/replicate/v1/files")).json()["results"] == []


async def test_a_caller_cannot_name_files_of_the_gateway(
    gateway: Gateway, caller: Callable[..., Any], predictor: Callable[..., Any]
) -> None:
    function, call = await predictor(), await caller()
    body = {"input": {"text": "a", "image": "http://x/secret"}, "version": function.name,
            "prediction": {"files": {"http://x/secret": "/etc/passwd"}}, "context": {"files": "/etc/passwd"}}  # fmt: skip
    found = (await call("POST", "/replicate/v1/predictions", body, Prefer="wait")).json()
    assert (found["status"], found["output"]) == ("failed", None)
    for path in ("/etc/passwd", "file:///etc/passwd"):
        body["input"] = {"text": "a", "image": path}
        assert (await call("POST", "/replicate/v1/predictions", body, Prefer="wait")).json()[
            "status"
        ] == "failed"


async def test_only_urls_of_this_gateway_are_its_files(
    caller: Callable[..., Any], predictor: Callable[..., Any]
) -> None:
    function, call = await predictor(), await caller()
    file_id = (await call.upload("in.txt", b"content")).json()["id"]
    body: dict[str, Any] = {
        "version": function.name,
        "input": {"text": "a", "image": f"/replicate/v1/files/{file_id}"},
    }
    assert (await call("POST", "/replicate/v1/predictions", body, Prefer="wait")).json()[
        "output"
    ] == "acontent.txt"
    # The caller reaches this gateway by another name.
    body["input"]["image"] = f"http://models.example/v1/files/{file_id}/download"
    found = await call("POST", "/replicate/v1/predictions", body, Prefer="wait", Host="models.example")
    assert found.json()["output"] == "acontent.txt", found.text
    # A file of another host is downloaded from that host. No server listens at this address, so the download fails.
    body["input"]["image"] = f"http://127.0.0.1:1/v1/files/{file_id}"
    found = await call("POST", "/replicate/v1/predictions", body, Prefer="wait")
    assert (found.json()["status"], "cannot be fetched" in found.json()["error"]) == ("failed", True)


async def test_a_deep_input_with_a_file_for_a_container_is_refused(
    gateway: Gateway,
    caller: Callable[..., Any],
    predictor: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    function, call = await predictor(), await caller()
    own = (await call.upload("in.txt", b"content")).json()["urls"]["get"]
    # Put the contents of files into the input, as for a function in a container, which cannot read their paths.
    given = files.FilesApi.given
    monkeypatch.setattr(files.FilesApi, "given", lambda self, *how: given(self, *how[:3], 1 << 20))
    deep = json.loads("[" * 600 + json.dumps(own) + "]" * 600)
    for value, status in (([{"file": own}], 201), (deep, 400)):
        body = {"version": function.name, "input": {"text": "a", "image": value}}
        found = await call("POST", "/replicate/v1/predictions", body)
        assert found.status_code == status, found.text
    # Only the first request made a prediction: the second input is nested too deeply. The file's content is in the input.
    [made] = (await call("GET", "/replicate/v1/predictions")).json()["results"]
    shown = (await call("GET", f"/replicate/v1/predictions/{made['id']}")).json()
    assert shown["input"]["image"][0]["file"].startswith("data:text/plain;name=content.txt;base64,")
    # The input gets the content for each of the ten references, so the size counts ten times.
    large = (await call.upload("in.txt", b"x" * (200 << 10))).json()["urls"]["get"]
    body = {"version": function.name, "input": {"text": "a", "image": [large] * 10}}
    found = await call("POST", "/replicate/v1/predictions", body)
    assert (found.status_code, "2048000 bytes" in found.text) == (413, True), found.text[:300]


async def test_a_file_that_has_lost_its_content(
    gateway: Gateway, caller: Callable[..., Any], predictor: Callable[..., Any]
) -> None:
    function, call = await predictor(), await caller()
    file = (await call.upload("in.txt", b"content")).json()
    (gateway.state / "files" / file["id"] / "content.txt").unlink()
    async with asyncio.timeout(5):
        assert (await call("GET", f"{file['urls']['get']}/download")).status_code == 404
        body = {"version": function.name, "input": {"text": "a", "image": file["urls"]["get"]}}
        assert (await call("POST", "/replicate/v1/predictions", body)).status_code == 422


async def test_a_full_disk(gateway: Gateway, caller: Callable[..., Any]) -> None:
    call, limits = await caller(), resource.getrlimit(resource.RLIMIT_FSIZE)
    # Limit the files of this process to 8 MiB. A write beyond the limit fails, as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, limits[1]))
    try:
        refused = await call.upload("large", bytes(9 << 20))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (refused.status_code, refused.json()["error"]["type"]) == (507, "storage_full"), refused.text
    assert (refused.json()["title"], str(gateway.state) in refused.text) == ("Insufficient Storage", False)
    assert (await call("GET", "/replicate/v1/files")).json()["results"] == []
    assert not [one for one in (gateway.state / "files").iterdir() if one.name.startswith(".")]


async def test_links_behind_a_proxy(gateway: Gateway, caller: Callable[..., Any], tmp_path: Path) -> None:
    told = {"X-Forwarded-Proto": "https", "X-Forwarded-Host": "models.example"}
    # This gateway trusts no proxy, so it ignores the headers.
    assert (await (await caller())("GET", "/replicate/v1/models", **told)).text.count("https://") == 0
    with short_folder() as folder:
        expired = folder / "state/files/.interrupted"
        expired.mkdir(parents=True)
        async with gateway_here(folder / "state", trusted_proxies=("10.0.0.0/8", "127.0.0.1")) as behind:
            for headers, origin in (
                (told, "https://models.example"),
                ({"X-Forwarded-Proto": "https, http"}, behind.url.replace("http", "https")),
                (
                    {"Forwarded": "for=1.2.3.4;proto=https;host=f.example:8443, for=10.0.0.1"},
                    "https://f.example:8443",
                ),
                ({"X-Forwarded-Proto": "gopher", "X-Forwarded-Host": "a/b"}, behind.url),
                ({}, behind.url),
            ):
                file = (
                    await behind.client.post("/replicate/v1/files", files={"content": b"1"}, headers=headers)
                ).json()
                assert file["urls"]["get"] == f"{origin}/replicate/v1/files/{file['id']}"

            async def swept() -> bool:
                return not await asyncio.to_thread(expired.exists)

            await until(swept, "the sweep at the start")


# -- without a gateway


@pytest.mark.parametrize(
    ("lines", "wait_s"),
    [
        ([], 0.0),
        (["wait"], 60.0),
        (["Wait=5"], 5.0),
        (["wait=500"], 60.0),
        (["respond-async"], 0.0),
        (["waits"], 0.0),
    ],
)
async def test_preferences(lines: Iterable[str], wait_s: float) -> None:
    assert preferred_wait(parse_preferences(lines)) == wait_s
