"""AWS signatures: those of botocore are accepted, whatever they cover, and any change of the request is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from hypothesis import given
from hypothesis import strategies as st
from multidict import CIMultiDict
from pilotflame.errors import Unauthorized
from pilotflame.runtime.ground.access.aws_signature import (
    MAX_SKEW_S,
    SignedRequest,
    parse_signature,
    signing_digest,
    verify,
)

ID, SECRET = "0123456789ab", "c" * 64
PATH = "/lambda/2015-03-31/functions/mine/invocations"
visible = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)
names = st.from_regex(r"[a-z][a-z0-9-]{0,10}", fullmatch=True)


def signed(target: str = PATH, body: bytes = b"{}", **headers: str) -> SignedRequest:
    """Return a request as botocore signs and sends it."""
    fields = {name.replace("_", "-"): value for name, value in headers.items()}
    request = AWSRequest("POST", f"http://gateway:8600{target}", data=body, headers=fields)
    SigV4Auth(Credentials(ID, SECRET), "lambda", "eu-west-1").add_auth(request)
    sent = CIMultiDict({"Host": "gateway:8600", **dict(request.headers.items())})
    return SignedRequest("POST", target, sent, body)


def check(request: SignedRequest, secret: str = SECRET, now_s: float | None = None) -> None:
    signature = parse_signature(request.headers, time.time() if now_s is None else now_s)  # type: ignore[arg-type]
    assert signature.key_id == ID
    verify(signing_digest(secret), signature, request)


def altered(request: SignedRequest, **changes: Any) -> SignedRequest:
    fields = {name: getattr(request, name) for name in ("method", "target", "headers", "body")}
    return SignedRequest(**(fields | changes))


@given(
    st.lists(st.sampled_from(["a", "a%3Ab", "x~y", "%C3%BC", "$LATEST", "a%2Fb"]), min_size=1, max_size=4),
    st.lists(st.tuples(names, st.sampled_from(["", "7", "%24LATEST", "a%20b", "%C3%BC"])), max_size=4),
    st.dictionaries(names.map(lambda name: f"x-amz-{name}"), visible, max_size=3),
    st.binary(max_size=50),
)
def test_what_botocore_signs_is_accepted(
    path: list[str], query: list[tuple[str, str]], headers: dict[str, str], body: bytes
) -> None:
    headers.pop("x-amz-date", None)
    headers.pop("x-amz-content-sha256", None)
    target = f"/lambda/2015-03-31/functions/{'/'.join(path)}"
    if query:
        target += "?" + "&".join(f"{name}={value}" for name, value in query)
    check(signed(target, body, **headers))


def test_a_name_that_is_signed_twice_is_refused() -> None:
    """For each mention of a name, the lines of its header are joined. So 4,096 mentions could join 1 MB of lines 4,096 times."""
    request = signed()
    repeated = CIMultiDict(request.headers)  # type: ignore[arg-type]
    repeated["Authorization"] = repeated["Authorization"].replace("=host;", "=host;a;a;")
    with pytest.raises(Unauthorized, match="names a header twice"):
        check(altered(request, headers=repeated))


def test_any_change_is_refused() -> None:
    request = signed(f"{PATH}?Qualifier=7", x_amz_invocation_type="Event")
    check(request)
    others = CIMultiDict(request.headers)  # type: ignore[arg-type]
    others["X-Amz-Invocation-Type"] = "DryRun"
    elsewhere = CIMultiDict(request.headers)  # type: ignore[arg-type]
    elsewhere["Host"] = "other:8600"
    for changed in (
        altered(request, method="GET"), altered(request, target=f"{PATH}?Qualifier=8"),
        altered(request, target=PATH), altered(request, body=b"{} "), altered(request, headers=others),
        altered(request, headers=elsewhere),
    ):  # fmt: skip
        with pytest.raises(Unauthorized, match="does not fit"):
            check(changed)
    with pytest.raises(Unauthorized, match="does not fit"):
        check(request, "d" * 64)


def test_a_header_of_aws_that_is_not_signed_is_refused() -> None:
    request = signed()
    more = CIMultiDict(request.headers)  # type: ignore[arg-type]
    more["X-Amz-Invocation-Type"] = "Event"
    with pytest.raises(Unauthorized, match="x-amz-invocation-type"):
        check(altered(request, headers=more))


def test_bytes_that_are_not_text_are_no_bug() -> None:
    request = altered(signed(), target="/lambda/2015-03-31/functions/\udcff?\udcfe=%ff")
    with pytest.raises(Unauthorized, match="does not fit"):
        check(request)


def test_old_signatures_are_refused() -> None:
    request = signed()
    for now_s in (time.time() + MAX_SKEW_S + 2, time.time() - MAX_SKEW_S - 2):
        with pytest.raises(Unauthorized, match="too far"):
            check(request, now_s=now_s)


@pytest.mark.parametrize(
    "wrong",
    [
        "AWS4-HMAC-SHA256", "AWS4-HMAC-SHA256 Credential=x, SignedHeaders=host, Signature=0",
        f"AWS4-HMAC-SHA256 Credential={ID}/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature={'0' * 64}",
        f"AWS4-ECDSA-P256-SHA256 Credential={ID}/20260101/lambda/aws4_request, SignedHeaders=host, Signature={'0' * 64}",
    ],
)  # fmt: skip
def test_malformed_signatures_are_refused(wrong: str) -> None:
    with pytest.raises(Unauthorized):
        parse_signature({"Authorization": wrong, "X-Amz-Date": "20260101T000000Z"}, time.time())


def test_a_key_without_a_signing_digest_is_refused_like_any_other(caplog: pytest.LogCaptureFixture) -> None:
    request = signed()
    with caplog.at_level("INFO"), pytest.raises(Unauthorized, match="does not fit") as raised:
        verify(None, parse_signature(request.headers, time.time()), request)  # type: ignore[arg-type]
    assert "AWS_SESSION_TOKEN" in raised.value.remedy
    with pytest.raises(Unauthorized) as wrong:
        check(request, "d" * 64)
    assert wrong.value.to_wire() == raised.value.to_wire()
    assert f"{ID} is refused: it was made without aws" in caplog.text
