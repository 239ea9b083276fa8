"""Packs the files that a job ships: one folder as a reproducible tar, addressed by its SHA-256.

It takes the files that git would take, without likely secrets, and never a home folder.
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
from orchestrator.planning.variables import is_secret, left_out_words, refuse_home
from orchestrator.units import format_bytes, some

if TYPE_CHECKING:
    import pathspec


MAX_BYTES = 100 << 20
MAX_NAMED = 100


IMPORTS_TRAINER = re.compile(rb"^[ \t]*(?:import\b[^#\n]*(?<![\w.])trainer\b|from[ \t]+trainer\b)", re.MULTILINE)


MISSING = re.compile(r"No such file or directory: '(?P<path>[^']{1,4096})'|No module named '(?P<module>[\w.]{1,400})'")


def trainer_folder() -> Path:
    """Raises UsageError if the package is not installed."""
    found = importlib.util.find_spec("trainer")
    if found is None or found.origin is None:
        raise UsageError("the trainer package is not installed next to orch", "install this project again")
    return Path(found.origin).parent


def pack_folder(folder: Path, *, prefix: str = "", trainer_at: str | None = None) -> tuple[CodeFolder, bytes]:
    """prefix: put before every file name. trainer_at: folder, with a final slash, for the package `trainer` if a file
    imports it and none lies there; None: never added.

    Raises UsageError for a missing or home folder, an unreadable file, and above MAX_BYTES.
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
    """Files of a packed folder; empty folders end with `/`."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as tar:  # ours: it is not compressed
        return [f"{member.name}/" if member.isdir() else member.name for member in tar]


def digests_in(blob: bytes) -> dict[str, str]:
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:") as tar:
        files = [(member.name, tar.extractfile(member)) for member in tar if member.isreg()]
        return {name: hashlib.sha256(content.read()).hexdigest() for name, content in files if content}


def _unexpected_words(wanted: WantedFiles) -> str:
    unexpected = [f"{name} ({why})" for name, why in wanted.left_out if why != "ignored"]
    return f"not shipped: {some(unexpected, 5)}" if unexpected else ""


def unsent_words(code: CodeFolder, line: str) -> str:
    """Why the file or module that this log line misses was not shipped; "" if unknown."""
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
    """Whether a file imports `trainer` and that module is missing."""
    if any(name == f"{at}trainer.py" or name.startswith(f"{at}trainer/") for name in files):
        return False
    return any(IMPORTS_TRAINER.search(path.read_bytes()) for name, path in files.items() if name.endswith(".py"))


def _tar(files: Mapping[str, Path], folders: Sequence[str] = ()) -> bytes:
    """files: by name in the tar. folders: empty ones."""
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


# Selection of files: all that git would take in a repository, without the patterns in `.orchignore`, plus its `!`
# lines. Git reads .gitignore files above and below the folder, .git/info/exclude and the user's excludes. Without a
# repository, or if git fails, only ignore files from the repository's root down are read.

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
WORK = ".orch-work"
"""Marks a host's work folder, which holds what other jobs have shipped."""
LeftOut = Literal[
    "ignored",
    "link that leads outside or nowhere",
    "link to what is left out",
    "submodule that is not checked out",
    "no file",
]


@dataclass(frozen=True)
class WantedFiles:
    """Names are relative, with `/`, sorted."""

    names: tuple[str, ...]
    named: frozenset[str]
    """Listed exactly by a `!` line of an .orchignore."""
    note: str = ""
    links: Mapping[str, str] = field(default_factory=dict)
    """Files reached by a link within the folder, and the names of their content."""
    empty: tuple[str, ...] = ()
    left_out: tuple[tuple[str, LeftOut], ...] = ()
    """Without caches and the like; folders end with `/`."""


