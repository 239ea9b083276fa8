"""Recognises files and words that look like secrets, and home folders: none of them is sent to hosts.

A line `!certs/a.pem` in `.orchignore` sends that file nevertheless.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.errors import UsageError

if TYPE_CHECKING:
    import pathspec


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
