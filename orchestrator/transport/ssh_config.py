"""Reads the person's SSH configuration for a host.

    found = settings("v100", user=None, port=2222)
    found["identityfile"][0].value, found["identityfile"][0].origin      # "~/.ssh/rack", "/home/me/.ssh/config:4"

`ssh -G` (5 ms) decides which settings apply. Without ssh, or if it is too old for a `Match` criterion, this module's
reader does: it supports Host, Include and criteria that need no facts of this machine; other blocks are skipped and
noted. The reader also finds a setting's file and line, and the configuration's hosts. Values are raw: `Tokens` replaces
`%h`, `~` and `${VAR}`.
"""

from __future__ import annotations

import errno
import functools
import getpass
import glob
import os
import pwd
import re
import shlex
import shutil
import socket
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.errors import UsageError
from orchestrator.transport.deadline import Deadline
from orchestrator.units import fits, one_line

ASK_S = 60  # `Match exec` and CanonicalizeHostname make ssh wait for other programs and name servers
_AT_ONCE = 8
_MAX_INCLUDES = 16  # the same depth as in OpenSSH
_SYSTEM = Path("/etc/ssh/ssh_config")
_MANY = {"identityfile", "certificatefile"}
_EITHER = {"proxyjump": "proxycommand", "proxycommand": "proxyjump"}  # only the first of the two counts
_NO_DEFAULT = {"user", "identityfile", "userknownhostsfile", "globalknownhostsfile"}
_LINE = re.compile(r"\s*([A-Za-z0-9]+)(?:\s*=\s*|\s+|$)(.*)", re.DOTALL)

ASKS = "ORCH_ASKS"
"""An environment variable that makes ssh skip `orch ssh-config --keep`'s own entries."""

_asking = threading.Semaphore(_AT_ONCE)


@dataclass(frozen=True)
class Setting:
    words: tuple[str, ...]
    file: str = ""
    line: int = 0

    @property
    def value(self) -> str:
        return " ".join(self.words)

    @property
    def origin(self) -> str:
        return f"{self.file}:{self.line}" if self.line else "the SSH configuration"


Settings: TypeAlias = Mapping[str, Sequence[Setting]]
"""By lower-case keyword. Only what is set: ssh's defaults are missing."""


@dataclass(frozen=True)
class Alias:
    name: str
    file: str
    line: int  # of its `Host` line
    options: Mapping[str, Any]  # its settings by lower-case keyword: text, or a list of files for IdentityFile
    problem: str = ""  # why it cannot be used


def config_files(path: Path | None = None) -> list[Path]:
    """`path`, or $ORCH_SSH_CONFIG, or ~/.ssh/config and the system's."""
    chosen = path or os.environ.get("ORCH_SSH_CONFIG")
    if chosen:
        return [Path(chosen).expanduser()]
    return [file for file in (Path.home() / ".ssh/config", _SYSTEM) if file.exists()]


