"""Expands node names like `gpu[01-16],v100*`. Pure.

Every name of a range must exist, so that a missing host is noticed. Callers check plain names.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

from orchestrator.errors import UsageError
from orchestrator.text import some

MOST_NAMES = 10_000
SHOWN = 12
_COMMA = re.compile(r",(?![^\[\]]*\])")
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def names_in(listed: str | None, known: Sequence[str], whose: str) -> list[str]:
    """Each name once, in order; empty if nothing was listed.

    whose: the owner of `known`, for messages. Raises UsageError for a wrong pattern or one without a match.
    """
    words = [word.strip() for word in _COMMA.split(listed or "")]
    found = [name for word in words if word for name in _names_of(word, known, whose)]
    if (listed or "").strip() and not found:
        raise UsageError(f"{listed!r} names no node of {whose}", _there_are(known))
    return list(dict.fromkeys(found))


def _names_of(word: str, known: Sequence[str], whose: str) -> list[str]:
    if word in known or not set("*?[]") & set(word):
        return [word]
    names = list(itertools.islice(without_brackets(word), MOST_NAMES + 1))
    if len(names) > MOST_NAMES:
        raise UsageError(f"{word} stands for more than {MOST_NAMES} names", _there_are(known))
    if not set("*?") & set(word):
        if missing := [name for name in names if name not in known]:
            raise UsageError(f"{word}: no {some(missing, 3)} in {whose}", _there_are(known))
        return names
    fits = re.compile("|".join(re.escape(name).replace(r"\*", ".*").replace(r"\?", ".") for name in names))
    if not (found := [name for name in known if fits.fullmatch(name)]):
        raise UsageError(f"{word} matches no node of {whose}", _there_are(known))
    return found


def without_brackets(word: str) -> Iterator[str]:
    """Raises UsageError."""
    parts = _BRACKETS.split(word)
    if any(set("[]") & set(part) for part in parts):
        raise UsageError(f"{word}: brackets do not match", "write a range like gpu[01-16] or gpu[1-4,8]")
    choices = [_numbers(word, part) if position % 2 else [part] for position, part in enumerate(parts)]
    for combined in itertools.product(*choices):
        yield "".join(combined)


def _numbers(word: str, listed: str) -> list[str]:
    """`01-03,7` as 01, 02, 03, 7. Raises UsageError."""
    numbers = list[str]()
    for part in listed.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(last) < int(first) or (len(last) < len(first)):
            raise UsageError(f"{word}: {part!r} is not a range", "write a range like gpu[01-16] or gpu[1-4,8]")
        if int(last) - int(first) >= MOST_NAMES:
            raise UsageError(f"{word} stands for more than {MOST_NAMES} names", "write a shorter range, or gpu*")
        numbers += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return numbers


def _there_are(known: Sequence[str]) -> str:
    return f"its nodes: {some(known, SHOWN)}"
