"""Values as YAML that every reader understands alike: ours, PyYAML's YAML 1.1 and YAML 1.2. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

_PLAIN = re.compile(r"[A-Za-z~/][A-Za-z0-9_./~@+-]*|[0-9]+(\.[0-9]+){3}")
_OTHER = re.compile(r"(y|n|yes|no|on|off|true|false|null|~)", re.IGNORECASE)
"""What some reader takes for something else than text."""


def scalar(value: str | int) -> str:
    if isinstance(value, int):
        return str(value)
    if _PLAIN.fullmatch(value) and not _OTHER.fullmatch(value):
        return value
    return json.dumps(value, ensure_ascii=False)


def flow(values: Mapping[str, Any]) -> str:
    """`{user: me, port: 22}`"""
    return "{" + ", ".join(f"{key}: {scalar(value)}" for key, value in values.items()) + "}"
