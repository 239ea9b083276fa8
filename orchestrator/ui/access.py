"""Who may see the page: whoever has its address, of which a part is a secret, and asks this machine by its own name.

    app = Access(app, token=new_token(), metrics_token=kept_token(home), port=8123)
    app.address                     "http://127.0.0.1:8123/Zx...pQ/"
    app.metrics_address             "http://127.0.0.1:8123/a8...2k/metrics"

The secret is the first part of each path. It stands in no cookie: a browser sends those to every port of this machine,
where another user may listen. Pages name no other origin, and `no-referrer` keeps the address to itself. Asking by
another host name is refused, so that no page elsewhere comes here by a name that it has led to this machine.

The secret is a new one at each start. When the page has ended, another user of this machine may listen at its port, and
hear what an open tab still asks: that is worth nothing then. A Prometheus needs an address that stays, so it has a
secret of its own, which opens nothing but `metrics`.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import secrets

from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.files import write_atomic
from orchestrator.paths import Home

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Of every answer that has none of its own."""


def new_token() -> str:
    return secrets.token_urlsafe(32)


def kept_token(home: Home) -> str:
    """For `metrics`, the same at each start: it lies in a file that its owner alone can read. Without such a file it is
    a new one.
    """
    with contextlib.suppress(OSError):
        handle = os.open(home.metrics_token, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, "rb") as file:
            found, token = os.fstat(handle), file.read(64)
        is_private = found.st_uid == os.getuid() and not found.st_mode & 0o077
        if is_private and re.fullmatch(rb"[A-Za-z0-9_-]{43}", token):
            return token.decode()
    fresh = new_token()
    write_atomic(home.metrics_token, fresh)
    return fresh


class Access:
    """Passes on what comes with the token, its path without it; all else is forbidden, without a word on why."""

    def __init__(self, app: ASGIApp, token: str, metrics_token: str, port: int) -> None:
        self._app, self._token, self._metrics_token = app, token.encode(), metrics_token.encode()
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}
        self.address = f"http://127.0.0.1:{port}/{token}/"
        self.metrics_address = f"http://127.0.0.1:{port}/{metrics_token}/metrics"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        first, slash, rest = scope.get("path", "").removeprefix("/").partition("/")
        hosts = [value for name, value in scope.get("headers", []) if name == b"host"]
        has_token = hmac.compare_digest(first.encode(), self._token)
        has_token |= hmac.compare_digest(first.encode(), self._metrics_token) and rest == "metrics"
        if scope["type"] != "http" or not has_token or len(hosts) != 1 or hosts[0] not in self._hosts:
            await PlainTextResponse("forbidden\n", 403, HEADERS)(scope, receive, send)
            return

        if not slash:  # links of the page lead below it
            await RedirectResponse(self.address, 307, HEADERS)(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                own = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        path = f"/{rest}"
        inner = {**scope, "path": path, "raw_path": path.encode(), "root_path": ""}
        await self._app(inner, receive, with_headers)
