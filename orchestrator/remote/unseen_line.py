"""A line of shell that no other user of this host can read.

argv, environment = unseen_line("curl -H 'Authorization: ...' ...", os.environ)

Every user of this host can read a command line, and only its owner an environment. Programs that the line starts have
their own command lines, and do not have it in their environment.
"""

from __future__ import annotations

from collections.abc import Mapping

_LINE = "ORCH_LINE"


def unseen_line(line: str, environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """What to start, and its environment. $0 is `sh`, as of `sh -c`."""
    return ["sh", "-c", f'eval "unset {_LINE}\n${_LINE}"'], {**environment, _LINE: line}
