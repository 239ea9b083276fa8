"""Runs a shell command on many hosts at once, and groups errors that hosts share.

The command travels as data, never in the login shell's line. Output is cleaned and limited to MOST_BYTES per stream.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.errors import HostError, OrchError, ProbeError
from orchestrator.hosts.connections import Connections
from orchestrator.hosts.inventory import Node
from orchestrator.transport import shell
from orchestrator.transport.ask import ConnectedHost, exchange, understood
from orchestrator.units import by_number, clean_lines, name_ranges

MOST_BYTES = 1 << 20
END_S = 15.0
"""Extra time to start our program, and to end the command at its timeout."""
STREAMS = ("stdout", "stderr")


@dataclass(frozen=True)
class Ran:
    exit_code: int | None
    """128 + n after signal n; None after a timeout."""
    stdout: str
    stderr: str
    stdout_cut_bytes: int = 0
    """Bytes beyond MOST_BYTES."""
    stderr_cut_bytes: int = 0


def line_of(words: Sequence[str]) -> str:
    """One word is a shell line; several are a command with arguments to quote."""
    return words[0] if len(words) == 1 else shell.join(words)


def run_everywhere(
    connections: Connections, nodes: Sequence[Node], line: str, *, timeout_s: float
) -> dict[str, Ran | HostError]:
    return connections.each(nodes, partial(run_on_host, line=line, limit_s=timeout_s), deadline_s=timeout_s + END_S)


def run_on_host(host: ConnectedHost, line: str, limit_s: float) -> Ran:
    output = {name: bytearray() for name in STREAMS}
    request = {"line": line, "limit_s": limit_s, "most_bytes": MOST_BYTES}
    with exchange(host, "execute", request) as messages:
        for message in messages:
            if "end" in message:
                return understood(host.node, partial(_ran, message["end"], output))
            understood(host.node, partial(_append, message, output))
    raise ProbeError(host.node, "its answer was cut short", "try again")


def _append(message: Mapping[str, Any], output: Mapping[str, bytearray]) -> None:
    """Raises ValueError, TypeError for malformed or excess output."""
    for name, buffer in output.items():
        if name in message:
            buffer += base64.b64decode(message[name], validate=True)
            if len(buffer) > MOST_BYTES:
                raise ValueError("more output than was asked for")


def _ran(end: Mapping[str, Any], output: Mapping[str, bytearray]) -> Ran:
    code = end["exit_code"]
    stdout, stderr = (clean_lines(output[name].decode(errors="replace")) for name in STREAMS)
    cut = [max(0, int(end[f"{name}_cut_bytes"])) for name in STREAMS]
    return Ran(None if code is None else int(code), stdout, stderr, *cut)


# Grouping of errors that many hosts share, into one line like "50 hosts (gpu[01-50]): no SSH login within 10 s".
# Errors belong together if they differ only in the host's name and its address (`at`). Pure.

_PLACE = re.compile(r"^\[?HOST\]?(:[0-9]+)?: |@\[?HOST\]?(:[0-9]+)?")
SHOWN = 12


def together(errors: Iterable[OrchError]) -> list[OrchError]:
    groups = dict[tuple[str, str, str], list[OrchError]]()
    for error in errors:
        groups.setdefault(_sentence(error), []).append(error)
    return [_as_one(sentence, group) for sentence, group in groups.items()]


def reasons(errors: Iterable[OrchError]) -> list[str]:
    return list(dict.fromkeys(_sentence(error)[1] for error in errors))


def host_set(names: Sequence[str]) -> str:
    """`gpu[01-50], v100`, as `--nodes` takes it; at most SHOWN parts."""
    parts = name_ranges(sorted(names, key=by_number))
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return ", ".join(parts[:SHOWN]) + more


def _sentence(error: OrchError) -> tuple[str, str, str]:
    if not isinstance(error, HostError):
        return "", error.message, error.remedy
    words = _without_host(error.message.removeprefix(f"{error.node}: "), error)
    return type(error).__name__, _PLACE.sub("", words), _without_host(error.remedy, error)


def _without_host(words: str, error: HostError) -> str:
    for name, place in ((error.at, "HOST"), (error.node, "NODE")):
        if name:
            words = re.sub(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", place, words)
    return words


def _as_one(sentence: tuple[str, str, str], group: Sequence[OrchError]) -> OrchError:
    names = list(dict.fromkeys(error.node for error in group if isinstance(error, HostError)))
    if len(names) < 2:
        return group[0]
    _, message, remedy = sentence
    # With the first host's name and address it can be typed as it stands.
    typed = group[0].remedy if remedy == group[0].remedy else f"{group[0].remedy}; likewise for the others"
    return OrchError(f"{len(names)} hosts ({host_set(names)}): {message}", typed)
