"""The files a job takes along: one folder packed into one reproducible tar, addressed by its SHA-256.

What git would take (`wanted`), less what looks like a secret (`secret_files`), and never a home folder. The same files
give the same bytes on every machine: names sorted, times and owners left out.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import os
import re
import stat
import subprocess
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from orchestrator.errors import UsageError
from orchestrator.planning.launch_plan import CodeFolder, Commit
from orchestrator.planning.secret_files import is_secret, left_out_words, refuse_home
from orchestrator.text import some
from orchestrator.units import format_bytes

if TYPE_CHECKING:
    import pathspec


MAX_BYTES = 100 << 20
MAX_NAMED = 100
"""So many of the files left out are kept by name."""


IMPORTS_TRAINER = re.compile(rb"^[ \t]*(?:import\b[^#\n]*(?<![\w.])trainer\b|from[ \t]+trainer\b)", re.MULTILINE)


MISSING = re.compile(r"No such file or directory: '(?P<path>[^']{1,4096})'|No module named '(?P<module>[\w.]{1,400})'")
"""A line of Python's about a file or module that it does not find."""


def trainer_folder() -> Path:
    """Of the `trainer` package here. Raises UsageError where there is none."""
    found = importlib.util.find_spec("trainer")
    if found is None or found.origin is None:
        raise UsageError("the trainer package is not installed beside orch", "install this project again")
    return Path(found.origin).parent


def pack_folder(folder: Path, *, prefix: str = "", trainer_at: str | None = None) -> tuple[CodeFolder, bytes]:
    """The folder's description and its tar. prefix: a folder name put before every file name. trainer_at: where, with a
    slash at its end, the package `trainer` is laid that a file of the folder imports, unless one lies there; None:
    nowhere.

    Raises UsageError for a missing folder, for a home folder, for a file that cannot be read, and above MAX_BYTES,
    naming the largest files.
    """
    folder = folder.absolute()
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such folder", "name the folder that holds your script with --folder")
    refuse_home(folder, "make a folder for the script (`mkdir ~/project`) and run it there, or name one with --folder")
    wanted = wanted_files(folder)
    try:
        secret = [name for name in wanted.names if name not in wanted.named and is_secret(folder, name)]
        sources = {name: name for name in wanted.names} | dict(wanted.links)
        files = {name: source for name, source in sources.items() if source not in set(secret)}
        sizes = {name: (folder / source).stat().st_size for name, source in files.items()}
        _refuse_too_much(folder, sizes)
        content = {f"{prefix}{name}": folder / source for name, source in sorted(files.items())}
        if trainer_at is not None and _needs_trainer(content, trainer_at):
            ours = trainer_folder()
            content |= {f"{trainer_at}trainer/{name}": ours / name for name in wanted_files(ours).names}
        blob = _tar(content, [f"{prefix}{name}" for name in wanted.empty])
    except OSError as error:
        raise UsageError(
            f"{error.filename}: {error.strerror}", "make it readable, or name it in .orchignore to leave it at home"
        ) from error
    described = CodeFolder(
        sha256=hashlib.sha256(blob).hexdigest(),
        source=str(folder),
        files=len(content),
        size_bytes=sum(path.stat().st_size for path in content.values()),
        left_out=tuple(secret[:MAX_NAMED]),
        unsent=tuple((os.fsencode(name).decode(errors="replace"), why) for name, why in wanted.left_out[:MAX_NAMED]),
        notes=tuple(filter(None, (wanted.note, left_out_words(secret), _unexpected_words(wanted)))),
        commit=commit_of(folder),
    )
    return described, blob


def names_in(blob: bytes) -> list[str]:
    """The files of a packed folder; empty folders end with `/`."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as tar:  # ours: it is not compressed
        return [f"{member.name}/" if member.isdir() else member.name for member in tar]


def digests_in(blob: bytes) -> dict[str, str]:
    """The SHA-256 of each file of a packed folder."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as tar:
        files = [(member.name, tar.extractfile(member)) for member in tar if member.isreg()]
        return {name: hashlib.sha256(content.read()).hexdigest() for name, content in files if content}


def _unexpected_words(wanted: WantedFiles) -> str:
    """What a person would think is shipped; what an ignore file names is not among it."""
    unexpected = [f"{name} ({why})" for name, why in wanted.left_out if why != "ignored"]
    return f"not shipped: {some(unexpected, 5)}" if unexpected else ""


