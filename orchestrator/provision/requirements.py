"""A requirements file, made fit for hosts that have none of this machine's files: takes a path, gives pip's lines.

    read_requirements(Path("requirements.txt"))     # Requirements(("einops>=0.7", "tqdm"), ())

Files that it names (`-r`, `-c`) are read along. What only this machine has (a path, `-e .`), what would have pip trust
a server without a certificate, and an address that holds a password are refused with file and line; pip itself fills
`${NAME}` in from the host's `env:`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import Mistake, UsageError
from orchestrator.hosts import grammar

MAX_BYTES, MAX_DEPTH = 1 << 20, 8
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s*=\s*|\s+|(?<=^-[rc]))(\S.*)")
_OPTION = re.compile(
    r"(-i|--index-url|--extra-index-url|-f|--find-links)(\s*=\s*|\s+)https?://\S+"
    r"|--(pre|prefer-binary|require-hashes|no-index)|--(no-binary|only-binary)(\s*=\s*|\s+)\S+"
)
_PASSWORD = re.compile(r"//[^/@\s]*:(?!\$\{)[^/@\s]+@")
_LOCAL = re.compile(r"[./~]|[A-Za-z]:\\|file:|\S+\.(whl|zip|tar\.gz)\b|.*@\s*(file:|[./~])", re.IGNORECASE)


@dataclass(frozen=True)
class Requirements:
    """Lines as pip reads them."""

    packages: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()


def read_requirements(path: Path) -> Requirements:
    """Raises UsageError with every mistake."""
    packages, constraints, mistakes = list[str](), list[str](), list[Mistake]()
    _read(path, packages, constraints, mistakes, ())
    if mistakes:
        raise UsageError("\n".join(str(mistake) for mistake in mistakes))
    if not packages:
        raise UsageError(f"{path}: names no package", "one a line, like tqdm or einops>=0.7")
    return Requirements(tuple(packages), tuple(constraints))


def _read(
    path: Path, lines: list[str], constraints: list[str], mistakes: list[Mistake], within: tuple[Path, ...]
) -> None:
    """within: the files that led here."""
    if path.resolve() in within or len(within) > MAX_DEPTH:
        mistakes.append(Mistake(str(path), 0, "names itself, or files too deep within files"))
        return
    for number, line in _lines(path):
        if include := _INCLUDE.fullmatch(line):
            into = constraints if include[1] in ("-c", "--constraint") else lines
            _read(path.parent / include[2].strip(), into, constraints, mistakes, (*within, path.resolve()))
        elif problem := _problem(line):
            mistakes.append(Mistake(str(path), number, problem))
        else:
            lines.append(line)


def _problem(line: str) -> str:
    """What is wrong with a line; "" where nothing is."""
    if _PASSWORD.search(line):
        return "an address holds a password; write ${NAME} in its place, and NAME under `env:` in the inventory"
    if line.startswith(("-e", "--editable")):
        return "an editable install is of this machine's files; `orch run --folder` ships code"
    if line.startswith("-"):
        return "" if _OPTION.fullmatch(line) else f"{grammar.show(line)} is not for hosts; leave it out"
    if _LOCAL.match(line) and "://" not in line.partition("file:")[0]:
        return f"{grammar.show(line)} is a file of this machine, and hosts have none of it; name a package or a URL"
    return ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered, without comments; a backslash at a line's end joins the next."""
    try:
        with open(path, "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "is not UTF-8 text"
        raise UsageError(f"{path}: {why}", "give the path of a requirements file, as pip reads it") from error
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: is larger than 1 MiB", "give the path of a requirements file, as pip reads it")
    held, begun = "", 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        begun = begun if held else number
        if line.endswith("\\"):
            held += line[:-1]
            continue
        whole, held = re.sub(r"(^|\s)#.*", "", held + line).strip(), ""
        if whole:
            yield begun, whole
