"""One command on many hosts at once, and what each of them made of it.

    found = run_everywhere(connections, cluster.active(), "nvidia-smi -L", timeout_s=60)
    found["v100"]           # Ran(exit_code=0, stdout="GPU 0: Tesla V100...\n", ...), or that host's error

The command travels as data, never in a line of the login shell. What a host says is cleaned, and no more than
MOST_BYTES of each of its two outputs are taken: the rest is counted.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.errors import HostError, ProbeError
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.inventory import Node
from orchestrator.text import clean_lines
from orchestrator.transport import shell
from orchestrator.transport.ask import ConnectedHost, exchange, understood

MOST_BYTES = 1 << 20
END_S = 15.0
"""What a host may take besides: to start our program, and to end the command when its time is up."""
STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Ran:
    """How a command ended on one host, and what it printed."""

    exit_code: int | None
    """128 + n where signal n ended it; None where it was ended because its time was up."""
    stdout: str
    stderr: str
    stdout_cut_bytes: int = 0
    """So much more there was."""
    stderr_cut_bytes: int = 0


def line_of(words: Sequence[str]) -> str:
    """One word is a line of shell as it stands; several are a command and its arguments, each of them quoted."""
    return words[0] if len(words) == 1 else shell.join(words)


def run_everywhere(
    connections: Connections, nodes: Sequence[Node], line: str, *, timeout_s: float
) -> dict[str, Ran | HostError]:
    """timeout_s: for the command; it is ended then. Leaving the connections ends it, too."""
    return connections.each(nodes, partial(_run, line=line, limit_s=timeout_s), deadline_s=timeout_s + END_S)


def _run(host: ConnectedHost, line: str, limit_s: float) -> Ran:
    said = {name: bytearray() for name in STREAMS}
    request = {"line": line, "limit_s": limit_s, "most_bytes": MOST_BYTES}
    with exchange(host, "execute", request) as words:
        for word in words:
            if "end" in word:
                return understood(host.node, partial(_ran, word["end"], said))
            understood(host.node, partial(_hear, word, said))
    raise ProbeError(host.node, "its answer was cut short", "try again")


def _hear(word: Mapping[str, Any], said: Mapping[str, bytearray]) -> None:
    """Raises ValueError, TypeError for what is no output, or is more than was asked for."""
    for name, buffer in said.items():
        if name in word:
            buffer += base64.b64decode(word[name], validate=True)
            if len(buffer) > MOST_BYTES:
                raise ValueError("more output than was asked for")


def _ran(end: Mapping[str, Any], said: Mapping[str, bytearray]) -> Ran:
    code = end["exit_code"]
    stdout, stderr = (clean_lines(said[name].decode(errors="replace")) for name in STREAMS)
    cut = [max(0, int(end[f"{name}_cut_bytes"])) for name in STREAMS]
    return Ran(None if code is None else int(code), stdout, stderr, *cut)