def unsent_words(code: CodeFolder, line: str) -> str:
    """Why the file or module that this line of an error log misses is not on the host, though it is here; "" if not."""
    found = MISSING.search(line)
    if not found:
        return ""
    path, module = found["path"] or "", (found["module"] or "").replace(".", "/")
    inside = path.rpartition("/src/")[2] if path.startswith("/") else path
    wanted = os.path.normpath(inside) if path else module
    for name, why in [*code.unsent, *((name, "it looks like a secret") for name in code.left_out)]:
        plain = name.rstrip("/")
        is_it = wanted == plain or (name.endswith("/") and wanted.startswith(name))
        is_module = module and re.fullmatch(rf"{re.escape(module.split('/')[0])}(/.*|\.py|\.[\w.-]*so|\.pyd)?", plain)
        if is_it or is_module:
            back = (
                f"; a line `!{plain}` in .orchignore ships it" if why in ("ignored", "it looks like a secret") else ""
            )
            return f"{plain} is in {code.source}, but was not shipped ({why}){back}"
    return ""


def _refuse_too_much(folder: Path, sizes: dict[str, int]) -> None:
    if sum(sizes.values()) <= MAX_BYTES:
        return
    largest = sorted(sizes, key=lambda file: -sizes[file])[:5]
    named = ", ".join(f"{file} ({format_bytes(sizes[file])})" for file in largest)
    raise UsageError(
        f"{folder} holds {format_bytes(sum(sizes.values()))} to ship, more than {format_bytes(MAX_BYTES)}; "
        f"the largest: {named}",
        "list what the job does not need in .orchignore",
    )


def _needs_trainer(files: Mapping[str, Path], at: str) -> bool:
    """Does one of these import `trainer`, and is none of them such a module?"""
    if any(name == f"{at}trainer.py" or name.startswith(f"{at}trainer/") for name in files):
        return False
    return any(IMPORTS_TRAINER.search(path.read_bytes()) for name, path in files.items() if name.endswith(".py"))


def _tar(files: Mapping[str, Path], folders: Sequence[str] = ()) -> bytes:
    """files: by their names in it. folders: those that hold nothing."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, path in files.items():
            content = path.read_bytes()
            info = tarfile.TarInfo(name)
            info.size = len(content)
            info.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            tar.addfile(info, io.BytesIO(content))
        for name in folders:
            info = tarfile.TarInfo(name.rstrip("/"))
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)
    return buffer.getvalue()


# Which files of a folder are to travel: what git would take in a repository, less what `.orchignore` names, and
# with what a `!` line there brings back.
#
#     files = wanted_files(Path("proj"))
#     files.names                 # ["train.py", "pkg/a.py", ...]
#     files.note                  # why git was not asked in a repository, if so
#
# git itself knows the .gitignore files above and below a folder, .git/info/exclude and the person's own excludes.
# Without
# a repository, or where git cannot answer, the ignore files from the repository's root on down are read here.

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
LeftOut = Literal[
    "ignored",
    "link that leads outside or nowhere",
    "link to what is left out",
    "submodule that is not checked out",
    "no file",
]


@dataclass(frozen=True)
class WantedFiles:
    """The files of a folder that are to be shipped. Names are relative, with `/`, sorted."""

    names: tuple[str, ...]
    named: frozenset[str]
    """Those that a `!` line of an .orchignore names exactly."""
    note: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    """Files that are reached by a link within the folder, with the name in `names` whose content they have."""
    empty: tuple[str, ...] = ()
    """Folders without anything in them."""
    left_out: tuple[tuple[str, LeftOut], ...] = ()
    """What of the folder stays here, and why; a folder's name ends with `/`. Caches and the like are not listed."""


