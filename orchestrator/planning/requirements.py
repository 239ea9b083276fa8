"""Packages for hosts, from a requirements file or a project's lock file here, which hosts do not have.

    read_requirements(Path("requirements.txt"))         # Requirements(packages=("tqdm", "einops>=0.7"), ...)

Included files (`-r`, `-c`) are read too. Refused, with file and line: local packages, options that trust a server
without a certificate, addresses with a password. Pip fills in `${NAME}` from the host's `env:`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import Mistake, UsageError
from orchestrator.hosts import grammar
from orchestrator.units import one_line

MAX_BYTES, MAX_DEPTH = 1 << 20, 8
EXPORT_S = 60.0
_INCLUDE = re.compile(r"(-r|--requirement|-c|--constraint)(?:\s*=\s*|\s+|(?<=^-[rc]))(\S.*)")
_OPTION = re.compile(
    r"(-i|--index-url|--extra-index-url|-f|--find-links)(\s*=\s*|\s+)https?://\S+"
    r"|(-f|--find-links)(\s*=\s*|\s+)/\S+"
    r"|--(pre|prefer-binary|require-hashes|no-index)|--(no-binary|only-binary)(\s*=\s*|\s+)\S+"
)
_PASSWORD = re.compile(r"//[^/@\s]*:(?!\$\{)[^/@\s]+@")
_LOCAL = re.compile(r"[./~]|[A-Za-z]:\\|file:|\S+\.(whl|zip|tar\.gz)\b|.*@\s*(file:|[./~])", re.IGNORECASE)
_TORCH = re.compile(r"(torch|torchvision)(?![\w.-])", re.IGNORECASE)
_WITH_TORCH = re.compile(r"(torch|torchvision|triton|nvidia-[\w-]+)\s*==", re.IGNORECASE)
_ASKS_TORCH = re.compile(r"""["']torch(vision)?\s*([\[<>=!~;@ ]|["'])""")


@dataclass(frozen=True)
class Requirements:
    packages: tuple[str, ...] = ()
    constraints: tuple[str, ...] = ()

    @property
    def name_torch(self) -> bool:
        """Then the hosts' own torch need not stay."""
        return any(_TORCH.match(line) for line in self.packages)


def read_requirements(path: Path) -> Requirements:
    """Raises UsageError with all mistakes."""
    if path.name == "pyproject.toml":
        return _locked(path)
    packages, constraints, mistakes = list[str](), list[str](), list[Mistake]()
    _read(path, packages, constraints, mistakes, ())
    if mistakes:
        raise UsageError("\n".join(str(mistake) for mistake in mistakes))
    if not packages:
        raise UsageError(f"{path}: names no package", "one a line, like tqdm or einops>=0.7")
    return Requirements(tuple(packages), tuple(constraints))


def _locked(path: Path) -> Requirements:
    """A project with uv.lock, as uv exports it here. Raises UsageError."""
    uv = shutil.which("uv")
    if not (path.parent / "uv.lock").is_file() or uv is None:
        why = "uv is not installed here" if uv is None else "there is no uv.lock next to it"
        raise UsageError(f"{path}: {why}", "name a requirements file: `uv export --no-emit-project > requirements.txt`")
    argv = [uv, "export", "--frozen", "--no-emit-project", "--no-dev", "--no-hashes", "--no-annotate", "--no-header"]
    try:
        done = subprocess.run(argv, cwd=path.parent, capture_output=True, text=True, timeout=EXPORT_S)
    except subprocess.TimeoutExpired:
        raise UsageError(f"{path}: `uv export` took longer than {EXPORT_S:g} s", "look at what uv waits for") from None
    if done.returncode:
        raise UsageError(f"{path}: `uv export` failed: {one_line(done.stderr)}", "`uv lock` renews uv.lock")
    asks_torch = _ASKS_TORCH.search(path.read_text(encoding="utf-8", errors="replace"))
    lines = (line.strip() for line in done.stdout.splitlines())
    return Requirements(tuple(line for line in lines if line and (asks_torch or not _WITH_TORCH.match(line))))


def _read(
    path: Path, lines: list[str], constraints: list[str], mistakes: list[Mistake], within: tuple[Path, ...]
) -> None:
    """within: the including files."""
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
    if _PASSWORD.search(line):
        return "an address holds a password; write ${NAME} in its place, and NAME under `env:` in the inventory"
    if line.startswith(("-e", "--editable")):
        return "an editable install is of this machine's files; `orch run --folder` ships code"
    if line.startswith("-"):
        return "" if _OPTION.fullmatch(line) else f"{grammar.show(line)} is not for hosts; leave it out"
    if _LOCAL.match(line) and "://" not in line.partition("file:")[0]:
        return f"{grammar.show(line)} is a file of this machine, which hosts lack; name a package or a URL"
    return ""


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Numbered lines without comments; a trailing backslash joins the next line. Raises UsageError."""
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
