"""Errors that many hosts share, said once: takes errors, gives one for each different sentence. Pure.

    together([ConnectError("gpu01", "10.0.0.1:22: no SSH login within 10 s"), ... 49 more])
    # [OrchError("50 hosts (gpu01..gpu50): no SSH login within 10 s")]

Two errors are the same sentence where nothing but the host differs: its name, and the place where it was sought (`at`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from orchestrator.errors import HostError, OrchError

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