def wanted_files(folder: Path) -> WantedFiles:
    """A link to a shipped file within the folder is shipped as that file."""
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
    work = tuple(name.removesuffix(WORK) for name in found if name.endswith(f"/{WORK}"))
    kept, others = set[str](), list[str]()
    for name in found:
        if work and name.startswith(work):
            continue
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
        tuple(
            sorted(name for name in empty if rules.take(name, above_too=True) and not (work and name.startswith(work)))
        ),
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
    """others: links and special files; git may also list files that no longer exist."""
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
    """Ignore files, each for its own folder and below; the deepest match decides."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._layers: list[tuple[str, str, pathspec.GitIgnoreSpec]] = []
        """Path from the layer's folder down to ours, path from ours down to it, patterns."""
        self._read = set[Path]()
        self._folders: dict[str, bool] = {}
        self.named = set[str]()
        self.named_any = False
        self.left = list[str]()

    def add(self, base: Path, lines: Iterable[str]) -> None:
        import pathspec  # slow to import, and needed only by commands that ship a folder

        if lines := list(lines):
            spec = pathspec.GitIgnoreSpec.from_lines(lines)
            self._layers.append((_down(base, self._folder), _down(self._folder, base), spec))

    def read(self, base: Path, *names: str) -> None:
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
        """name: of a folder, ends with `/`. above_too: also check the folders above it."""
        if above_too and not self._takes_folder(_above(name)):
            return False
        return self._decided(name) is not False

    def takes_back(self, name: str) -> bool:
        for folder in reversed(Path(name).parents):
            self.read(self._folder / folder, OURS)
        return self._decided(name) is True

    def _decided(self, name: str) -> bool | None:
        for above, below, spec in reversed(self._layers):
            if name.startswith(below) and name != below:
                decided = spec.check_file(above + name.removeprefix(below))
                if decided.include is not None:
                    return not decided.include
        return None

    def _takes_folder(self, name: str) -> bool:
        """Checks its parents, too, and reads its ignore file. name: ends with `/`; "" is the whole folder."""
        if name not in self._folders:
            self._folders[name] = not name or (self._takes_folder(_above(name)) and self.take(name))
            if self._folders[name]:
                self.read(self._folder / name, OURS)
        return self._folders[name]


def _down(top: Path, folder: Path) -> str:
    """With a final `/`; "" if it is not below."""
    return f"{folder.relative_to(top).as_posix()}/" if folder != top and folder.is_relative_to(top) else ""


def _above(name: str) -> str:
    """The parent, with a final `/`; "" at the top."""
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
    """`.git` is a folder, or a file in a worktree or submodule."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)


def _from_to(top: Path, folder: Path) -> list[Path]:
    return [above for above in reversed((folder, *folder.parents)) if above.is_relative_to(top)]


def _is_ignored(repository: Path, folder: Path) -> bool:
    """Whether the repository excludes this whole folder: then its ignore files do not apply inside."""
    rules = _Rules(repository)
    for above in _from_to(repository, folder):
        if above != repository and not rules.take(f"{above.relative_to(repository).as_posix()}/"):
            return True
        rules.read(above, GITS)
    return False


# ---- git ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Listed:
    """Names of folders end with `/`."""

    names: list[str]
    ignored: list[str]
    """A fully ignored folder stands for its content."""
    absent: list[str]
    """Submodules that are not checked out."""
    empty: list[str]
    ignored_files: Callable[[], list[str]]


def _listed_by_git(folder: Path) -> tuple[_Listed | None, str]:
    """Git's listing; None, with the reason, if git fails."""
    listing = partial(_names_of, folder)
    try:
        if git(folder, "check-ignore", "-q", ".", timeout_s=LISTING_S).returncode == 0:
            return None, ""  # the repository excludes this folder as a whole, so its rules do not apply inside
        answer = git(folder, "ls-files", "-z", "-co", "--exclude-standard", timeout_s=LISTING_S)
        if answer.returncode:
            error = answer.stderr.decode(errors="replace")
            whose = "the repository belongs to another user (safe.directory)"
            why = whose if "dubious" in error else "git cannot read it"
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


# Git calls that run nothing from a repository's own configuration. Failures give None: no command depends on git.

LISTING_S = 60.0
ANSWER_S = 10.0
_GIT = ("git", "-c", "core.fsmonitor=false", "-c", "core.untrackedCache=false", "-c", "protocol.allow=never")
"""A repository's configuration may name programs to run, and servers to fetch from."""


def git(folder: Path, *words: str, timeout_s: float = ANSWER_S) -> subprocess.CompletedProcess[bytes]:
    """Raises FileNotFoundError without git, subprocess.TimeoutExpired if it is too slow."""
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
    """None without a repository, a commit or git."""
    try:
        head = git(folder, "rev-parse", "--verify", "-q", "HEAD^{commit}")
        commit = head.stdout.decode(errors="replace").strip()
        if head.returncode or not re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", commit):
            return None
        if git(folder, "check-ignore", "-q", ".").returncode == 0:
            return (
                None  # an environment inside somebody's project, for example: the commit does not contain this folder
            )
        return Commit(id=commit, dirty=_is_dirty(folder))
    except (OSError, subprocess.TimeoutExpired):
        return None


def _is_dirty(folder: Path) -> bool | None:
    """None if git would have to run programs from the repository's configuration (clean filters)."""
    settings = git(folder, "config", "--show-scope", "--name-only", "-z", "--get-regexp", "^filter\\.")
    scopes = settings.stdout.split(b"\0")[:-1:2]
    if settings.returncode not in (0, 1) or {b"local", b"worktree"} & set(scopes):
        return None
    options = ("--porcelain", "--no-renames", "--ignore-submodules=dirty", "--untracked-files=normal")
    answer = git(folder, "status", *options, "--", ".")
    return None if answer.returncode else bool(answer.stdout)
