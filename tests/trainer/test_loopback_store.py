"""A rank's HTTP server on its own loopback, in front of the store through which the ranks have met."""

from __future__ import annotations

import http.client

import pytest

pytest.importorskip("torch")
import torch.distributed as dist

from tests.support.free_port import free_port
from trainer.ranks import MOST_BYTES, LoopbackStore, served

EVERY_BYTE = bytes(range(256))


def asked(
    server: LoopbackStore, method: str, path: str, body: bytes = b"", length: str | None = None
) -> tuple[int, bytes]:
    """length: what it says of the body's."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, body, {"Content-Length": length or str(len(body))})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def path(server: LoopbackStore, key: str) -> str:
    """As Horovod makes it: of `ADDRESS:PORT/SCOPE/KEY`."""
    return "/" + f"{server.address}:{server.port}/{key}".partition("/")[2]


def test_what_one_rank_puts_another_one_finds_through_its_own_server() -> None:
    port = free_port()
    ranks = [dist.TCPStore("127.0.0.1", port, 2, is_first, wait_for_workers=False) for is_first in (True, False)]
    with served(ranks[0]) as first, served(ranks[1]) as second:
        assert asked(second, "GET", path(second, "global/0")) == (404, b"")
        assert asked(first, "PUT", path(first, "global/0"), EVERY_BYTE) == (200, b"")
        assert asked(second, "GET", path(second, "global/0")) == (200, EVERY_BYTE)
        assert asked(second, "GET", path(second, "local/0")) == (404, b"")
        assert asked(second, "DELETE", path(second, "global/0")) == (200, b"")
        assert asked(first, "GET", path(first, "global/0")) == (200, EVERY_BYTE)  # another may not have read it yet


def test_nobody_who_does_not_know_the_path_reads_or_writes() -> None:
    store = dist.HashStore()
    with served(store) as server, served(store) as other:
        assert asked(server, "PUT", path(server, "global/0"), b"mine") == (200, b"")
        for way in ("/global/0", "//global/0", "/", path(other, "global/0"), f"/{server.secret[:-1]}/global/0"):
            assert asked(server, "GET", way) == (403, b"")
            assert asked(server, "PUT", way, b"another's") == (403, b"")
            assert asked(server, "DELETE", way) == (403, b"")
        for length in (str(MOST_BYTES + 1), "-1", "many"):
            assert asked(server, "PUT", path(server, "global/0"), length=length) == (403, b"")
        assert asked(server, "GET", path(server, "global/0")) == (200, b"mine")
        assert len(server.secret) >= 32
        assert server.secret != other.secret


def test_it_listens_to_the_loopback_alone_and_no_longer_than_it_is_needed() -> None:
    with served(dist.HashStore()) as server:
        assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        asked(server, "GET", path(server, "global/0"))
