"""torch's store over HTTP, on this host alone, for a library that has its ranks meet through HTTP.

    with served(store) as server:
        server.address, server.port         "127.0.0.1:40123/3Fq...", 40123

Each rank serves itself: what it puts lies in torch's store, where the servers of the other ranks find it. So nothing
listens to the network that did not before, and what others put is handed on as bytes and never run. The loopback is
open to every user of the host, who would have to know the path; and a server lives no longer than ranks take to meet.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import secrets
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch.distributed as dist

MOST_BYTES = 1 << 20
"""Of one value: a rank's addresses, 136 bytes for each other rank."""
_POLL_S = 0.02
"""How often the server looks whether it shall end."""


class LoopbackStore(ThreadingHTTPServer):
    """PUT and GET of `/SECRET.../KEY`; a DELETE changes nothing, as the store goes with the job."""

    daemon_threads = True

    def __init__(self, store: dist.Store) -> None:
        super().__init__(("127.0.0.1", 0), _Request)
        self.store, self.secret = store, secrets.token_urlsafe(24)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    @property
    def address(self) -> str:
        """Whoever asks may put `:PORT` after it, of which nothing is made."""
        return f"127.0.0.1:{self.port}/{self.secret}"


@contextlib.contextmanager
def served(store: dist.Store) -> Iterator[LoopbackStore]:
    with LoopbackStore(store) as server:
        serving = threading.Thread(target=server.serve_forever, args=(_POLL_S,), daemon=True)
        serving.start()
        try:
            yield server
        finally:
            server.shutdown()
            serving.join()


class _Request(BaseHTTPRequestHandler):
    server: LoopbackStore
    timeout = 10

    def do_PUT(self) -> None:
        key, length = self._key(), self.headers.get("Content-Length", "")
        if not key or not length.isdecimal() or int(length) > MOST_BYTES:
            return self._answer(403)
        self.server.store.set(key, base64.b64encode(self.rfile.read(int(length))).decode())
        return self._answer(200)

    def do_GET(self) -> None:
        key = self._key()
        if not key:
            return self._answer(403)
        if not self.server.store.check([key]):
            return self._answer(404)
        return self._answer(200, base64.b64decode(self.server.store.get(key), validate=True))

    def do_DELETE(self) -> None:
        self._answer(200 if self._key() else 403)

    def _key(self) -> str:
        """ "" for whoever does not know the secret."""
        _, first, key = [*self.path.split("/", 2), "", ""][:3]
        secret = first.partition(":")[0]
        return key if hmac.compare_digest(secret.encode(), self.server.secret.encode()) else ""

    def _answer(self, status: int, body: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: standard error is the rank's own."""
