"""A link that breaks on purpose, around any transport: its stream ends in a ConnectError after so many bytes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from orchestrator.errors import ConnectError
from orchestrator.transport import ConnectedHost


class Breaking:
    def __init__(self, transport, after: int) -> None:
        self._transport, self._after = transport, after

    @property
    def node(self) -> str:
        return self._transport.node

    @contextlib.contextmanager
    def stream(self, command: str, *, stdin: bytes = b"") -> Iterator[Iterator[bytes]]:
        with self._transport.stream(command, stdin=stdin) as chunks:
            yield self._cut(chunks)

    def _cut(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        left = self._after
        for chunk in chunks:
            yield chunk[:left]
            left -= len(chunk)
            if left <= 0:
                raise ConnectError(self.node, "the link broke")


def breaking(host: ConnectedHost, after: int) -> ConnectedHost:
    return replace(host, transport=Breaking(host.transport, after))
