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

STRANGERS = 256
"""Connections without a request that may come in: some rounds of AT_A_TIME, so that an owner's is read in time."""
STRANGER_S = 3.0
"""So long may a request take to come whole."""
AT_A_TIME, BACKLOG = 16, 1024
"""Connections that are accepted in a round, and those that may wait for it."""
DESCRIPTORS = 1024

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
        _, slash, rest = _parts(scope)
        if not self.allows(scope):
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
    """A connection is a stranger's until it has sent a whole request that may come in. Strangers are few and have
    little time, and a newcomer is always let in: the oldest has to go. On this machine everybody has one address, so
    nothing tells them apart but that an owner's request comes whole and at once.
    """

    def __init__(self, access: Access, strangers: dict[_Connection, None], **given: Any) -> None:
        super().__init__(**given)
        self._access, self._strangers = access, strangers
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self._strangers) >= STRANGERS:
            next(iter(self._strangers)).show_out()
        self._strangers[self] = None
        self._deadline = self.loop.call_later(STRANGER_S, self.show_out)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self in self._strangers and self.scope and self._access.allows({**self.scope}):
            self._is_known()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_known()
        super().connection_lost(exc)

    def _is_known(self) -> None:
        self._strangers.pop(self, None)
        if self._deadline:
            self._deadline.cancel()

    def show_out(self) -> None:
        self._is_known()
        self.transport.abort()


class _Server(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)  # asyncio takes as many at a time as may wait; more may wait than that


def _not_of_accept(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """With no descriptor left asyncio tries again by itself, and says so each time, with a traceback."""
    if "socket.accept()" not in context.get("message", ""):
        loop.default_exception_handler(context)


def allow_descriptors() -> None:
    """More of them, if the system lets us; not so many that select(2) would be asked about too large ones."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, DESCRIPTORS)), hard))
