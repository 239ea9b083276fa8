"""Access control of the page: a secret in its address, and only requests to this machine's own name.

    app = Access(app, token=new_token(), metrics_token=kept_token(home), port=8123)
    app.address                     "http://127.0.0.1:8123/Zx...pQ/"
    app.metrics_address             "http://127.0.0.1:8123/a8...2k/metrics"

The secret is the first part of each path, not a cookie: browsers send cookies to every port of this machine, where
another user may listen. `no-referrer` keeps the address from leaking. Requests by another host name are refused, which
stops DNS rebinding.

The secret is new at each start, since another user may later listen at the same port and see requests of open tabs. A
Prometheus needs a constant address, so it has its own secret, which opens only `metrics`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import re
import resource
import secrets
import socket
from functools import partial
from typing import Any

import uvicorn
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from orchestrator.files import write_atomic
from orchestrator.paths import Home

UNAUTHENTICATED = 256
"""Connections without a valid request: several rounds of AT_A_TIME, so that the owner's request is read in time."""
UNAUTHENTICATED_S = 3.0
"""Time limit for a whole request."""
AT_A_TIME, BACKLOG = 16, 1024
"""Connections accepted per round, and connections that may wait."""
DESCRIPTORS = 1024

HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; form-action 'self'; frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
"""Added to each response that does not set its own."""


def new_token() -> str:
    return secrets.token_urlsafe(32)


def kept_token(home: Home) -> str:
    """The secret for `metrics`, kept in a file that only its owner can read."""
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
    """Passes on requests with the secret, with their path after it; others get 403 without a reason."""

    def __init__(self, app: ASGIApp, token: str, metrics_token: str, port: int) -> None:
        self._app, self._token, self._metrics_token = app, token.encode(), metrics_token.encode()
        self._hosts = {f"{name}:{port}".encode() for name in ("127.0.0.1", "localhost")}
        self.address = f"http://127.0.0.1:{port}/{token}/"
        self.metrics_address = f"http://127.0.0.1:{port}/{metrics_token}/metrics"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        _, slash, rest = _parts(scope)
        if not self.allows(scope):
            await PlainTextResponse("forbidden\n", 403, HEADERS)(scope, receive, send)
            return

        if not slash:  # relative links of the page need the final slash
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

    def allows(self, scope: Scope) -> bool:
        first, _, rest = _parts(scope)
        hosts = [value for name, value in scope.get("headers", []) if name == b"host"]
        has_token = hmac.compare_digest(first.encode(), self._token)
        has_token |= hmac.compare_digest(first.encode(), self._metrics_token) and rest == "metrics"
        return scope["type"] == "http" and has_token and len(hosts) == 1 and hosts[0] in self._hosts

    async def serve(self, listener: socket.socket) -> None:
        """Until SIGINT or SIGTERM."""
        allow_descriptors()
        asyncio.get_running_loop().set_exception_handler(_not_of_accept)
        config = uvicorn.Config(
            self,
            http=partial(_Connection, self, {}),  # type: ignore[arg-type]
            backlog=AT_A_TIME,
            log_level="error",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=1,
        )
        await _Server(config).serve(sockets=[listener])


def _parts(scope: Scope) -> tuple[str, str, str]:
    path: str = scope.get("path", "")
    return path.removeprefix("/").partition("/")


class _Connection(H11Protocol):
    """Limits unauthenticated connections in number and time. At the limit a new connection replaces the oldest, since
    all users of this machine share one address, and only the owner's requests are complete at once.
    """

    def __init__(self, access: Access, waiting: dict[_Connection, None], **given: Any) -> None:
        super().__init__(**given)
        self._access, self._waiting = access, waiting
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self._waiting) >= UNAUTHENTICATED:
            next(iter(self._waiting)).show_out()
        self._waiting[self] = None
        self._deadline = self.loop.call_later(UNAUTHENTICATED_S, self.show_out)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self._waiting and self.scope and self._access.allows({**self.scope}):
            self._accept()

    def connection_lost(self, exc: Exception | None) -> None:
        self._accept()
        super().connection_lost(exc)

    def _accept(self) -> None:
        self._waiting.pop(self, None)
        if self._deadline:
            self._deadline.cancel()

    def show_out(self) -> None:
        self._accept()
        self.transport.abort()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(
                BACKLOG
            )  # asyncio uses one number for connections per round and waiting; allow more to wait


def _not_of_accept(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Without a free descriptor asyncio retries, and would log a traceback each time."""
    if "socket.accept()" not in context.get("message", ""):
        loop.default_exception_handler(context)


def allow_descriptors() -> None:
    """Raises the limit, but not beyond descriptors that select(2) can handle."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, DESCRIPTORS)), hard))
