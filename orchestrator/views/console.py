"""The two streams that a person reads, and the few ways to write on them.

Results go to standard output, everything else (progress, notices, errors) to standard error; colours only on a
terminal. Whatever is printed goes through `plain`: hosts have a say in nearly all of it, and nothing of theirs may
steer the terminal or be taken for markup.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.console import Console
from rich.text import Text

from orchestrator.errors import OrchError
from orchestrator.hosts.alike import together
from orchestrator.text import clean_lines


class _Out(Console):
    def on_broken_pipe(self) -> None:
        """rich would exit with 1 here; `cli` knows that a reader who has left is no error."""
        raise BrokenPipeError


if isinstance(sys.stdout, io.TextIOWrapper):  # where an encoding lacks a letter that a host printed, show a `?`
    sys.stdout.reconfigure(errors="replace")
# A pipe has no width: a table is not to be folded for it.
out = _Out(highlight=False, soft_wrap=True, width=None if sys.stdout and sys.stdout.isatty() else 200)
err = Console(stderr=True, highlight=False, soft_wrap=True)


def plain(text: object, style: str = "") -> Text:
    """Nothing in it is obeyed by the terminal or taken for markup; line breaks stay."""
    return Text(clean_lines(text), style)


def put(text: object) -> None:
    """A line of the result."""
    out.print(plain(text))


def say(text: str) -> None:
    """A line beside the result."""
    err.print(plain(text))


def warn(text: str, to: Console | None = None) -> None:
    (to or err).print(Text.assemble(("note:", "yellow"), " ", plain(text)))


def fail(message: str, remedy: str = "") -> None:
    """An error: what is wrong, then what to try."""
    for line in message.split("\n"):
        err.print(Text.assemble(("error:", "red"), " ", plain(line)))
    if remedy:
        err.print(Text.assemble("  ", ("try:", "bold"), " ", plain(remedy)))


def fail_each(errors: Iterable[OrchError]) -> None:
    """Each different one once, with the hosts that share it."""
    for error in together(errors):
        fail(error.message, error.remedy)


def print_json(value: Any) -> None:
    """The one document of `--json`, never coloured or wrapped."""
    print(json.dumps(value, indent=2))  # and not `write`: there may be no standard output


def print_json_line(value: Any) -> None:
    """One document of a stream of them, at once."""
    print(json.dumps(value), flush=True)


def print_answers(answers: Mapping[str, Any], words: Callable[[Any], str]) -> None:
    """One line a host with what it answered in words; then the errors."""
    for node, answer in answers.items():
        if not isinstance(answer, Exception):
            put(f"{node}: {words(answer)}")
    fail_each(answer for answer in answers.values() if isinstance(answer, OrchError))
