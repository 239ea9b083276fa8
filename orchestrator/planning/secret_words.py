"""Words that look like secrets: what an option or a variable is called, and the forms of widespread keys. Pure.

names_secret("--hf-token"), names_secret("WANDB_API_KEY")      # True, True
names_secret("--pad_token")                                    # False
shows_secret("hf_...")                                         # True
"""

from __future__ import annotations

import re

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