def wanted_files(folder: Path) -> WantedFiles:
    """A link is shipped as what it leads to, if that lies in the folder and is shipped, too."""
    rules = _Rules(folder)
    rules.add(folder, ALWAYS_LEFT)
    always = _Rules(folder)
    always.add(folder, ALWAYS_LEFT)
    repository = _repository(folder)
    listed, note = _listed_by_git(folder) if repository else (None, "")
    if listed is None:
        for above in _from_to(repository, folder) if repository and not _is_ignored(repository, folder) else ():
            rules.read(above, GITS)
            exclude = above / ".git/info/exclude"
            rules.add(above, _lines(exclude))
        found = list(_walk(folder, folder, rules))
    else:
        found = [name for name in listed.names if rules.take(name, above_too=True)]
        found += [name for name in listed.ignored_files() if rules.takes_back(name)] if rules.named_any else []
    kept, others = set[str](), list[str]()
    for name in found:
        kept.add(name) if _is_plain(f"{folder}/{name.rstrip('/')}") else others.append(name)
    links, left_out = _resolved(folder, kept, [name for name in others if not name.endswith("/")])
    ignored = (name for name in (listed.ignored if listed else rules.left) if name.rstrip("/") not in kept)
    left_out += [(name, "ignored") for name in ignored if always.take(name)]
    left_out += [(name, "submodule that is not checked out") for name in (listed.absent if listed else ())]
    empty = listed.empty if listed else [name for name in others if name.endswith("/")]
    return WantedFiles(
        tuple(sorted(kept)),
        frozenset(rules.named),
        note,
        links,
        tuple(sorted(name for name in empty if rules.take(name, above_too=True))),
        tuple(sorted(left_out)),
    )


def _is_plain(path: str) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _resolved(
    folder: Path, kept: Collection[str], others: Iterable[str]
) -> tuple[dict[str, str], list[tuple[str, LeftOut]]]:
    """others: links, and what is neither a file nor a folder. What is there no more (git may list it) is no part."""
    links, left_out, top = dict[str, str](), list[tuple[str, LeftOut]](), os.path.realpath(folder)
    for name in others:
        path = f"{folder}/{name}"
        if not os.path.lexists(path):
            continue
        if not os.path.islink(path):
            left_out.append((name, "no file"))
            continue
        leads_to = os.path.relpath(os.path.realpath(path), top)
        outside = leads_to == "." or leads_to.split("/")[0] == ".." or not os.path.exists(path)
        inside = dict[str, str]()
        if leads_to in kept:
            inside = {name: leads_to}
        elif not outside and os.path.isdir(path):  # only then: all files are looked through
            below = (each for each in kept if each.startswith(f"{leads_to}/"))
            inside = {f"{name}/{each.removeprefix(f'{leads_to}/')}": each for each in below}
        links |= inside
        if not inside:
            left_out.append((name, "link that leads outside or nowhere" if outside else "link to what is left out"))
    return links, left_out


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
        self.named_any = False
        """Does an .orchignore have a `!` line?"""
        self.left = list[str]()
        """What a walk has met and left out."""

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
                self.named_any |= any(line.startswith("!") for line in lines)
                exact = (line[1:].strip().strip("/") for line in lines if line.startswith("!"))
                self.named |= {(base / name).relative_to(self._folder).as_posix() for name in exact if name}

    def take(self, name: str, *, above_too: bool = False) -> bool:
        """name: a folder's ends with `/`. above_too: whether a folder above it is left out was not asked before."""
        if above_too and not self._takes_folder(_above(name)):
            return False
        return self._decided(name) is not False

    def takes_back(self, name: str) -> bool:
        """Whether an .orchignore asks for this file, which git ignores."""
        for folder in reversed(Path(name).parents):
            self.read(self._folder / folder, OURS)
        return self._decided(name) is True

    def _decided(self, name: str) -> bool | None:
        """Whether it is taken, by the deepest layer that has a word for it; None if no layer has."""
        for above, below, spec in reversed(self._layers):
            if name.startswith(below) and name != below:
                decided = spec.check_file(above + name.removeprefix(below))
                if decided.include is not None:
                    return not decided.include
        return None

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
            if not rules.take(f"{name}/"):
                rules.left.append(f"{name}/")
            elif os.listdir(entry.path):
                yield from _walk(folder, Path(entry.path), rules)
            else:
                yield f"{name}/"
        elif rules.take(name):
            yield name
        else:
            rules.left.append(name)


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


@dataclass(frozen=True)
class _Listed:
    """What git says of a folder. A folder's name ends with `/`."""

    names: list[str]
    """Files, and links, that it has or does not ignore."""
    ignored: list[str]
    """A folder of which it ignores everything stands for what is in it."""
    absent: list[str]
    """Submodules whose files are not here."""
    empty: list[str]
    ignored_files: Callable[[], list[str]]
    """Each by itself, which may take long."""