def settings(
    host: str,
    *,
    user: str | None,
    port: int | None,
    direct: bool = False,
    path: Path | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Settings:
    """Settings for `host`. user, port: decided already. direct: without ProxyJump and ProxyCommand. note: called with
    ignored parts.

    Raises UsageError for an unreadable or invalid file, ValueError with ssh's message for a problem of this host only.
    """
    if host.startswith("-"):
        raise ValueError("a host's name does not begin with a dash")
    words = [word for flag, value in (("-l", user), ("-p", port)) if value for word in (flag, str(value))]
    asked = _ask_ssh((*words, *(("-o", "ProxyJump=none") if direct else ()), "--", host), path)
    if asked is None:
        reading = _read(host, user, port, direct, path)
        for line in reading.left_out:
            note(line)
        return reading.found
    try:
        reading = _read(host, user, port, direct, path)
    except UsageError:  # ssh has read it, so our reader is wrong
        reading = _Reading(host, user or getpass.getuser())
    usual = _usual()
    return {
        keyword: [reading.setting(keyword, value) for value in values]
        for keyword, values in asked.items()
        if not (keyword in _NO_DEFAULT and keyword not in reading.found and values == usual.get(keyword))
    }


def aliases(path: Path | None = None) -> Iterator[Alias]:
    """Each host named by a `Host` line without a pattern, with its settings. Raises UsageError."""
    for name, (file, line) in _read("", None, None, False, path).hosts.items():
        if not set("*?!") & set(name):
            found = _read(name, None, None, False, path).found
            try:
                yield Alias(name, file, line, _options(name, found))
            except ValueError as error:
                yield Alias(name, file, line, {}, str(error))


def left_out(path: Path | None = None) -> list[str]:
    """Blocks that only ssh can evaluate. Raises UsageError."""
    return _read("", None, None, False, path).left_out


def _options(name: str, found: Settings) -> dict[str, Any]:
    values: dict[str, Any] = {keyword: one[0].value for keyword, one in found.items()}
    values["hostname"] = values.get("hostname", name)
    tokens = Tokens(name, values["hostname"], values.get("port", "22"), values.get("user") or getpass.getuser())
    if "identityfile" in found:
        values["identityfile"] = [tokens.expand("IdentityFile", one) for one in found["identityfile"]]
    return {keyword: value for keyword, value in values.items() if (keyword, value) != ("proxycommand", "none")}


@dataclass(frozen=True)
class Tokens:
    name: str  # as the person wrote it
    host: str
    port: str
    user: str
    alias: str = ""

    def expand(self, keyword: str, setting: Setting, *, file: bool = True) -> str:
        """The value with `%h`, and in a file name `~` and `${VAR}`, replaced. Raises ValueError naming the setting."""

        def replaced(match: re.Match[str]) -> str:
            token, variable = match[1], match[2]
            value = os.environ.get(variable) if variable else values.get(token)
            if value is None:
                what = f"${{{variable}}} is not set" if variable else f"orch does not support %{token}"
                raise ValueError(f"{keyword} {setting.value} ({setting.origin}): {what}")
            return value

        short = socket.gethostname()
        here = {
            "u": getpass.getuser(),
            "d": str(Path.home()),
            "i": str(os.getuid()),
            "l": short,
            "L": short.partition(".")[0],
        }
        there = {"h": self.host, "n": self.name, "p": self.port, "r": self.user, "k": self.alias or self.name}
        values = {"%": "%", **here, **there}
        text = re.sub(r"%(.?)|\$\{(\w+)\}" if file else r"%(.?)()", replaced, setting.value)
        return os.path.expanduser(text) if file else text


# ---- asking ssh -----------------------------------------------------------------------------------------------------


def _ask_ssh(words: Sequence[str], path: Path | None) -> dict[str, list[str]] | None:
    program, chosen = shutil.which("ssh"), path or os.environ.get("ORCH_SSH_CONFIG")
    if not program or not config_files(path) or not (chosen or _is_own_home()):
        return None
    file = ("-F", str(Path(chosen).expanduser())) if chosen else ()
    # Our own queue and programs that the configuration starts are not the host's fault.
    with Deadline(0).paused(), _asking:
        return _run_ssh((program, *file, "-TG", *words))


@functools.lru_cache(maxsize=1)
def _usual() -> dict[str, list[str]]:
    return _run_ssh((shutil.which("ssh") or "ssh", "-F", "none", "-TG", "--", "nobody")) or {}


def _run_ssh(argv: Sequence[str]) -> dict[str, list[str]] | None:
    with tempfile.TemporaryFile() as said:  # a pipe would also wait for processes that a `Match exec` left running
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": said}
        try:
            done = subprocess.run(argv, **streams, env={**os.environ, ASKS: "1"}, timeout=ASK_S, check=False)
        except subprocess.TimeoutExpired:
            raise ValueError(f"`ssh -G` took over {ASK_S} s: look at `Match exec` there") from None
        said.seek(0)
        complaint = said.read(1 << 16).decode(errors="replace")
    if done.returncode:
        _complained(complaint)
        return None
    found: dict[str, list[str]] = {}
    for line in done.stdout.decode(errors="surrogateescape").splitlines():
        keyword, _, value = line.partition(" ")
        found.setdefault(keyword.lower(), []).append(value)
    return found


def _complained(text: str) -> None:
    # Raises ssh's error about the configuration; returns if this ssh cannot evaluate it.
    if re.search("No user exists for uid|^usage:|Unsupported Match attribute", text, re.MULTILINE):
        return
    about_file = re.search(r"^.*(line \d+|config file|owner or permissions).*$", text, re.MULTILINE | re.IGNORECASE)
    if about_file:
        raise UsageError(one_line(about_file[0], 300), "mend that; `ssh` refuses this configuration, too")
    raise ValueError(one_line(text, 300) or "ssh -G failed")


def _is_own_home() -> bool:
    # ssh ignores $HOME; True if it reads the same ~/.ssh/config.
    try:
        return Path.home() == Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return False


# ---- reading --------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """One pass over the files for one host. found: applicable settings; written: all settings."""

    host: str
    user: str
    original: str = ""
    base: Path = field(default_factory=lambda: Path.home() / ".ssh")
    final: bool = False
    wants_final: bool = False
    found: dict[str, list[Setting]] = field(default_factory=dict)
    written: dict[str, list[Setting]] = field(default_factory=dict)
    hosts: dict[str, tuple[str, int]] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)

    def setting(self, keyword: str, value: str) -> Setting:
        candidates: list[Setting] = [*self.found.get(keyword, []), *self.written.get(keyword, [])]
        for one in candidates:
            if value in (one.value, " ".join(os.path.expanduser(word) for word in one.words)):
                return one
            if keyword == "proxyjump" and re.sub(r"[\[\]]", "", value) == re.sub(r"[\[\]]", "", one.value):
                return one
        return Setting(tuple(value.split()) if keyword.endswith("knownhostsfile") else (value,))

    def read(self, file: Path, *, active: bool, never: bool = False, depth: int = 0) -> None:
        """active: lines before the first block apply. never: nothing in this file applies."""
        found = file.stat()
        for keyword, setting in _lines(file, found.st_mtime_ns, found.st_size):
            if keyword == "host":
                active = not never and _fits_any(setting.words, self.host)
                for word in setting.words:
                    self.hosts.setdefault(word, (setting.file, setting.line))
            elif keyword == "match":
                active = self._matches(setting.words, setting.origin) and not never
            elif keyword == "include":
                for included in self._included(setting.words) if depth < _MAX_INCLUDES else ():
                    self.read(included, active=active, never=never or not active, depth=depth + 1)
            else:
                self._take(keyword, setting, active)

    def _take(self, keyword: str, setting: Setting, active: bool) -> None:
        self.written.setdefault(keyword, []).append(setting)
        if active and _EITHER.get(keyword) not in self.found:
            known = self.found.setdefault(keyword, [])
            if not known or (keyword in _MANY and setting.value not in [one.value for one in known]):
                known.append(setting)

    def _matches(self, words: Sequence[str], where: str) -> bool:
        # Ends at the first false criterion, like ssh; later ones need no note.
        rest = list(words)
        while rest:
            criterion, _, value = rest.pop(0).partition("=")
            wanted, name = not criterion.startswith("!"), criterion.removeprefix("!").lower()
            if name == "all":
                holds = True
            elif name in ("final", "canonical"):
                self.wants_final |= name == "final"
                holds = self.final
            else:
                while rest and value in ("", "="):
                    value = rest.pop(0).removeprefix("=")
                subject = self._subject(name)
                if subject is None:
                    said = (
                        f"{where}: the block of `Match {name}` is left out: only a newer OpenSSH client can evaluate it"
                    )
                    self.left_out += [] if said in self.left_out else [said]
                    return False
                holds = _fits_any(value.split(","), subject)
            if holds is not wanted:
                return False
        return True

    def _subject(self, criterion: str) -> str | None:
        if criterion == "host":
            return self.hostname()
        if criterion == "user":
            return self.found["user"][0].value if "user" in self.found else self.user
        return {"originalhost": self.original, "localuser": getpass.getuser()}.get(criterion)

    def hostname(self) -> str:
        if "hostname" not in self.found:
            return self.host.lower()
        return self.found["hostname"][0].value.replace("%h", self.host).replace("%%", "%").lower()

    def _included(self, patterns: Sequence[str]) -> list[Path]:
        paths = [self.base / Path(pattern).expanduser() for pattern in patterns]
        return [Path(name) for path in paths for name in sorted(glob.glob(str(path))) if Path(name).is_file()]


