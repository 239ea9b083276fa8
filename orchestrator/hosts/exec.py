"""One command on many hosts at once, and what each of them made of it.

    found = run_everywhere(connections, cluster.active(), "nvidia-smi -L", timeout_s=60)
    found["v100"]           # Ran(exit_code=0, stdout="GPU 0: Tesla V100...\n", ...), or that host's error

The command travels as data, never in a line of the login shell. What a host says is cleaned, and no more than
MOST_BYTES of each of its two outputs are taken: the rest is counted.
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


# Errors that many hosts share, said once: takes errors, gives one for each different sentence. Pure.
#
#     together([ConnectError("gpu01", "10.0.0.1:22: no SSH login within 10 s"), ... 49 more])
#     # [OrchError("50 hosts (gpu01..gpu50): no SSH login within 10 s")]
#
# Two errors are the same sentence where nothing but the host differs: its name, and the place where it was sought
# (`at`).

_PLACE = re.compile(r"^\[?HOST\]?(:[0-9]+)?: ")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
SHOWN = 12


def together(errors: Iterable[OrchError]) -> list[OrchError]:
    """In the order in which each sentence first came."""
    groups = dict[tuple[str, str, str], list[OrchError]]()
    for error in errors:
        groups.setdefault(_sentence(error), []).append(error)
    return [_as_one(sentence, group) for sentence, group in groups.items()]


def reasons(errors: Iterable[OrchError]) -> list[str]:
    """Each different message once, without its hosts."""
    return list(dict.fromkeys(_sentence(error)[1] for error in errors))


def host_set(names: Sequence[str]) -> str:
    """`gpu01..gpu50, v100`: three and more that count up as a range, at most SHOWN parts."""
    parts = list[str]()
    for row in _rows(names):
        parts += [f"{row[0]}..{row[-1]}"] if len(row) > 2 else row
    more = f" and {len(parts) - SHOWN} more" if len(parts) > SHOWN else ""
    return ", ".join(parts[:SHOWN]) + more


def _sentence(error: OrchError) -> tuple[str, str, str]:
    """Its kind, and its message and remedy without what differs from host to host."""
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
    return OrchError(f"{len(names)} hosts ({host_set(names)}): {message}", remedy)


def _rows(names: Sequence[str]) -> list[list[str]]:
    """The names in order, those together that count up by one."""
    rows = list[list[str]]()
    for name in sorted(names, key=_by_number):
        if rows and name == _next(rows[-1][-1]):
            rows[-1].append(name)
        else:
            rows.append([name])
    return rows


def _by_number(name: str) -> tuple[str, int, str]:
    numbered = _NUMBERED.fullmatch(name)
    return (numbered[1], int(numbered[2]), name) if numbered else (name, -1, name)


def _next(name: str) -> str | None:
    """The name that counts one further, written with as many digits."""
    numbered = _NUMBERED.fullmatch(name)
    return numbered and f"{numbered[1]}{int(numbered[2]) + 1:0{len(numbered[2])}d}"
