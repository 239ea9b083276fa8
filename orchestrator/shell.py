"""The only place that puts values into shell text.

Two rules keep every host's login shell out of the way: user data never stands in a shell line (it travels on standard
input), and what does stand there is quoted here. The bootstrap holds no quote, backslash, `!` or `$`, so that sh,
dash, bash, zsh, fish and tcsh all read it the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

ARRIVE_S = 300
"""A program that has not come whole by then ends: its link fell silent while it was on its way."""
# Reads "<length>\n<that many bytes of Python>" from standard input and runs it; the rest of the input is its request.
_BOOTSTRAP = (
    "import sys,signal;signal.alarm(%d);"
    "i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),sys.argv[1],sys.argv[2]))"
)


def join(argv: Sequence[str]) -> str:
    """A POSIX shell line that passes exactly these arguments."""
    return shlex.join(argv)


def python_on_stdin(python: str, activate: str | None, program: str) -> str:
    """The shell line that starts `python` on a program sent on standard input.

    python: a path or name, `~/` allowed at its start. activate: a line of POSIX shell from the inventory, run first
    (the one wanted piece of user shell). program: a name for tracebacks and `ps`.
    """
    home, _, rest = python.partition("/")
    interpreter = f'"$HOME"/{shlex.quote(rest)}' if home == "~" and rest else shlex.quote(python)
    line = f"exec {interpreter} -uc {shlex.quote(_BOOTSTRAP % ARRIVE_S)} {shlex.quote(program)} exec"
    if activate:
        line = f"eval {shlex.quote(activate)} </dev/null && {line}"  # eval: a comment at its end must not hide the rest
    return line if not activate and home != "~" else f"exec sh -c {shlex.quote(line)}"