def _read(host: str, user: str | None, port: int | None, direct: bool, path: Path | None) -> _Reading:
    # Like ssh: decided values first, then each file, and again if a block asks for a final pass.
    reading = _Reading(host, user or getpass.getuser(), host)
    for keyword, value in (("user", user), ("port", port), ("proxyjump", "none" if direct else None)):
        if value:
            reading.found[keyword] = [Setting((str(value),))]
    _read_files(reading, path)
    origin = reading.found.get("hostname", [Setting(())])[0]
    reading.host = reading.hostname()  # a HostName of the final pass comes too late
    if reading.wants_final:
        reading.final = True
        _read_files(reading, path)
        reading.found.pop("hostname", None)
    if origin.words:
        reading.found["hostname"] = [Setting((reading.host,), origin.file, origin.line)]
    return reading


def _read_files(reading: _Reading, path: Path | None) -> None:
    for file in config_files(path):
        reading.base = _SYSTEM.parent if file == _SYSTEM else Path.home() / ".ssh"
        _read_file(reading, file)


def _read_file(reading: _Reading, file: Path) -> None:
    try:
        reading.read(file, active=True)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise  # not the file's fault: `cli.common` suggests a remedy
        raise UsageError(f"{file}: {error.strerror}", "make the SSH configuration readable") from error
    except (ValueError, RuntimeError) as error:  # unclosed quotes, `~nobody`
        raise UsageError(f"{file}: {error}", "mend that line; `ssh -G HOST` shows what OpenSSH makes of it") from error


@functools.lru_cache(maxsize=64)
def _lines(file: Path, written_ns: int, size: int) -> tuple[tuple[str, Setting], ...]:
    found = []
    for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.match(line)
        try:
            words = _words(match[2]) if match else []
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
        if not match or not words:
            raise ValueError(f"line {number}: {line.strip()!r} is no setting with a value")
        found.append((match[1].lower(), Setting(words=tuple(words), file=str(file), line=number)))
    return tuple(found)


def _words(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.commenters = True, ""
    words = []
    for word in lexer:
        if word.startswith("#"):
            break
        words.append(word)
    return words


def _fits_any(patterns: Sequence[str], name: str) -> bool:
    if any(pattern.startswith("!") and fits(pattern[1:], name) for pattern in patterns):
        return False
    return any(not pattern.startswith("!") and fits(pattern, name) for pattern in patterns)
