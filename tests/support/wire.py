"""A request on its way to a host, and hosts that answer what they like.

marker_of(request)              the request's own marker, which stands before each true frame
lies(b"MARKER{...}")            a host that answers these bytes to any request
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from orchestrator.transport import ConnectedHost


def marker_of(request: bytes) -> bytes:
    """What follows its line is compressed."""
    found = re.search(rb'"marker": "([^"]+)"', request)
    assert found, "a request without a marker"
    return found[1]


class Liar:
    """`MARKER` in an answer stands for the request's own marker. Each request takes the next answer."""

    def __init__(self, *answers: bytes) -> None:
        self.node, self._answers = "a", list(answers)

    @contextmanager
    def stream(self, command: str, *, stdin: bytes | Iterable[bytes]) -> Iterator[Iterator[bytes]]:
        text = b"".join([stdin] if isinstance(stdin, bytes) else stdin)
        yield iter([self._answers.pop(0).replace(b"MARKER", marker_of(text))])


def lies(*answers: bytes) -> ConnectedHost:
    return ConnectedHost(Liar(*answers), sys.executable, None, "/nowhere")
