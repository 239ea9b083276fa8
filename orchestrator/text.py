"""Words from a host, made fit for a person's terminal and page.

What a host prints may be anything: escape sequences (ECMA-48: CSI, and the OSC, DCS, APC, PM and SOS strings), other
control characters, text that turns around the reading direction (Unicode bidirectional controls).
"""

from __future__ import annotations

import re

_ESCAPES = re.compile(r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?")
# C0 but for the tab, DEL and C1, the bidirectional controls, the invisible joiners, lone surrogates.
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def clean(text: str) -> str:
    """Without escape sequences, control characters (a tab stays) and direction overrides."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def clean_lines(text: object) -> str:
    """The same for text whose line breaks are meant."""
    return "\n".join(clean(line) for line in str(text).split("\n"))


def one_line(text: object, limit: int = 300) -> str:
    """All of it on one printable line of at most `limit` characters, cleaned."""
    spaced = re.sub(r"\s+", " ", str(text)[: 4 * limit])
    line = "".join(char for char in clean(spaced) if char.isprintable()).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"
