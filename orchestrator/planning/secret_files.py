"""Files that look like secrets: known by their names, or by beginning with a private key. They stay at home.

    is_secret(Path("proj"), "certs/a.pem")      # True
    refuse_home(Path.home())                    # UsageError: a home folder is never sent

What looks like one and is none is sent where a line of `.orchignore` names it exactly: `!certs/a.pem`.
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
"""Beside code these are keys; a data set may well hold something else under such a name."""
_PRIVATE_KEY = re.compile(rb"\s*(-----BEGIN [A-Z0-9 ]*PRIVATE KEY|PuTTY-User-Key-File-)")
_SHOWN = 5


def is_secret(folder: Path, name: str, names: tuple[str, ...] = (*LOGINS, *KEYS)) -> bool:
    """name: relative to the folder. Reads the file's beginning. Raises OSError where it cannot be read."""
    if _is_named_so(name, names):
        return True
    with open(folder / name, "rb") as content:
        return bool(_PRIVATE_KEY.match(content.read(256)))


@lru_cache(maxsize=4096)  # a folder is packed again and again where several jobs are planned
def _is_named_so(name: str, names: tuple[str, ...]) -> bool:
    return _patterns(names).match_file(name.lower())


@cache
def _patterns(names: tuple[str, ...]) -> pathspec.GitIgnoreSpec:
    import pathspec  # slow to import, and of use to commands alone that ship a folder

    return pathspec.GitIgnoreSpec.from_lines(names)


def refuse_home(folder: Path, what: str) -> None:
    """Raises UsageError for a person's home folder, and for a folder that holds it. what: where else to go."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    for own in {home.resolve(), Path.home().resolve()}:
        if own.is_relative_to(folder.resolve()):
            raise UsageError(f"{folder.resolve()} is your home folder, or holds it: it is never sent to hosts", what)


def left_out_words(names: Sequence[str]) -> str:
    """One line for a person; "" where nothing was left out."""
    if not names:
        return ""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    shown = f"{', '.join(names[:_SHOWN])}{more}"
    return (
        f"left out: {shown}; what looks like a secret stays here (a line `!{names[0]}` in .orchignore sends that file)"
    )


# Words that look like secrets: what an option or a variable is called, and the forms of widespread keys. Pure.
#
# names_secret("--hf-token"), names_secret("WANDB_API_KEY")      # True, True
# names_secret("--pad_token")                                    # False
# shows_secret("hf_...")                                         # True

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
    """Whether an option or a variable of this name holds a secret (not --pad-token or TOKENIZERS_PARALLELISM)."""
    return bool(_NAME.fullmatch(word) or _VARIABLE.fullmatch(word))


def shows_secret(text: str) -> bool:
    return bool(_VALUE.search(text))
