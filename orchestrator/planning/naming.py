"""Validates job names, notes and kept folders, and makes job ids like `lr-sweep_3-20261121-0912-k3f`."""

from __future__ import annotations

import re
import secrets
from datetime import datetime
from pathlib import Path

from orchestrator.units import one_line

MAX_NAME, MAX_NOTE = 40, 200
_NAME = re.compile(rf"[A-Za-z0-9]([A-Za-z0-9_-]{{0,{MAX_NAME - 2}}}[A-Za-z0-9])?")
_ID_LETTERS = "abcdefghijkmnpqrstuvwxyz23456789"


def job_name(text: str) -> str:
    if not _NAME.fullmatch(text) or text == "latest":
        form = f"letters, digits, `_` and `-`, at most {MAX_NAME}, a letter or digit at both ends, and not `latest`"
        raise ValueError(f"{text[:60]!r} is not a job name: {form}")
    return text


def job_note(text: str) -> str:
    if not text.strip() or len(text) > MAX_NOTE or one_line(text, MAX_NOTE) != text:
        raise ValueError(f"{text[:60]!r} is not a note: one printable line of at most {MAX_NOTE} characters")
    return text


def kept_folder(text: str) -> str:
    """`./out/` becomes `out`. Raises ValueError."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not parts or text.startswith("/") or ".." in parts or one_line(text, MAX_NOTE) != text:
        raise ValueError(f"{text[:60]!r} is not a folder in the script's working folder, like out/")
    return "/".join(parts)


def job_id(name: str, now: datetime) -> str:
    """Name, time in UTC, and three random letters. name: the user's, or of the script, module or experiment."""
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", Path(name).stem)[:MAX_NAME].strip("-_") or "job"
    suffix = "".join(secrets.choice(_ID_LETTERS) for _ in range(3))
    return f"{slug}-{now:%Y%m%d-%H%M}-{suffix}"
