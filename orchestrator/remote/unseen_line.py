"""Hides a shell command from other users: they can read command lines, but not environments.

    argv, environment = unseen_line("curl -H 'Authorization: ...' ...", os.environ)

Programs that the command starts have visible command lines of their own, but not this variable.
"""

from __future__ import annotations

from collections.abc import Mapping

_LINE = "ORCH_LINE"


def unseen_line(line: str, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment to start. $0 is `sh`, as with `sh -c`."""
    return ["sh", "-c", f'eval "unset {_LINE}\n${_LINE}"'], {**environment, _LINE: line}
