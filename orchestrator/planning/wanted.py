"""Which files of a folder are to travel: what git would take in a repository, less what `.orchignore` names.

    files = wanted_files(Path("proj"))
    files.names                 # ["train.py", "pkg/a.py", ...]
    files.note                  # why git was not asked in a repository, if so

git itself knows the .gitignore files above and below a folder, .git/info/exclude and the person's own excludes. Without
a repository, or where git cannot answer, the ignore files from the repository's root on down are read here.
"""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.planning.git import LISTING_S, git

if TYPE_CHECKING:
    import pathspec

ALWAYS_LEFT = (
    ".git",
    "__pycache__/",
    "*.pyc",
    ".venv/",
    "venv/",
    ".mypy_cache/",
    ".pytest_cache/",
    "node_modules/",
    "/runs/",
)
OURS, GITS = ".orchignore", ".gitignore"


@dataclass(frozen=True)
class WantedFiles:
    """The files of a folder that are to be shipped."""

    names: tuple[str, ...]
    """Relative, with `/`, sorted."""
    named: frozenset[str]
    """Those that a `!` line of an .orchignore names exactly."""
    note: str = ""


def wanted_files(folder: Path) -> WantedFiles:
    """Plain files only: what a link points to may not exist, or not be meant for another host."""
    rules = _Rules(folder)
    rules.add(folder, ALWAYS_LEFT)
    repository = _repository(folder)
    listed, note = _listed_by_git(folder) if repository else (None, "")
    if listed is None:
        for above in _from_to(repository, folder) if repository and not _is_ignored(repository, folder) else ():
            rules.read(above, GITS)
            exclude = above / ".git/info/exclude"
            rules.add(above, _lines(exclude))
        found = list(_walk(folder, folder, rules))
    else:
        found = [name for name in listed if rules.take(name, above_too=True)]
    plain = (name for name in found if _is_plain(f"{folder}/{name}"))
    return WantedFiles(tuple(sorted(set(plain))), frozenset(rules.named), note)


def _is_plain(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


class _Rules:
    """Ignore files, each for its own folder and what is below; the deepest that has a word for a name decides."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers: list[tuple[str, str, pathspec.GitIgnoreSpec]] = []
        """What leads from a layer's folder down to ours, or from ours down to it, and what it says."""
        self._read = set[Path]()
        self._folders: dict[str, bool] = {}
        """Those that were asked for as what a file lies in: are they taken?"""
        self.named = set[str]()

    def add(self, base: Path, lines: Iterable[str]) -> None:
        import pathspec  # slow to import, and of use to commands alone that ship a folder

        if lines := list(lines):
            spec = pathspec.GitIgnoreSpec.from_lines(lines)
            self._layers.append((_down(base, self._folder), _down(self._folder, base), spec))

    def read(self, base: Path, *names: str) -> None:
        """The ignore files of one folder, once."""
        for file in (base / name for name in names):
            if file in self._read:
                continue
            self._read.add(file)
            self.add(base, lines := _lines(file))
            if file.name == OURS and base.is_relative_to(self._folder):
                exact = (line[1:].strip().strip("/") for line in lines if line.startswith("!"))
                self.named |= {(base / name).relative_to(self._folder).as_posix() for name in exact if name}

    def take(self, name: str, *, above_too: bool = False) -> bool:
        """name: a folder's ends with `/`. above_too: whether a folder above it is left out was not asked before."""
        if above_too and not self._takes_folder(_above(name)):
            return False
        for above, below, spec in reversed(self._layers):
            if name.startswith(below) and name != below:
                decided = spec.check_file(above + name.removeprefix(below))
                if decided.include is not None:
                    return not decided.include
        return True

    def _takes_folder(self, name: str) -> bool:
        """With all that it lies in, and its ignore file read. name: with `/` at its end; "" is the whole."""
        if name not in self._folders:
            self._folders[name] = not name or (self._takes_folder(_above(name)) and self.take(name))
            if self._folders[name]:
                self.read(self._folder / name, OURS)
        return self._folders[name]


def _down(top: Path, folder: Path) -> str:
    """The way to a folder, with `/` at its end; "" to itself, and where it does not lie below."""
    return f"{folder.relative_to(top).as_posix()}/" if folder != top and folder.is_relative_to(top) else ""


def _above(name: str) -> str:
    """The folder that it lies in, with `/` at its end; "" at the top."""
    return name[: name.rstrip("/").rfind("/") + 1]


def _walk(folder: Path, here: Path, rules: _Rules) -> Iterator[str]:
    rules.read(here, GITS, OURS)
    for entry in sorted(os.scandir(here), key=lambda entry: entry.name):
        name = Path(entry.path).relative_to(folder).as_posix()
        if entry.is_dir(follow_symlinks=False):
            if rules.take(f"{name}/"):
                yield from _walk(folder, Path(entry.path), rules)
        elif rules.take(name):
            yield name


def _lines(file: Path) -> list[str]:
    return file.read_text(errors="replace").splitlines() if file.is_file() else []


def _repository(folder: Path) -> Path | None:
    """The folder with `.git` (a folder, or a file in a worktree or submodule) that this one is in."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)


def _from_to(top: Path, folder: Path) -> list[Path]:
    return [above for above in reversed((folder, *folder.parents)) if above.is_relative_to(top)]


def _is_ignored(repository: Path, folder: Path) -> bool:
    """Whether the repository leaves this whole folder out, by its ignore files alone: then it has no say inside."""
    rules = _Rules(repository)
    for above in _from_to(repository, folder):
        if above != repository and not rules.take(f"{above.relative_to(repository).as_posix()}/"):
            return True
        rules.read(above, GITS)
    return False


# ---- git ------------------------------------------------------------------------------------------------------


def _listed_by_git(folder: Path) -> tuple[list[str] | None, str]:
    """What git has of this folder, and what of the rest it does not ignore; None, and why, where it cannot say."""
    try:
        if git(folder, "check-ignore", "-q", ".", timeout_s=LISTING_S).returncode == 0:
            return None, ""  # the repository leaves this folder out as a whole: it has no say inside
        answer = git(folder, "ls-files", "-z", "-co", "--exclude-standard", timeout_s=LISTING_S)
    except FileNotFoundError:
        return None, "git is not installed here: the .gitignore files are read without it"
    except subprocess.TimeoutExpired:
        return None, f"git did not answer within {LISTING_S:.0f} s: the .gitignore files are read without it"
    if answer.returncode:
        said = answer.stderr.decode(errors="replace")
        why = "the repository belongs to another user (safe.directory)" if "dubious" in said else "git cannot read it"
        return None, f"{why}: the .gitignore files of {folder} are read without git"
    names = []
    for name in filter(None, answer.stdout.decode(errors="surrogateescape").split("\0")):
        inside = f"{folder}/{name}"
        if not os.path.isdir(inside) or os.path.islink(inside):
            names.append(name)
        elif os.path.exists(f"{inside}/.git"):  # a submodule, or a repository within this one
            below = wanted_files(Path(inside)).names
            names += [f"{name.rstrip('/')}/{each}" for each in below]
    return names, ""