def _listed_by_git(folder: Path) -> tuple[_Listed | None, str]:
    """What git has of this folder, and what of the rest it does not ignore; None, and why, where it cannot say."""
    listing = partial(_names_of, folder)
    try:
        if git(folder, "check-ignore", "-q", ".", timeout_s=LISTING_S).returncode == 0:
            return None, ""  # the repository leaves this folder out as a whole: it has no say inside
        answer = git(folder, "ls-files", "-z", "-co", "--exclude-standard", timeout_s=LISTING_S)
        if answer.returncode:
            said = answer.stderr.decode(errors="replace")
            whose = "the repository belongs to another user (safe.directory)"
            why = whose if "dubious" in said else "git cannot read it"
            return None, f"{why}: the .gitignore files of {folder} are read without git"
        ignored = listing("-o", "-i", "--exclude-standard", "--directory")
        untracked = listing("-o", "--exclude-standard", "--directory")
    except FileNotFoundError:
        return None, "git is not installed here: the .gitignore files are read without it"
    except subprocess.TimeoutExpired:
        return None, f"git did not answer within {LISTING_S:.0f} s: the .gitignore files are read without it"
    names, absent, empty = list[str](), list[str](), list[str]()
    for name in _split(answer.stdout):
        inside = f"{folder}/{name}"
        if not os.path.isdir(inside) or os.path.islink(inside):
            names.append(name)
        elif os.path.exists(f"{inside}/.git"):  # a submodule, or a repository within this one
            below = wanted_files(Path(inside))
            names += [f"{name.rstrip('/')}/{each}" for each in (*below.names, *below.links)]
        else:
            absent.append(f"{name.rstrip('/')}/")
    for name in untracked:
        if name.endswith("/"):
            walked = os.walk(f"{folder}/{name}")
            empty += [f"{os.path.relpath(at, folder)}/" for at, within, files in walked if not within and not files]
    empty = [name for name in empty if not any(name.startswith(each) for each in ignored if each.endswith("/"))]
    return _Listed(names, ignored, absent, empty, partial(listing, "-o", "-i", "--exclude-standard")), ""


def _names_of(folder: Path, *words: str) -> list[str]:
    return _split(git(folder, "ls-files", "-z", *words, timeout_s=LISTING_S).stdout)


def _split(answer: bytes) -> list[str]:
    return [name for name in answer.decode(errors="surrogateescape").split("\0") if name]


# What git says of a folder, asked so that nothing a repository's own configuration names is run.
#
#     commit_of(Path("proj"))         # Commit(id="3f2a...", dirty=True); None outside of a repository, or without git
#
# A repository of another owner, one that git cannot read, and one without a commit give None: git is asked for facts
# that are good to have, and no command fails for want of them.

LISTING_S = 60.0
ANSWER_S = 10.0
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false", "-c", "protocol.allow=never")
"""A repository's own configuration may name programs to run, and places to fetch from: none is needed here."""


def git(folder: Path, *words: str, timeout_s: float = ANSWER_S) -> subprocess.CompletedProcess[bytes]:
    """Raises FileNotFoundError where there is no git, subprocess.TimeoutExpired where it does not answer."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        [*_GIT, *words],
        cwd=folder,
        env={**environment, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0", "GIT_NO_LAZY_FETCH": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=timeout_s,
    )


def commit_of(folder: Path) -> Commit | None:
    """The commit that is checked out there, and whether the folder holds anything else than that commit does."""
    try:
        head = git(folder, "rev-parse", "--verify", "-q", "HEAD^{commit}")
        commit = head.stdout.decode(errors="replace").strip()
        if head.returncode or not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", commit):
            return None
        if git(folder, "check-ignore", "-q", ".").returncode == 0:
            return None  # an environment inside somebody's project, for example: the commit does not hold this folder
        return Commit(id=commit, dirty=_is_dirty(folder))
    except (OSError, subprocess.TimeoutExpired):
        return None


def _is_dirty(folder: Path) -> bool | None:
    """None where git cannot say without running what the repository's own configuration names (clean filters)."""
    settings = git(folder, "config", "--show-scope", "--name-only", "-z", "--get-regexp", "^filter\\.")
    scopes = settings.stdout.split(b"\0")[:-1:2]
    if settings.returncode not in (0, 1) or {b"local", b"worktree"} & set(scopes):
        return None
    options = ("--porcelain", "--no-renames", "--ignore-submodules=dirty", "--untracked-files=normal")
    answer = git(folder, "status", *options, "--", ".")
    return None if answer.returncode else bool(answer.stdout)
