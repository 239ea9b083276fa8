"""The only place that puts values into shell text. Pure.

Two rules keep every host's login shell out of the way: user data never stands in a shell line (it travels on standard
input), and what does stand there is quoted here. The bootstrap holds no quote, backslash, `!` or `$`, so that sh,
dash, bash, zsh, fish and tcsh all read it the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

ARRIVE_S = 300
"""A program that has not come whole by then ends: its link fell silent while it was on its way."""
ACTIVATE_FAILED = "orch-activate-failed"
"""Printed on standard error if the line that is to run before Python fails, or ends the shell."""
# Every user of a host can read a command line: what stands here says no more than that a line of shell comes.
_ACTIVATE = (
    f'IFS= read -r ORCH_LINE && trap "echo {ACTIVATE_FAILED} >&2" EXIT && '
    'eval "unset ORCH_LINE; $ORCH_LINE" </dev/null && trap - EXIT && '
)
_FLAGS = "-Suc"
"""-S leaves the installed packages out: our programs need none, and to look through them takes half of the start."""
# Reads "<length>\n<that many bytes of Python>" from standard input and runs it; the rest of the input is its request.
# The folder that it starts in, most often the home folder, is no place for modules: a person's json.py may lie there.
_BOOTSTRAP = (
    "import sys;sys.path=[p for p in sys.path if p];import signal;signal.alarm(%d);"
    "i=sys.stdin.buffer;exec(compile(i.read(int(i.readline())),sys.argv[1],sys.argv[2]))"
)


def join(argv: Sequence[str]) -> str:
    """A POSIX shell line that passes exactly these arguments."""
    return shlex.join(argv)


def typed(argv: Sequence[str]) -> str:
    """The same as a person would type it: `~/` at the beginning of a word stays the home folder."""
    return " ".join(f"~/{shlex.quote(word[2:])}" if word.startswith("~/") else shlex.quote(word) for word in argv)


def python_on_stdin(python: str, program: str, *, activates: bool = False) -> str:
    """The shell line that starts `python` on a program sent on standard input.

    python: a path or name, `~/` allowed at its start. program: a name for tracebacks and `ps`. activates: whether
    standard input begins with a line of POSIX shell to run first (the inventory's `activate`, the one wanted piece of
    user shell); POSIX has `read` take that line and no byte more.
    """
    home, _, rest = python.partition("/")
    interpreter = f'"$HOME"/{shlex.quote(rest)}' if home == "~" and rest else shlex.quote(python)
    line = f"exec {interpreter} {_FLAGS} {shlex.quote(_BOOTSTRAP % ARRIVE_S)} {shlex.quote(program)} exec"
    line = _ACTIVATE + line if activates else line
    return line if not activates and home != "~" else f"exec sh -c {shlex.quote(line)}"
