"""Untrusted text from hosts, cleaned for terminals and pages. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# ECMA-48: CSI, OSC, DCS, APC, PM and SOS.
_ESCAPES = re.compile(r"\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b\[[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?")
# C0 except the tab, DEL and C1, line and paragraph separators, lone surrogates, and Unicode's format characters
# (category Cf): soft hyphens, joiners, bidirectional controls, tags. A joined emoji falls into its parts.
_CONTROLS = re.compile(
    "[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff"
    "\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f]"
)
NOTHING = "(its message holds no printable character)"


def clean(text: str) -> str:
    """Keeps tabs."""
    return _CONTROLS.sub("", _ESCAPES.sub("", text))


def clean_lines(text: object) -> str:
    """Keeps line breaks."""
    return "\n".join(clean(line) for line in str(text).split("\n"))


def one_line(text: object, limit: int = 300) -> str:
    """At most `limit` printable characters."""
    if isinstance(text, str) and len(text) <= limit and text.isascii() and text.isprintable() and "  " not in text:
        return text.strip()  # the usual case, thousands of times for a list of jobs
    spaced = re.sub(r"\s+", " ", str(text)[: 4 * limit])
    line = "".join(char for char in clean(spaced) if char.isprintable()).strip()
    return line if len(line) <= limit else line[: limit - 1] + "…"


def some(names: Sequence[str], count: int) -> str:
    """`a, b and 3 more`."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return ", ".join(names[:count]) + more


def message(text: object, limit: int = 300) -> str:
    """A host's error message, never empty."""
    return one_line(text, limit) or NOTHING


def place(host: str, port: int) -> str:
    """`192.168.1.41:22`, `[fd00::1]:22`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def fits(pattern: str, name: str) -> bool:
    """pattern: of OpenSSH, with `*` and `?`."""
    if not {"*", "?"} & set(pattern):
        return pattern == name
    # fnmatch would read the brackets of [host]:port as a set of characters.
    return re.fullmatch(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."), name) is not None
