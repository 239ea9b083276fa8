"""What a person calls a job: a name that its id begins with, and a note; and what folders it keeps. Pure but for what
is drawn for an id.

job_name("lr-sweep_3")          as it is, or ValueError with the form expected
job_id("lr-sweep_3", now)       lr-sweep_3-20261121-0912-k3f
"""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path

from orchestrator.text import one_line

MAX_NAME, MAX_NOTE = 40, 200
_NAME = re.compile(rf"[A-Za-z0-9]([A-Za-z0-9_-]{{0,{MAX_NAME - 2}}}[A-Za-z0-9])?")
_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"


def job_name(text: str) -> str:
    if not _NAME.fullmatch(text) or text == "latest":
        form = f"letters, digits, `_` and `-`, at most {MAX_NAME}, a letter or digit at both ends, and not `latest`"
        raise ValueError(f"{text[:60]!r} is no job's name: {form}")
    return text


def job_note(text: str) -> str:
    if not text.strip() or len(text) > MAX_NOTE or one_line(text, MAX_NOTE) != text:
        raise ValueError(f"{text[:60]!r} is no note: one printable line of at most {MAX_NOTE} characters")
    return text


def kept_folder(text: str) -> str:
    """`./out/` as `out`. Raises ValueError."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or text.startswith("/") or ".." in parts or one_line(text, MAX_NOTE) != text:
        raise ValueError(f"{text[:60]!r} is no folder in the script's working folder, like out/")
    return "/".join(parts)


def job_id(name: str, now: datetime) -> str:
    """What, when (UTC), and three letters against coincidence. name: the person's, or what the job runs."""
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", Path(name).stem)[:MAX_NAME].strip("-_") or "job"
    suffix = "".join(secrets.choice(_ID_LETTERS) for _ in range(3))
    return f"{slug}-{now:%Y%m%d-%H%M}-{suffix}"
