"""An OpenID Connect issuer on loopback, which makes tokens."""

from __future__ import annotations

import time
from typing import Any

from aiohttp import web
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey
from joserfc.jws import JWSRegistry

AUDIENCE = "pilotflame"


class Issuer:
    """An issuer on loopback, with keys that can change."""

    def __init__(self) -> None:
        self.keys = KeySet([RSAKey.generate_key(2048, {"kid": "one", "use": "sig"})])
        self.asked = 0
        self.url = ""
        self.named = ""
        self.down = False
        self.published: list[Any] = []
        """The keys that the issuer publishes. If empty, it publishes `keys`."""

    async def __aenter__(self) -> Issuer:
        app = web.Application()
        app.router.add_get("/.well-known/openid-configuration", self._document)
        app.router.add_get("/keys", self._keys)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = self.named = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _document(self, _: web.Request) -> web.Response:
        return web.json_response({"issuer": self.named, "jwks_uri": f"{self.url}/keys"})

    async def _keys(self, _: web.Request) -> web.Response:
        self.asked += 1
        if self.down:
            raise web.HTTPServiceUnavailable
        return web.json_response({"keys": self.published or self.keys.as_dict(private=False)["keys"]})

    def token(self, key: Any = None, header: dict[str, Any] | None = None, **claims: Any) -> str:
        signer = key or self.keys.keys[0]
        found = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "repo:me/app:main",
            "exp": int(time.time()) + 600,
        } | claims
        found = {name: value for name, value in found.items() if value is not None}
        algorithm = {"RSA": "RS256", "EC": "ES256", "oct": "HS256"}[signer.key_type]
        made = {"alg": algorithm, "kid": signer.kid or "none"} | (header or {})
        return jwt.encode(
            made, found, signer, registry=JWSRegistry(algorithms=[made["alg"]], strict_check_header=False)
        )
