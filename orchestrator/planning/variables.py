"""Reads a job's environment variables from `--env` and `--env-file`, and recognises secrets and secret files.

Precedence, highest first: `--env`, later files, earlier files, the inventory's `env`. A name without a value takes it
from this machine's environment, which keeps secrets off command lines. Files have lines as for python-dotenv and
docker compose, optionally after `export`:

    LR=0.1                      # a comment needs a blank before it
    PATTERN='as ${it} stands'   # single quotes: literal
    LINES="one\\ntwo"            # double quotes: \\n, \\t, \\", \\\\ and \\$
    HF_TOKEN                    # from this environment

Quoted values may span lines. `${HOME}` outside single quotes is a mistake, since nothing is expanded. Messages show no
values, which may be secrets.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import Mistake, UsageError
from orchestrator.hosts import grammar

if TYPE_CHECKING:
    import pathspec


MAX_BYTES = 1 << 20
_ENTRY = re.compile(
    r"""[ \t]*(?:export[ \t]+)?(?P<name>[^\s=\#'"]+)[ \t]*
        (?P<given>=[ \t]*(?:'(?P<single>[^']*)'|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<plain>(?!['"])[^\n]*?)))?
        [ \t]*(?:(?<=[\s'"])\#[^\n]*)?(?:\n|\Z)""",
    re.VERBOSE | re.DOTALL,
)
_EMPTY = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r"}
_FORM = "expected NAME=value, only NAME, or a # comment"

_OF_TORCHRUN = "torchrun sets it, for each rank another"
_OF_PLAN = "the plan sets it, for each host another; `interface:` of a node in the inventory changes it"
_OF_LOCKS = "the plan sets it: the GPUs that this job has to itself; `gpus:` and `ranks:` in the inventory change it"
RESERVED = {
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_.*": _OF_TORCHRUN,
    r"(NCCL|GLOO)_SOCKET_IFNAME": _OF_PLAN,
    r"CUDA_(VISIBLE_DEVICES|DEVICE_ORDER)": _OF_LOCKS,
    r"ORCH_.*": "orch sets variables of such names itself",
}


def read_variables(given: Mapping[str, str | None], files: Sequence[str], own: Mapping[str, str]) -> dict[str, str]:
    """given: None means the value in `own`, this process's environment. Raises UsageError with all mistakes."""
    variables, mistakes = dict[str, str](), list[Mistake]()
    for file in map(Path, files):
        for line, name, value in _entries(file, _text(file), mistakes):
            _take(variables, Mistake(str(file), line, name), value, own, mistakes)
    for name, value in given.items():
        _take(variables, Mistake("--env", 0, name), value, own, mistakes)
    if mistakes:
        raise UsageError("\n".join(str(mistake) for mistake in mistakes))
    return variables


def refuse_secret_words(typed: Sequence[str]) -> None:
    """typed: NAME or NAME=VALUE. Raises UsageError for a likely secret."""
    for name, equals, value in (item.partition("=") for item in typed):
        if equals and (names_secret(name) or shows_secret(value)):
            raise UsageError(
                f"--env {grammar.show(name)} looks like a secret, and every user of this machine can read a command "
                "line",
                f"export it and give only its name (`--env {name}`), or write it into an --env-file",
            )


def _take(
    variables: dict[str, str], place: Mistake, value: str | None, own: Mapping[str, str], mistakes: list[Mistake]
) -> None:
    name = place.message
    try:
        grammar.env_name(name)
        if value is None and name not in own:
            raise ValueError("is given without a value, and is not in this machine's environment")
        variables[name] = grammar.env_value(own[name] if value is None else value)
        if why := next((why for pattern, why in RESERVED.items() if re.fullmatch(pattern, name)), None):
            raise ValueError(f"cannot be given: {why}")
    except ValueError as error:
        words = f"{error}" if str(error).startswith("'") else f"{grammar.show(name)} {error}"
        mistakes.append(Mistake(place.file, place.line, words))


def _text(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "--env-file takes a file of NAME=value lines") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file}: is not UTF-8 text", "--env-file takes a file of NAME=value lines") from error
    if len(content) > MAX_BYTES or "\0" in text:
        raise UsageError(f"{file}: is not a file of variables (a NUL byte, or more than 1 MiB)", "choose another file")
    return text.replace("\r\n", "\n")


def _entries(file: Path, text: str, mistakes: list[Mistake]) -> Iterator[tuple[int, str, str | None]]:
    """(line, name, value) tuples; value is None for only a name. Malformed lines become mistakes."""
    position, line = 0, 1
    while position < len(text):
        entry = _EMPTY.match(text, position) or _ENTRY.match(text, position)
        end = entry.end() if entry else (text.find("\n", position) + 1 or len(text))
        if entry is None:
            quoted = re.match(r"[^\n]*=[ \t]*['\"]", text[position:end])
            why = "a quote that never ends, or words behind it" if quoted else _FORM
            mistakes.append(Mistake(str(file), line, why))
        elif entry.re is _ENTRY:
            if "${" in _expandable(entry):
                why = f"{entry['name']}: `${{...}}` is not expanded; write the value out, or use single quotes"
                mistakes.append(Mistake(str(file), line, why))
            else:
                yield line, entry["name"], _value(entry)
        line += text.count("\n", position, end)
        position = end


def _expandable(entry: re.Match[str]) -> str:
    return re.sub(r"\\.", "", entry["double"] or entry["plain"] or "")


def _value(entry: re.Match[str]) -> str | None:
    if entry["given"] is None:
        return None
    if entry["double"] is not None:
        return re.sub(r"\\(.)", lambda escape: _ESCAPES.get(escape[1], escape[1]), entry["double"], flags=re.DOTALL)
    return str(entry["plain"] if entry["single"] is None else entry["single"])


# Recognises files and words that look like secrets, and home folders: none of them is sent to hosts.
#
# A line `!certs/a.pem` in `.orchignore` sends that file nevertheless.

LOGINS = (
    *(".ssh/", ".gnupg/", ".aws/", ".azure/", ".kube/", ".config/gcloud/", ".config/gh/", ".password-store/"),
    *(".netrc", "_netrc", ".git-credentials", ".pgpass", ".my.cnf", ".pypirc", ".vault-token", "kubeconfig"),
    *(".npmrc", ".htpasswd", ".s3cfg", ".boto", ".dockercfg", ".databrickscfg", ".terraformrc"),
    *(".docker/config.json", ".huggingface/token", ".cache/huggingface/token", ".kaggle/kaggle.json", "kaggle.json"),
    *(".env", ".env.*", "*.env", ".envrc", "!.env.example", "!.env.sample", "!.env.template", "!.env.dist"),
    *("id_rsa", "id_dsa", "id_ecdsa", "id_ed25519", "id_ecdsa_sk", "id_ed25519_sk"),
    *("credentials.json", "client_secret*.json", "service[-_]account*.json"),
    *("secret.yaml", "secret.yml", "secrets.yaml", "secrets.yml", "secrets.json", "secrets.toml"),
)
KEYS = ("*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks", "*.keystore", "*.kdbx")
"""These are keys among code; a data set may contain other files of such names."""
_PRIVATE_KEY = re.compile(rb"\s*(-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-)")
_SHOWN = 5


def is_secret(folder: Path, name: str, names: tuple[str, ...] = (*LOGINS, *KEYS)) -> bool:
    """Checks the name and the first bytes. name: relative to the folder. Raises OSError if unreadable."""
    if _is_named_so(name, names):
        return True
    with open(folder / name, "rb") as content:
        return bool(_PRIVATE_KEY.match(content.read(256)))


@lru_cache(maxsize=4096)  # planning several jobs packs a folder repeatedly
def _is_named_so(name: str, names: tuple[str, ...]) -> bool:
    return _patterns(names).match_file(name.lower())


@cache
def _patterns(names: tuple[str, ...]) -> pathspec.GitIgnoreSpec:
    import pathspec  # slow to import, and needed only by commands that ship a folder

    return pathspec.GitIgnoreSpec.from_lines(names)


def refuse_home(folder: Path, what: str) -> None:
    """Raises UsageError for the user's home folder and its parents. what: the remedy."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for own in {home.resolve(), Path.home().resolve()}:
        if own.is_relative_to(folder.resolve()):
            raise UsageError(f"{folder.resolve()} is your home folder, or holds it: it is never sent to hosts", what)


def left_out_words(names: Sequence[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = f"{', '.join(names[:_SHOWN])}{more}"
    return (
        f"left out: {shown}; what looks like a secret stays here (a line `!{names[0]}` in .orchignore sends that file)"
    )


# Words that look like secrets: names of options and variables, and forms of widespread keys. Pure.

_NAME = re.compile(
    r"-{0,2}([\w.-]*[._-])?(passw(or)?d|secret([_-]access)?([_-]key)?|(api|access|private|auth)[_-]?key"
    r"|(hf|auth|access|api|bearer|github|hub|wandb)[_-]?token)|--token",
    re.IGNORECASE,
)
_VARIABLE = re.compile(r"([A-Z0-9_]*_)?(TOKEN|SECRET|PASSPHRASE|CREDENTIALS?)")
_VALUE = re.compile(
    r"\b(hf_[A-Za-z0-9]{30,}|gh[pousr]_[A-Za-z0-9]{30,}|sk-[A-Za-z0-9_-]{32,}|AKIA[0-9A-Z]{16})\b"
    r"|-BEGIN [A-Z ]*PRIVATE KEY-"
)


def names_secret(word: str) -> bool:
    """Excludes e.g. --pad-token and TOKENIZERS_PARALLELISM."""
    return bool(_NAME.fullmatch(word) or _VARIABLE.fullmatch(word))


def shows_secret(text: str) -> bool:
    return bool(_VALUE.search(text))
