"""What a host's shell prints around our program's words: skipped up to a size, and named where it drowns them. Pure.

    listener = Listener("v100", marker)
    said = listener.take(chunk)             # from the first marker on; b"" until then

A greeting in `.bashrc`, or a ForceCommand that prints before it runs what it was asked to, shares standard output with
the program. Every program begins with the marker of its request, so that what comes before is recognised and dropped.
"""

from __future__ import annotations

from orchestrator.errors import ConnectError, HostError, ProbeError
from orchestrator.text import one_line

MAX_NOISE_BYTES = 1 << 20
"""Skipped before the first word, and again between two words; whoever prints more does not end."""
REMEDY = "make its start-up files (.bashrc, .profile) and a ForceCommand silent for non-interactive logins"


class Listener:
    """Waits for the first marker of one stream."""

    def __init__(self, node: str, marker: bytes) -> None:
        self._node, self._marker = node, marker
        self._before = bytearray()
        self.has_begun = False

    def take(self, chunk: bytes) -> bytes:
        """What of the stream has come that is the program's. Raises ProbeError for noise that does not end."""
        if self.has_begun or not chunk:
            return chunk
        known = max(0, len(self._before) - len(self._marker))
        self._before += chunk
        at = self._before.find(self._marker, known)
        if at < 0:
            if len(self._before) > MAX_NOISE_BYTES:
                raise endless(self._node, self._before)
            return b""
        self.has_begun = True
        said = bytes(self._before[at:])
        del self._before[at:]
        return said

    def explained(self, error: HostError) -> HostError:
        """The same error, with what the shell printed where the program did not come to speak."""
        return error if self.has_begun else explained(error, self._before)


def endless(node: str, said: bytes | bytearray) -> ProbeError:
    return ProbeError(node, f"its shell prints at login without an end ({_first_line(said)})", REMEDY)


def explained(error: HostError, said: bytes | bytearray) -> HostError:
    """An error of a host whose program was not heard, with what was heard in its place."""
    line = _first_line(said)
    if not line:
        return error
    words = error.message.removeprefix(f"{error.node}: ")
    kind = ConnectError if isinstance(error, ConnectError) else ProbeError
    return kind(error.node, f"{words}; its shell prints at login ({line}), and our program was not heard", REMEDY)


def _first_line(said: bytes | bytearray) -> str:
    """The first line that is not empty, in quotes; "" where there is none."""
    lines = bytes(said[:4096]).decode(errors="replace").strip().splitlines()
    return repr(one_line(lines[0], 80)) if lines else ""
